"""Options of routing a block, what they cost in every block, and the best set of them within a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from mmod.adapters import BlockStack
from mmod.analysis.flop_report import FlopCounts
from mmod.analysis.flops import flops
from mmod.analysis.prefill import prefill_flops
from mmod.analysis.timing import interleave, relative_times
from mmod.config import Plan, RoutingConfig, Score
from mmod.model import route_, unroute_
from mmod.values import check_value

COSTS = ("flops", "image_flops", "cache", "milliseconds")
# The knapsack divides the budget into this many steps. Costs are rounded up, so a solution never exceeds it.
_STEPS = 20_000
_ROUNDS = 7

Clock = Callable[[Sequence[RoutingConfig]], tuple[float, list[float]]]
"""Returns the dense model's milliseconds, and each routing's time as a share of them."""


class Option(NamedTuple):
    """One way to route a block.

    Args:
        capacity: Share of tokens kept.
        operator: What skipped tokens miss, see `RoutingConfig.operator`.
        context: What kept tokens attend to, see `RoutingConfig.context`.
    """

    capacity: float
    operator: str = "block"
    context: str = "kept"

    def __str__(self) -> str:
        """Return a short name."""
        return f"{self.operator}@{self.capacity:g}" + (" all" if self.context == "all" else "")

    def config(self, blocks: Iterable[int], router: Score) -> RoutingConfig:
        """Return the config that routes some blocks this way; `router` selects tokens at a capacity above 0."""
        return RoutingConfig(blocks=tuple(blocks), router=router, **self._asdict())


@dataclass(frozen=True)
class BlockCosts:
    """Costs by block.

    Args:
        options: Costs of the options, by block.
        dense: Costs of the dense blocks.
        total: Cost of the dense model, including everything outside the blocks.
    """

    options: tuple[tuple[float, ...], ...]
    dense: tuple[float, ...]
    total: float

    @property
    def least_share(self) -> float:
        """Minimum share of the dense model's cost: the cheapest option in every block."""
        return 1 - sum(dense - min(dense, *row) for dense, row in zip(self.dense, self.options)) / self.total

    def check(self, budget: float) -> None:
        """Raise a ValueError unless some plan has this share of the dense model's cost, or less."""
        check_value("budget", budget, float)
        if not self.least_share <= budget < 1:
            raise ValueError(
                f"budget must lie in [{self.least_share:.4f}, 1) of the dense model's {self.total:.4g}, the range of "
                f"these options, got {budget!r}"
            )

    def timed(self, dense: float, shares: Sequence[float]) -> BlockCosts:
        """Return milliseconds: the time that an option saves is split over blocks by the FLOPs that it saves.

        Args:
            dense: Milliseconds of the dense model.
            shares: Times with an option in every block, as shares of it.
        """
        block_times = [dense * flops / sum(self.dense) for flops in self.dense]
        columns = []
        for item, share in enumerate(shares):
            saved = [flops - row[item] for flops, row in zip(self.dense, self.options)]
            # An option that saves no FLOPs may still save time, which is then split evenly.
            parts = [flops / sum(saved) for flops in saved] if sum(saved) else [1 / len(saved)] * len(saved)
            columns.append([block - (dense - dense * share) * part for block, part in zip(block_times, parts)])
        return BlockCosts(tuple(zip(*columns)), tuple(block_times), dense)


def block_costs(
    model: nn.Module, part: str, stack: BlockStack, configs: Sequence[RoutingConfig], cost: str,
    lengths: tuple[int, int], batch: Any,
) -> BlockCosts:  # fmt: skip
    """Return the cost of every option in every block, from one count of the model per option.

    Args:
        configs: The configs that route all blocks by one option.
        lengths: Text and image tokens of a prompt, for language models.
        batch: Inputs of the size to count, for other models.
    """
    columns: list[list[float]] = []
    for config in configs:
        with routed(model, part, config):
            report = prefill_flops(model, *lengths) if stack.language else _counted(model, batch)
        blocks = [row for row in report.blocks if row.name in stack.names]
        # How many blocks read importance depends on the plan, so its cost is left out.
        columns.append([float(row.cached if cost == "cache" else row.routed - row.importance) for row in blocks])
        dense = tuple(float(row.tokens if cost == "cache" else row.dense) for row in blocks)
    costs = BlockCosts(tuple(zip(*columns)), dense, sum(dense) if cost == "cache" else float(report.dense))
    if cost != "image_flops":
        return costs
    # What image tokens add is the cost minus that of the prompt's text alone.
    text = prefill_flops(model, lengths[0])
    text_costs = [row.dense for row in text.blocks]
    added = tuple(tuple(share - less for share in row) for row, less in zip(costs.options, text_costs))
    dense = tuple(share - less for share, less in zip(costs.dense, text_costs))
    return BlockCosts(added, dense, costs.total - text.dense)


