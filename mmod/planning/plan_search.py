"""Options of routing a block: their costs, the best plan within a budget, and the result of a search for it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from mmod.adapters import BlockStack
from mmod.analysis.flop_count import Size, flops, flops_of_each
from mmod.analysis.prefill import Prompt
from mmod.analysis.table import DENSE
from mmod.analysis.timing import Reading, relative_times, sample_times
from mmod.config import RoutingConfig, Score
from mmod.io.progress import Stages
from mmod.io.tables import markdown_table
from mmod.lazy import name_missing_extra
from mmod.methods.route import Route
from mmod.model import change_, copy_of
from mmod.planning.candidate import PlanOptions
from mmod.planning.divergence import routed
from mmod.values import brief, check_value

COSTS = ("flops", "image_flops", "cache", "milliseconds")
# The knapsack divides the budget into this many steps. Costs are rounded up, so a solution never exceeds it.
_STEPS = 20_000
_ROUNDS = 7
_CORRECTIONS = 6
# Relative error of a plan's time at which the search for a better fit stops.
_TOLERANCE = 0.05

Clock = Callable[[Sequence[RoutingConfig]], tuple[float, list[float]]]
"""Returns the dense model's milliseconds, and each routing's time as a share of them."""


class Option(NamedTuple):
    """One way to route a block, by fields of `RoutingConfig`."""

    capacity: float
    operator: str = "block"
    context: str = "kept"

    def __str__(self) -> str:
        text = f"{self.operator}@{self.capacity:g}"
        if self.context == "all":
            text += " all"
        return text

    def config(self, blocks: Iterable[int], router: Score) -> RoutingConfig:
        """Return the config that routes some blocks this way; `router` selects tokens at a capacity above 0."""
        indices = tuple(blocks)
        # One for each block: as one number for all, 0 is refused.
        each = (self.capacity,) * len(indices)
        return RoutingConfig(blocks=indices, router=router, capacity=each, operator=self.operator, context=self.context)


def named_options(options: PlanOptions) -> list[Option] | None:
    """Return the options that a search names; None for all that the blocks support."""
    if options.options is None:
        return None
    return [Option(*option) for option in options.options]


Choices = tuple["Option | None", ...]
"""The option of each block; None where it stays dense."""


@dataclass(frozen=True)
class BlockCosts:
    """Costs of the options and of the dense blocks, by block; `total` is that of the whole dense model."""

    options: tuple[tuple[float, ...], ...]
    dense: tuple[float, ...]
    total: float

    @property
    def least_share(self) -> float:
        """Minimum share of the dense model's cost: the cheapest option in every block."""
        return 1 - sum(dense - min(dense, *row) for dense, row in zip(self.dense, self.options)) / self.total

    def check(self, budget: float, milliseconds: bool = False) -> None:
        """Raise a ValueError unless some plan has this share of the dense model's cost, or less.

        Args:
            milliseconds: Costs are times, in which the budget was asked for.
        """
        check_value("budget", budget, float)
        if self.least_share <= budget < 1:
            return
        valid = f"[{self.least_share:.4f}, 1) of the dense model's {self.total:.4g}"
        given = brief(budget)
        if milliseconds:
            valid = f"[{self.least_share * self.total:.4g}, {self.total:.4g}) milliseconds"
            given = f"{budget * self.total:.4g}"
        raise ValueError(f"budget must lie in {valid}, the range of these options, got {given}")

    def timed(self, dense: float, shares: Sequence[float]) -> BlockCosts:
        """Return milliseconds: the time that an option saves is split over blocks by the FLOPs that it saves.

        `shares` are times with an option in every block, as shares of the dense model's milliseconds.
        """
        block_times = [dense * flops / sum(self.dense) for flops in self.dense]
        columns = []
        for item, share in enumerate(shares):
            saved = [flops - row[item] for flops, row in zip(self.dense, self.options)]
            total = sum(saved)
            # An option that saves no FLOPs may still save time, which is then split evenly.
            parts = [1 / len(saved)] * len(saved)
            if total:
                parts = [flops / total for flops in saved]
            saved_time = dense - dense * share
            columns.append([block - saved_time * part for block, part in zip(block_times, parts)])
        return BlockCosts(tuple(zip(*columns)), tuple(block_times), dense)


