"""Divergence that each option in each block causes, batch by batch, with progress saved in a file."""

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
from mmod.planning.costs import Option, PromptLengths, SelectionRule
from mmod.planning.divergence import outputs

Choices = dict[int, Option]
"""Option of each routed block, by the block's index."""


@contextmanager
def routed(model: nn.Module, part: str, config: Plan | RoutingConfig) -> Iterator[None]:
    """Route a part of a dense model within the context."""
    route_(model, **{part: config})
    try:
        yield
    finally:
        unroute_(model)


def image_token(model: nn.Module) -> int | None:
    """Return the id of a model's image tokens; None for models without them."""
    config: Any = getattr(model, "config", None)
    token = getattr(config, "image_token_id", None)
    return None if token is None else int(token)


class Scoring:
    """Scores every option in every block, alone or combined with a base plan."""

    def __init__(
        self, model: nn.Module, part: str, names: Sequence[str], options: Sequence[Option], rule: SelectionRule,
        compare: Callable[[Tensor, Tensor], Tensor], progress_file: str | Path | None,
    ) -> None:  # fmt: skip
        self.model, self.part, self.options, self.rule, self.compare = model, part, options, rule, compare
        self.depth, self.blocks = len(names), range(rule.first, len(names))
        self.token = image_token(model)
        self.lengths = PromptLengths(self.token)
        self.rows = 0
        self.example: Any = None
        identity: dict[str, Any] = {
            "blocks": list(names), "options": [list(option) for option in options], "part": part,
            "router": str(spelled(rule.config.router)), "divergence": compare.__name__,
        }  # fmt: skip
        self.journal = Journal(progress_file, identity, "search")

    def run(
        self, batches: Iterable[Any], base: Choices, begin: Callable[[], object] = lambda: None
    ) -> tuple[tuple[tuple[float, ...], ...], float]:
        """Return the score of each option in each block, and the divergence of the base plan.

        A score is the divergence with the option in its block minus the divergence with that block dense. All other
        blocks are as in the base plan.
        """
        trials = [{**base, block: option} for block in self.blocks for option in self.options]
        # The base plan without each of its blocks is the reference of that block's scores.
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
                dense_RF = outputs(self.model, batch, self.part, self.token)
                size = f"{float(dense_RF.double().abs().mean()):.6e}"
                if not place:
                    begin()
                if place < len(kept):
                    self.journal.check(kept[place]["size"] == size, f"of other weights, or another batch {place}")
                    divergences = kept[place]["divergences"]
                    bar.update(len(distinct))
                else:
                    divergences = []
                    for text in distinct:
                        divergences.append(self._divergence(dense_RF, configs[text], batch))
                        bar.update()
                    self.journal.add({"base": _text(base), "size": size, "divergences": divergences})
                totals = [total + divergence for total, divergence in zip(totals, divergences, strict=True)]
                rows += len(dense_RF)
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
        # Blocks before the first one that can be routed must stay dense.
        scores = ((math.inf,) * len(self.options),) * self.rule.first + scores
        return scores, means[_text(base)]

    def plan_divergence(self, batches: Iterable[Any], config: Plan | RoutingConfig) -> float:
        """Return the mean divergence of the outputs when the model is routed by a plan or config."""
        total, rows = 0.0, 0
        for batch in batches:
            dense_RF = outputs(self.model, batch, self.part, self.token)
            total += self._divergence(dense_RF, config, batch)
            rows += len(dense_RF)
        _check_rows(rows)
        return total / rows

    def _divergence(self, dense_RF: Tensor, config: Plan | RoutingConfig, batch: Any) -> float:
        with routed(self.model, self.part, config):
            changed_RF = outputs(self.model, batch, self.part, self.token)
        return float(self.compare(dense_RF, changed_RF).double().sum())

    def _config(self, trial: Choices) -> RoutingConfig:
        return RoutingConfig.from_plan(plan_of(trial, self.depth, self.rule))


def _check_rows(rows: int) -> None:
    if not rows:
        raise ValueError("no calibration samples: batches is empty, or has no outputs to compare")


def plan_of(choices: Choices, depth: int, rule: SelectionRule) -> Plan:
    """Return the plan of the options of single blocks."""
    rows = [(block, *choices[block]) for block in sorted(choices)]
    blocks, capacities, operators, contexts = zip(*rows)
    return Plan(blocks, capacities, depth, operators, contexts, *rule)


def _text(choices: Choices) -> str:
    return json.dumps({str(block): list(choices[block]) for block in sorted(choices)})
