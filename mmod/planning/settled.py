"""What learning capacities found: one for each routed block, and the plan that they became."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mmod.config import Plan, RoutingConfig
from mmod.extras import name_missing_extra


@dataclass(frozen=True)
class LearnedPlan:
    """Capacities that were learned, and the nearest plan within the budget; `print(found)` shows both.

    Args:
        names: Module names of the routed blocks, in order.
        learned: Their capacities, of which the costs add up to the budget.
        plan: The plan, with the score and gate that the capacities were learned with.
        config: The config that routes by the plan.
        shares: What each routed block costs with the plan, as a share of the dense model's cost.
        rest: That of everything else.
        budget: The share that was asked for.
        cost: What is counted: "flops" or "milliseconds".
    """

    names: tuple[str, ...]
    learned: tuple[float, ...]
    plan: Plan
    config: RoutingConfig
    shares: tuple[float, ...]
    rest: float
    budget: float
    cost: str

    @property
    def share(self) -> float:
        """The share of the dense model's cost that the plan has; of time, an estimate from single capacities."""
        return self.rest + sum(self.shares)

    def __str__(self) -> str:
        """Return what was learned as a table, and the share of the cost."""
        width = max(map(len, self.names))
        lines = [f"{'block':<{width}}  {'learned':>8}  {'capacity':>8}  {'share of the cost':>17}"]
        rows = zip(self.names, self.learned, self.plan.capacities, self.shares)
        lines += [f"{name:<{width}}  {own:>8.4f}  {kept:>8g}  {share:>17.4f}" for name, own, kept, share in rows]
        return "\n".join([
            *lines,
            f"{len(self.names)} of {self.plan.depth} blocks are routed",
            f"{self.share:.4f} of the dense model's {self.cost}, for a budget of {self.budget:.4g}",
        ])  # fmt: skip

    @name_missing_extra()
    def plot(self, path: str | Path) -> None:
        """Draw capacity over depth, as learned and as in the plan.

        Args:
            path: The picture file; its ending says the format.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 3), layout="constrained")
        axes = figure.subplots()
        axes.bar(self.plan.blocks, self.plan.capacities, label="plan")
        axes.plot(self.plan.blocks, self.learned, "k_", markersize=14, label="learned")
        axes.set(xlabel="block", ylabel="capacity", xlim=(-0.6, self.plan.depth - 0.4), ylim=(0, 1))
        axes.legend(fontsize="small")
        figure.savefig(path)
