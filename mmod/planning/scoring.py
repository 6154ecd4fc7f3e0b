"""What each choice does to a model's own output, batch by batch, with what was finished kept in a file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mmod.config import Plan, RoutingConfig, spelled
from mmod.io.journal import Journal
from mmod.io.progress import progress_bar
from mmod.model import route_, unroute_
from mmod.planning.costs import Chooser, Option, PromptLengths
from mmod.planning.divergence import outputs

Choices = dict[int, Option]
"""The option of each block that has one, by the block's index."""


@contextmanager
def routed(model: nn.Module, part: str, config: Plan | RoutingConfig) -> Iterator[None]:
    """Route a part of a dense model inside.

    Args:
        model: The model.
        part: The part.
        config: How.
    """
    route_(model, **{part: config})
    try:
        yield
    finally:
        unroute_(model)


def image_token(model: nn.Module) -> int | None:
    """Return the id of a model's image tokens, or None where it has none.

    Args:
        model: The model.
    """
    config: Any = getattr(model, "config", None)
    token = getattr(config, "image_token_id", None)
    return None if token is None else int(token)


class Scoring:
    """Tries every option in every block, alone or beside choices that are made in the other blocks.

    Args:
        model: The dense model.
        part: The part that is planned.
        names: Names of its blocks.
        options: What may be done to a block.
        chooser: Chooses tokens.
        compare: Divergence of a changed model's rows of output from its own.
        progress_file: Keeps the divergences of every batch; None keeps them nowhere.
    """

    def __init__(
        self, model: nn.Module, part: str, names: Sequence[str], options: Sequence[Option], chooser: Chooser,
        compare: Callable[[Tensor, Tensor], Tensor], progress_file: str | Path | None,
    ) -> None:  # fmt: skip
        self.model, self.part, self.options, self.chooser, self.compare = model, part, options, chooser, compare
        self.depth, self.blocks = len(names), range(chooser.first, len(names))
        self.token = image_token(model)
        self.lengths = PromptLengths(self.token)
        self.rows = 0
        self.example: Any = None
        identity: dict[str, Any] = {
            "blocks": list(names), "options": [list(option) for option in options], "part": part,
            "router": str(spelled(chooser.config.router)), "divergence": compare.__name__,
        }  # fmt: skip
        self.journal = Journal(progress_file, identity, "search")

    def run(
        self, batches: Iterable[Any], base: Choices, begin: Callable[[], object] = lambda: None
    ) -> tuple[tuple[tuple[float, ...], ...], float]:
        """Return the score of each option in each block, and the divergence of the base.

        The score is how much further from its own output the model is with that option in that block than with the
        block dense, where the other blocks are as in the base.

        Args:
            batches: Calibration batches.
            base: Choices that are made; empty for a dense model, from which every option is tried alone.
            begin: Called when the first batch is known, before anything is tried.

        Raises:
            ValueError: No batches, or a progress file of another search.
        """
        trials = [{**base, block: option} for block in self.blocks for option in self.options]
        # With the block dense, and as the base has it: each is tried once.
        trials += [{at: option for at, option in base.items() if at != block} for block in base]
        trials.append(base)
        configs = {_text(trial): self._config(trial) for trial in trials if trial}
        distinct = list(configs)
        total = len(batches) * len(distinct) if isinstance(batches, Sized) else None
        kept = [record for record in self.journal.records if record["base"] == _text(base)]
        totals, rows, place = [0.0] * len(distinct), 0, -1
        with progress_bar(desc="search plan", total=total, leave=False) as bar:
            for place, batch in enumerate(batches):
                self.example = batch if self.example is None else self.example
                if not base and isinstance(batch, Mapping) and "input_ids" in batch:
                    self.lengths.add(batch)
                own_RF = outputs(self.model, batch, self.part, self.token)
                size = f"{float(own_RF.double().abs().mean()):.6e}"
                if not place:
                    begin()
                if place < len(kept):
                    self.journal.check(kept[place]["size"] == size, f"of other weights, or another batch {place}")
                    divergences = kept[place]["divergences"]
                    bar.update(len(distinct))
                else:
                    divergences = []
                    for text in distinct:
                        divergences.append(self._divergence(own_RF, configs[text], batch))
                        bar.update()
                    self.journal.add({"base": _text(base), "size": size, "divergences": divergences})
                totals = [total + divergence for total, divergence in zip(totals, divergences, strict=True)]
                rows += len(own_RF)
        _check_rows(rows)
        self.journal.check(len(kept) <= place + 1, f"it has {len(kept)} batches, and there are {place + 1}")
        self.rows = rows
        means = {text: total / rows for text, total in zip(distinct, totals)} | {_text({}): 0.0}
        dense = {
            block: means[_text({at: option for at, option in base.items() if at != block})] for block in self.blocks
        }
        scores = tuple(
            tuple(means[_text({**base, block: option})] - dense[block] for option in self.options)
            for block in self.blocks
        )
        # No option can be had in a block that none can be tried in.
        scores = ((math.inf,) * len(self.options),) * self.chooser.first + scores
        return scores, means[_text(base)]

    def whole(self, batches: Iterable[Any], config: Plan | RoutingConfig) -> float:
        """Return the mean divergence of the model's rows of output when it is routed.

        Args:
            batches: Batches.
            config: How to route it.
        """
        total, rows = 0.0, 0
        for batch in batches:
            own_RF = outputs(self.model, batch, self.part, self.token)
            total += self._divergence(own_RF, config, batch)
            rows += len(own_RF)
        _check_rows(rows)
        return total / rows

    def _divergence(self, own_RF: Tensor, config: Plan | RoutingConfig, batch: Any) -> float:
        with routed(self.model, self.part, config):
            changed_RF = outputs(self.model, batch, self.part, self.token)
        return float(self.compare(own_RF, changed_RF).double().sum())

    def _config(self, trial: Choices) -> RoutingConfig:
        return RoutingConfig.from_plan(plan_of(trial, self.depth, self.chooser))


def _check_rows(rows: int) -> None:
    if not rows:
        raise ValueError("no calibration samples: batches is empty, or holds nothing to compare")


def plan_of(choices: Choices, depth: int, chooser: Chooser) -> Plan:
    """Return choices as a plan.

    Args:
        choices: The option of each block that has one.
        depth: Number of blocks of the model.
        chooser: Chooses tokens.
    """
    rows = [(block, *choices[block]) for block in sorted(choices)]
    blocks, capacities, operators, contexts = zip(*rows)
    return Plan(blocks, capacities, depth, operators, contexts, *chooser)


def _text(choices: Choices) -> str:
    return json.dumps({str(block): list(choices[block]) for block in sorted(choices)})