def _counted(model: nn.Module, batch: Any) -> FlopCounts:
    if isinstance(batch, Mapping):
        return flops(model, {name: value[:1] for name, value in batch.items() if isinstance(value, Tensor)})
    channels, height, width = batch.shape[1:]
    return flops(model, (channels, height, width))


@contextmanager
def routed(model: nn.Module, part: str, config: Plan | RoutingConfig) -> Iterator[None]:
    """Route a part of a dense model within the context."""
    route_(model, **{part: config})
    try:
        yield
    finally:
        unroute_(model)


def stopwatch(model: nn.Module, part: str, batch: Any) -> Clock:
    """Return a function that times one forward pass; for a language model the prefill, vision tower included.

    Routed models and the dense model are timed in turns, so that the machine's load affects all of them equally.
    """

    def run() -> None:
        if not isinstance(batch, Mapping):
            model(batch)
            return
        arguments = {name: value for name, value in batch.items() if name != "labels"}
        generates: Any = getattr(model, "can_generate", bool)
        model(**arguments, **({"use_cache": True, "logits_to_keep": 1} if generates() else {}))

    def measure(configs: Sequence[RoutingConfig]) -> tuple[float, list[float]]:
        device = next(model.parameters()).device
        times: dict[int, list[float]] = {place: [] for place in range(-1, len(configs))}
        for _ in range(_ROUNDS):
            for place, config in enumerate([None, *configs], -1):
                with nullcontext() if config is None else routed(model, part, config):
                    times[place] += interleave({0: run}, seconds=0, rounds=1, warmup=1, device=device)[0]
        speedups = relative_times(times, -1)
        return speedups[-1][0], [1 / speedups[place][1] for place in range(len(configs))]

    return measure


def best_choices(losses: Sequence[Sequence[float]], costs: Sequence[Sequence[float]], budget: float) -> list[int]:
    """Return the index of one item per class: the lowest sum of losses with costs within the budget.

    A multiple-choice knapsack, solved by dynamic programming.

    Example:
        >>> best_choices([[0.0, 1.0], [0.0, 3.0]], [[5, 1], [5, 1]], budget=6)
        [1, 0]
    """
    least = sum(min(row) for row in costs)
    # The tolerance covers rounding: budgets are shares of sums.
    if least > budget * (1 + 1e-9):
        raise ValueError(f"a budget of {budget:g} is out of reach: the cheapest choices cost {least:g}")
    # Sizes are relative to the cheapest item of a class, which always fits.
    room = max(budget - least, 0)

    def steps_of(cost: float) -> int:
        if cost <= 0:
            return 0
        return _STEPS + 1 if cost > room else max(1, math.ceil(cost / room * _STEPS - 1e-9))

    sizes = [[steps_of(cost - min(row)) for cost in row] for row in costs]
    best, choices = np.zeros(_STEPS + 1), []
    for row, size in zip(losses, sizes):
        totals = np.full((len(row), _STEPS + 1), np.inf)
        for item, (loss, steps) in enumerate(zip(row, size)):
            if steps <= _STEPS:
                totals[item, steps:] = best[: _STEPS + 1 - steps] + loss
        choices.append(totals.argmin(0))
        best = totals.min(0)
    # Walk back from the full budget to read off the chosen items.
    place, chosen = _STEPS, []
    for size, items in zip(reversed(sizes), reversed(choices)):
        chosen.append(int(items[place]))
        place -= size[chosen[-1]]
    return chosen[::-1]
