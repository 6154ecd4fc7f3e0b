"""Multiple-choice knapsack: one item per class, minimal loss under a cost budget."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

# The dynamic programme divides the budget into this many steps. Costs are rounded up, so a solution never exceeds it.
STEPS = 20_000


def best_choices(losses: Sequence[Sequence[float]], costs: Sequence[Sequence[float]], budget: float) -> list[int]:
    """Return the index of the chosen item in each class: the lowest sum of losses with costs within the budget.

    Example:
        >>> best_choices([[0.0, 1.0], [0.0, 3.0]], [[5, 1], [5, 1]], budget=6)
        [1, 0]
    """
    least = sum(min(row) for row in costs)
    # The tolerance covers rounding: budgets are shares of sums.
    if least > budget * (1 + 1e-9):
        raise ValueError(f"a budget of {budget:g} is out of reach: the cheapest choices cost {least:g}")
    # Sizes are relative to the cheapest item of each class, which always fits.
    room = max(budget - least, 0)
    sizes = [[_steps(cost - min(row), room) for cost in row] for row in costs]
    best, choices = np.zeros(STEPS + 1), []
    for row, size in zip(losses, sizes):
        totals = np.full((len(row), STEPS + 1), np.inf)
        for item, (loss, steps) in enumerate(zip(row, size)):
            if steps <= STEPS:
                totals[item, steps:] = best[: STEPS + 1 - steps] + loss
        choices.append(totals.argmin(0))
        best = totals.min(0)
    # Walk back from the full budget to read off the chosen items.
    place, chosen = STEPS, []
    for size, items in zip(reversed(sizes), reversed(choices)):
        chosen.append(int(items[place]))
        place -= size[chosen[-1]]
    return chosen[::-1]


def _steps(cost: float, room: float) -> int:
    if cost <= 0:
        return 0
    return STEPS + 1 if cost > room else max(1, math.ceil(cost / room * STEPS - 1e-9))