def block_costs(
    model: nn.Module,
    part: str,
    stack: BlockStack,
    configs: Sequence[RoutingConfig],
    cost: str,
    lengths: tuple[int, int],
    batch: object,
) -> BlockCosts:
    """Return the cost of every option in every block, from one count of the model per option and one without.

    Args:
        configs: The configs that route all blocks by one option.
        lengths: Text and image tokens of a prompt, for language models.
        batch: Inputs of the size to count, for other models.
    """
    columns: list[list[float]] = []
    size = Prompt(*lengths) if stack.language else _size_of(batch)
    for report in flops_of_each(model, size, (routed(model, part, config) for config in configs)):
        blocks = [row for row in report.blocks if row.name in stack.names]
        if cost == "cache":
            columns.append([float(row.cached) for row in blocks])
            dense = tuple(float(row.tokens) for row in blocks)
            total = sum(dense)
        else:
            # How many blocks read importance depends on the plan, so its cost is left out.
            columns.append([float(row.routed - row.importance) for row in blocks])
            dense = tuple(float(row.dense) for row in blocks)
            total = float(report.dense)
    costs = BlockCosts(tuple(zip(*columns)), dense, total)
    if cost != "image_flops":
        return costs
    # What image tokens add is the cost minus that of the prompt's text alone.
    text = flops(model, Prompt(lengths[0]))
    text_costs = [row.dense for row in text.blocks]
    added = tuple(tuple(share - less for share in row) for row, less in zip(costs.options, text_costs))
    dense = tuple(share - less for share, less in zip(costs.dense, text_costs))
    return BlockCosts(added, dense, costs.total - text.dense)


def _size_of(batch: Any) -> Size:
    """Return what `flops` takes for the first sample of a batch."""
    if isinstance(batch, Mapping):
        return {name: value[:1] for name, value in batch.items() if isinstance(value, Tensor)}
    channels, height, width = batch.shape[1:]
    return channels, height, width


def run_batch(model: nn.Module, batch: object) -> None:
    """Run one forward pass, for a language model the prefill of a batch of prompts, vision tower included."""
    if not isinstance(batch, Mapping):
        model(batch)
        return
    arguments = {name: value for name, value in batch.items() if name != "labels"}
    generates = getattr(model, "can_generate", bool)
    if generates():
        model(**arguments, use_cache=True, logits_to_keep=1)
    else:
        model(**arguments)


def stopwatch(model: nn.Module, part: str, batch: object) -> Clock:
    """Return a function that times models of several plans, each in one forward pass over a batch.

    For a language model that is the prefill, vision tower included. The dense model and copies that share its weights
    are timed in turns, so that the load of the machine affects all of them equally.

    Returns:
        A function of routing configs. It returns milliseconds of the dense model, and for each config the share of
        the dense time.
    """

    def measure(configs: Sequence[RoutingConfig]) -> tuple[float, list[float]]:
        models = {DENSE: model}
        for number, config in enumerate(configs):
            models[str(number)] = change_(copy_of(model), Route({part: config}))
        readings = {name: {part: Reading([partial(run_batch, timed, batch)], 1)} for name, timed in models.items()}
        device = next(model.parameters()).device
        with Stages("search") as stages:
            stages.begin("timing", work=1.0)
            by_round = sample_times(readings, rounds=range(_ROUNDS), device=device, callback=stages.update)[part]
        times = relative_times(by_round, DENSE)
        milliseconds, _ = times.pop(DENSE)
        return milliseconds, [1 / speedup for _, speedup in times.values()]

    return measure


