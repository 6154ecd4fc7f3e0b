"""What a search for a plan found: scores and costs of all choices, the plan under any budget, and the frontier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mmod.config import Plan, RoutingConfig
from mmod.extras import name_missing_extra
from mmod.planning.costs import Chooser, Costs, Option
from mmod.planning.knapsack import best_choices
from mmod.planning.scoring import plan_of


@dataclass(frozen=True)
class PlanSearch:
    """Scores and costs of all choices, and the best set of them; `print(found)` shows a table.

    Args:
        names: Module names of the blocks, in order.
        options: What may be done to a block.
        scores: Divergence that each option in each block adds: to that of a dense model, or to that of the plan of the
            round before.
        costs: What they cost.
        budget: Share of the dense model's cost that was asked for.
        cost: What is counted: "flops", "image_flops", "cache" or "milliseconds".
        rows: Rows of output that scores are means of: images, or tokens of text.
        chooser: Which tokens a capacity above 0 keeps.
        plan: The plan under the budget, with the score that it was searched with.
        divergence: That of the plan as a whole, where a round of scoring began with it; None where nothing measured it.
        time: Milliseconds of one pass with the plan, where the budget is one of time.
    """

    names: tuple[str, ...]
    options: tuple[Option, ...]
    scores: tuple[tuple[float, ...], ...]
    costs: Costs
    budget: float
    cost: str
    rows: int
    chooser: Chooser
    plan: Plan
    divergence: float | None = None
    time: float | None = None

    @property
    def config(self) -> RoutingConfig:
        """The config that routes by the plan."""
        return RoutingConfig.from_plan(self.plan)

    def plan_for(self, budget: float) -> Plan:
        """Return the plan with the least sum of scores under another budget; nothing is tried or timed again.

        Args:
            budget: Share of the dense model's cost, in (0, 1); of its time it is an estimate.

        Raises:
            ValueError: A budget that no plan reaches.
        """
        return best_plan(self.scores, self.costs, self.options, budget, self.chooser)

    def share(self, plan: Plan) -> float:
        """Return the share of the dense model's cost that a plan of these options has.

        Args:
            plan: The plan.

        Raises:
            ValueError: A plan of other options or of another model.
        """
        chosen = self._chosen(plan).items()
        return 1 - sum(self.costs.dense[at] - self.costs.options[at][item] for at, item in chosen) / self.costs.total

    def score(self, plan: Plan) -> float:
        """Return the sum of the scores of a plan's choices.

        Args:
            plan: The plan.
        """
        return sum(self.scores[block][item] for block, item in self._chosen(plan).items())

    def _chosen(self, plan: Plan) -> dict[int, int]:
        """Return which option a plan takes in each of its blocks."""
        found = {block: Option(capacity, operator, context) for block, capacity, operator, context in plan.rows}
        unknown = [f"{option} in block {block}" for block, option in found.items() if option not in self.options]
        router = self.chooser.config.router
        if plan.router not in (None, router):
            raise ValueError(f"this search is of router {router.name!r}, and the plan of {plan.router.name!r}")
        if unknown or plan.depth != len(self.names):
            raise ValueError(f"this search knows no {', '.join(unknown) or f'plan of {plan.depth} blocks'}")
        return {block: self.options.index(option) for block, option in found.items()}

    def frontier(self, steps: int = 20) -> list[tuple[float, float]]:
        """Return share of the cost and sum of scores of the plans for evenly spread budgets, the dearest first.

        Args:
            steps: Number of budgets.
        """
        least = self.costs.least_share
        # Rounding must not ask for less than the least.
        plans = [self.plan_for(max(least, 1 - (1 - least) * step / steps)) for step in range(1, steps + 1)]
        return [(self.share(plan), self.score(plan)) for plan in plans]

    def __str__(self) -> str:
        """Return the scores of all choices as a table, and the plan."""
        width, columns = max(map(len, self.names)), [max(10, len(str(option))) for option in self.options]
        lines = ["  ".join([f"{'block':<{width}}", *(f"{option!s:>{w}}" for option, w in zip(self.options, columns))])]
        for name, row in zip(self.names, self.scores):
            lines.append("  ".join([f"{name:<{width}}", *(f"{score:>{w}.3e}" for score, w in zip(row, columns))]))
        plan = self.plan
        share = f"{self.share(plan):.4f} of the dense model's {self.cost}"
        if self.time is not None:
            share = f"{self.time:.4g} of the dense model's {self.costs.total:.4g} milliseconds"
        whole = "" if self.divergence is None else f", {self.divergence:.4g} as a whole"
        return "\n".join([
            *lines,
            f"divergence that each choice adds, a mean over {self.rows} rows",
            "",
            str(plan),
            f"{share}, sum of divergences {self.score(plan):.4g}{whole}",
        ])  # fmt: skip

    @name_missing_extra()
    def plot(self, path: str | Path) -> None:
        """Draw the scores of all choices, with those of the plan marked, and the frontier.

        Args:
            path: The picture file; its ending says the format.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 4), layout="constrained")
        left, right = figure.subplots(1, 2)
        taken = self._chosen(self.plan)
        negative = min(map(min, self.scores)) < 0
        for item, option in enumerate(self.options):
            (line,) = left.plot([row[item] for row in self.scores], label=str(option), linewidth=1)
            marked = [block for block, chosen in taken.items() if chosen == item]
            left.plot(marked, [self.scores[block][item] for block in marked], "o", color=line.get_color())
        left.set(xlabel="block", ylabel="divergence that one choice adds", yscale="symlog" if negative else "log")
        left.legend(title="chosen: dots", fontsize="small")
        shares, scores = zip(*self.frontier())
        right.plot(shares, scores, ".-")
        right.axvline(self.budget, color="grey", linewidth=1)
        right.set(xlabel=f"share of the dense model's {self.cost}", ylabel="sum of divergences")
        figure.savefig(path)


def best_plan(
    scores: Sequence[Sequence[float]], costs: Costs, options: Sequence[Option], budget: float, chooser: Chooser
) -> Plan:
    """Return the plan with the least sum of scores under a budget.

    Args:
        scores: Score of each option in each block; a dense block has 0.
        costs: What they cost.
        options: What may be done to a block.
        budget: Share of the dense model's cost, in (0, 1).
        chooser: Chooses tokens.

    Raises:
        ValueError: A budget that no plan reaches.
    """
    costs.check(budget)
    fixed = costs.total - sum(costs.dense)
    losses = [(0.0, *row) for row in scores]
    sizes = [(dense, *row) for dense, row in zip(costs.dense, costs.options)]
    chosen = best_choices(losses, sizes, budget * costs.total - fixed)
    return plan_of({block: options[item - 1] for block, item in enumerate(chosen) if item}, len(scores), chooser)
