"""Result of a plan search: scores and costs of all options, the best plan under any budget, and the Pareto front."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from mmod.config import Plan, RoutingConfig, Score
from mmod.extras import name_missing_extra
from mmod.io.tables import text_table
from mmod.planning.costs import BlockCosts, Clock, Option, best_choices

_CORRECTIONS = 6
# Relative error of a plan's time at which the search for a better fit stops.
_TOLERANCE = 0.05


@dataclass(frozen=True)
class PlanSearch:
    """Scores and costs of all options, and the best plan; `print(search)` shows a table.

    Args:
        names: Module names of the blocks, in order.
        options: Ways to route a block.
        scores: Divergence that an option adds to the dense model's, or to that of the previous round's plan, by block.
        costs: Their costs.
        budget: Requested share of the dense model's cost.
        cost: Unit of the costs: "flops", "image_flops", "cache" or "milliseconds".
        rows: Number of output rows (images, or text tokens) that scores are means of.
        router: The score by which a capacity above 0 selects tokens.
        plan: The best plan under the budget.
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
    plan: Plan
    divergence: float | None = None
    time: float | None = None

    @property
    def config(self) -> RoutingConfig:
        """The config that routes by the plan."""
        return RoutingConfig.from_plan(self.plan)

    def plan_for(self, budget: float) -> Plan:
        """Return the plan with the lowest sum of scores under another budget, from the existing scores and times.

        Args:
            budget: Share of the dense model's cost, in (0, 1); for milliseconds it is an estimate.
        """
        return best_plan(self.scores, self.costs, self.options, budget, self.router)

    def share(self, plan: Plan) -> float:
        """Return a plan's cost as a share of the dense model's."""
        option_of = self._option_of(plan).items()
        saved = sum(self.costs.dense[block] - self.costs.options[block][item] for block, item in option_of)
        return 1 - saved / self.costs.total

    def score(self, plan: Plan) -> float:
        """Return the sum of the scores of a plan's options."""
        return sum(self.scores[block][item] for block, item in self._option_of(plan).items())

    def _option_of(self, plan: Plan) -> dict[int, int]:
        """Return the option's index by routed block of a plan."""
        options = {block: Option(capacity, operator, context) for block, capacity, operator, context in plan.rows}
        unknown = [f"{option} in block {block}" for block, option in options.items() if option not in self.options]
        if plan.router not in (None, self.router):
            raise ValueError(f"this search uses the router {self.router.name!r}, and the plan {plan.router.name!r}")
        if unknown or plan.depth != len(self.names):
            raise ValueError(f"this search has no {', '.join(unknown) or f'plan of {plan.depth} blocks'}")
        return {block: self.options.index(option) for block, option in options.items()}

    def frontier(self, steps: int = 20) -> list[tuple[float, float]]:
        """Return the Pareto front, most expensive first: share of the cost and sum of scores at even budgets."""
        least = self.costs.least_share
        # max: a budget rounded below the minimum would be refused.
        plans = [self.plan_for(max(least, 1 - (1 - least) * step / steps)) for step in range(1, steps + 1)]
        return [(self.share(plan), self.score(plan)) for plan in plans]

    def __str__(self) -> str:
        """Return the plan, its cost, and the scores as a table."""
        rows = [(name, *(f"{score:.3e}" for score in row)) for name, row in zip(self.names, self.scores)]
        plan = self.plan
        share = f"{self.share(plan):.4f} of the dense model's {self.cost}"
        if self.time is not None:
            share = f"{self.time:.4g} of the dense model's {self.costs.total:.4g} milliseconds"
        measured = "" if self.divergence is None else f", of the complete plan {self.divergence:.4g}"
        return (
            f"{plan}\n{share}, sum of divergences {self.score(plan):.4g}{measured}\n\n"
            f"divergence added by each option, mean over {self.rows} rows\n"
            f"{text_table(['block', *map(str, self.options)], rows)}"
        )

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    @name_missing_extra()
    def plot(self, path: str | Path) -> None:
        """Draw the scores of all options, with the plan's marked, and the Pareto front."""
        from mmod.analysis.style import new_figure

        figure = new_figure(11, 4)
        left, right = figure.subplots(1, 2)
        option_of = self._option_of(self.plan)
        negative = min(map(min, self.scores)) < 0
        for item, option in enumerate(self.options):
            (line,) = left.plot([row[item] for row in self.scores], label=str(option), linewidth=1)
            marked = [block for block, index in option_of.items() if index == item]
            left.plot(marked, [self.scores[block][item] for block in marked], "o", color=line.get_color())
        left.set(xlabel="block", ylabel="divergence added by one option", yscale="symlog" if negative else "log")
        left.legend(title="dots: the plan", fontsize="small")
        shares, scores = zip(*self.frontier())
        right.plot(shares, scores, ".-")
        right.axvline(self.budget, color="grey", linewidth=1)
        right.set(xlabel=f"share of the dense model's {self.cost}", ylabel="sum of divergences")
        figure.savefig(path)


def best_plan(
    scores: Sequence[Sequence[float]], costs: BlockCosts, options: Sequence[Option], budget: float, router: Score
) -> Plan:
    """Return the plan with the lowest sum of scores under a budget."""
    costs.check(budget)
    outside = costs.total - sum(costs.dense)
    losses = [(0.0, *row) for row in scores]
    sizes = [(dense, *row) for dense, row in zip(costs.dense, costs.options)]
    chosen = best_choices(losses, sizes, budget * costs.total - outside)
    return plan_of({block: options[item - 1] for block, item in enumerate(chosen) if item}, len(scores), router)


def plan_of(option_of: Mapping[int, Option], depth: int, router: Score) -> Plan:
    """Return the plan of the options of single blocks."""
    rows = [(block, *option_of[block]) for block in sorted(option_of)]
    blocks, capacities, operators, contexts = zip(*rows)
    return Plan(blocks, capacities, depth, operators, contexts, router)


def in_time(search: PlanSearch, measure: Clock) -> PlanSearch:
    """Return a search whose plan meets the time budget as measured.

    Block times do not add up exactly. So the plan for the estimated budget is measured, and the estimate is corrected
    until the measured time fits or no other plan lies between. Among the measured plans within 5 % above the budget,
    the one with the lowest sum of scores wins.
    """
    budget, low, high = search.budget, search.costs.least_share, 1.0
    target, shares = budget, dict[Plan, float]()
    for _ in range(_CORRECTIONS):
        plan = search.plan_for(target)
        if plan not in shares:
            shares[plan] = measure([RoutingConfig.from_plan(plan)])[1][0]
        share = shares[plan]
        if abs(share / budget - 1) <= _TOLERANCE:
            break
        low, high = (low, target) if share > budget else (target, high)
        # Scale the saving by the observed error; bisect if that leaves the bracket.
        target = 1 - (1 - target) * (1 - budget) / (1 - share) if share < 1 else low
        target = target if low < target < high else (low + high) / 2
    fitting = [plan for plan, share in shares.items() if share <= budget * (1 + _TOLERANCE)]
    if not fitting:
        total, least = search.costs.total, min(shares.values())
        raise ValueError(
            f"a budget of {budget * total:.4g} ms is out of reach: the fastest plan took {least * total:.4g} ms"
        )
    best = min(fitting, key=search.score)
    return dataclasses.replace(search, plan=best, divergence=None, time=shares[best] * search.costs.total)