def best_choices(losses: Sequence[Sequence[float]], costs: Sequence[Sequence[float]], budget: float) -> list[int]:
    """Choose one item per class with the lowest sum of losses under a budget of cost; return their indices.

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
        if cost > room:
            return _STEPS + 1
        return max(1, math.ceil(cost / room * _STEPS - 1e-9))

    sizes = [[steps_of(cost - min(row)) for cost in row] for row in costs]
    best = np.zeros(_STEPS + 1)
    choices = []
    for row, size in zip(losses, sizes):
        totals = np.full((len(row), _STEPS + 1), np.inf)
        for item, (loss, steps) in enumerate(zip(row, size)):
            if steps <= _STEPS:
                totals[item, steps:] = best[: _STEPS + 1 - steps] + loss
        choices.append(totals.argmin(0))
        best = totals.min(0)
    # Walk back from the full budget to read off the chosen items.
    steps_left = _STEPS
    chosen: list[int] = []
    for size, items in zip(reversed(sizes), reversed(choices)):
        chosen.append(int(items[steps_left]))
        steps_left -= size[chosen[-1]]
    return chosen[::-1]


@dataclass(frozen=True)
class PlanSearch:
    """Scores and costs of all options, and the best plan; `print(search)` shows a table.

    Args:
        scores: Divergence that an option adds to the dense model's, or to that of the previous round's plan, by block.
        budget: Requested share of the dense model's cost.
        cost: Unit of the costs: "flops", "image_flops", "cache" or "milliseconds".
        rows: Number of output rows (images, or text tokens) that scores are means of.
        router: The score by which a capacity above 0 selects tokens.
        divergence: Divergence of the complete plan, if a scoring round measured it.
        time: Milliseconds of one forward pass with the plan, for a time budget.
    """

    names: tuple[str, ...]
    options: tuple[Option, ...]
    scores: tuple[tuple[float, ...], ...]
    costs: BlockCosts
    budget: float
    cost: str
    rows: int
    router: Score
    plan: RoutingConfig
    divergence: float | None = None
    time: float | None = None

    def plan_for(self, budget: float) -> RoutingConfig:
        """Return the plan with the lowest sum of scores under another share of the cost, from the existing scores."""
        return best_plan(self.scores, self.costs, self.options, budget, self.router)

    def share(self, plan: RoutingConfig) -> float:
        """Return a plan's cost as a share of the dense model's."""
        option_of = self._option_of(plan).items()
        saved = sum(self.costs.dense[block] - self.costs.options[block][item] for block, item in option_of)
        return 1 - saved / self.costs.total

    def score(self, plan: RoutingConfig) -> float:
        """Return the sum of the scores of a plan's options."""
        return sum(self.scores[block][item] for block, item in self._option_of(plan).items())

    def _option_of(self, plan: RoutingConfig) -> dict[int, int]:
        """Return the option's index by routed block of a plan."""
        options = {block: option for block, option in enumerate(choices_of(plan)) if option is not None}
        has_all = set(options.values()).issubset(self.options)
        if plan.router != self.router or plan.depth != len(self.names) or not has_all:
            raise ValueError(
                f"this search has plans of {len(self.names)} blocks with the router {self.router.name!r} and the "
                f"options {', '.join(map(str, self.options))}, got\n{plan}"
            )
        return {block: self.options.index(option) for block, option in options.items()}

    def frontier(self, steps: int = 20) -> list[tuple[float, float]]:
        """Return the Pareto front, most expensive first: share of the cost and sum of scores at even budgets."""
        least = self.costs.least_share
        # max: a budget rounded below the minimum would be refused.
        plans = [self.plan_for(max(least, 1 - (1 - least) * step / steps)) for step in range(1, steps + 1)]
        return [(self.share(plan), self.score(plan)) for plan in plans]

    def __str__(self) -> str:
        rows = [(name, *(f"{score:.3e}" for score in row)) for name, row in zip(self.names, self.scores)]
        plan = self.plan
        share = f"{self.share(plan):.4f} of the dense model's {self.cost}"
        if self.time is not None:
            share = f"{self.time:.4g} of the dense model's {self.costs.total:.4g} milliseconds"
        measured = ""
        if self.divergence is not None:
            measured = f", of the complete plan {self.divergence:.4g}"
        return (
            f"{plan}\n{share}, sum of divergences {self.score(plan):.4g}{measured}\n\n"
            f"divergence added by each option, mean over {self.rows} rows\n\n"
            f"{markdown_table(['block', *map(str, self.options)], rows)}"
        )

    _repr_markdown_ = __str__  # Notebooks show it.

    @name_missing_extra()
    def plot(self, path: str | Path, overwrite: bool = False) -> None:
        """Draw the scores of all options, with the plan's marked, and the Pareto front."""
        from mmod.analysis.style import new_figure, save_figure

        figure = new_figure(11, 4)
        left, right = figure.subplots(1, 2)
        option_of = self._option_of(self.plan)
        negative = min(map(min, self.scores)) < 0
        for item, option in enumerate(self.options):
            (line,) = left.plot([row[item] for row in self.scores], label=str(option), linewidth=1)
            marked = [block for block, index in option_of.items() if index == item]
            left.plot(marked, [self.scores[block][item] for block in marked], "o", color=line.get_color())
        yscale = "symlog" if negative else "log"
        left.set(xlabel="block", ylabel="divergence added by one option", yscale=yscale)
        left.legend(title="dots: the plan", fontsize="small")
        shares, scores = zip(*self.frontier())
        right.plot(shares, scores, ".-")
        right.axvline(self.budget, color="grey", linewidth=1)
        right.set(xlabel=f"share of the dense model's {self.cost}", ylabel="sum of divergences")
        save_figure(figure, path, overwrite)


def best_plan(
    scores: Sequence[Sequence[float]], costs: BlockCosts, options: Sequence[Option], budget: float, router: Score
) -> RoutingConfig:
    """Return the plan with the lowest sum of scores under a budget."""
    costs.check(budget)
    outside = costs.total - sum(costs.dense)
    losses = [(0.0, *row) for row in scores]
    sizes = [(dense, *row) for dense, row in zip(costs.dense, costs.options)]
    # The first of each block's choices is to stay dense.
    numbered: list[Option | None] = [None, *options]
    chosen = best_choices(losses, sizes, budget * costs.total - outside)
    return plan_of(tuple(numbered[item] for item in chosen), router)


def plan_of(choices: Choices, router: Score) -> RoutingConfig:
    """Return the plan of the options of single blocks."""
    rows = [(block, *option) for block, option in enumerate(choices) if option is not None]
    blocks, capacities, operators, contexts = zip(*rows)
    plan = RoutingConfig(
        router=router,
        blocks=blocks,
        capacity=capacities,
        operator=operators,
        context=contexts,
        depth=len(choices),
    )
    return plan.resolved()


def choices_of(plan: RoutingConfig) -> Choices:
    """Return the options of a plan."""
    option_of = {row.block: Option(row.capacity, row.operator, row.context) for row in plan.rows}
    assert plan.depth is not None
    return tuple(map(option_of.get, range(plan.depth)))


def in_time(search: PlanSearch, measure: Clock) -> PlanSearch:
    """Return a search whose plan meets the time budget as measured.

    Block times do not add up exactly. So the plan for the estimated budget is measured, and the estimate is corrected
    until the measured time fits or no other plan lies between. Among the measured plans within 5 % above the budget,
    the one with the lowest sum of scores wins.
    """
    budget = search.budget
    low = search.costs.least_share
    high = 1.0
    target = budget
    shares: dict[Choices, float] = {}
    for _ in range(_CORRECTIONS):
        plan = search.plan_for(target)
        choices = choices_of(plan)
        if choices not in shares:
            shares[choices] = measure([plan])[1][0]
        share = shares[choices]
        if abs(share / budget - 1) <= _TOLERANCE:
            break
        if share > budget:
            high = target
        else:
            low = target
        # Scale the saving by the observed error; bisect if that leaves the bracket, or nothing was saved.
        if share < 1:
            target = 1 - (1 - target) * (1 - budget) / (1 - share)
        if share >= 1 or not low < target < high:
            target = (low + high) / 2
    fitting = [choices for choices, share in shares.items() if share <= budget * (1 + _TOLERANCE)]
    if not fitting:
        total = search.costs.total
        least = min(shares.values())
        raise ValueError(
            f"a budget of {budget * total:.4g} ms is out of reach: the fastest plan took {least * total:.4g} ms"
        )
    best = min(fitting, key=lambda choices: search.score(plan_of(choices, search.router)))
    plan = plan_of(best, search.router)
    return dataclasses.replace(search, plan=plan, divergence=None, time=shares[best] * search.costs.total)
