"""The best choice for every block under a budget: the knapsack problem with one item of each class."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

# Costs are rounded up to such a part of the budget, so that what is chosen never exceeds it.
STEPS = 20_000


def best_choices(losses: Sequence[Sequence[float]], costs: Sequence[Sequence[float]], budget: float) -> list[int]:
    """Return which item of every class to take, so that the sum of losses is least and that of costs within a budget.

    Args:
        losses: Loss of each item of each class.
        costs: Cost of each item of each class, not negative.
        budget: The most that all items may cost together.

    Raises:
        ValueError: The cheapest items cost more than the budget.

    Example:
        >>> best_choices([[0.0, 1.0], [0.0, 3.0]], [[5, 1], [5, 1]], budget=6)
        [1, 0]
    """
    least = sum(min(row) for row in costs)
    # Budgets are shares of sums: what rounding takes away is given back.
    if least > budget * (1 + 1e-9):
        raise ValueError(f"a budget of {budget:g} is out of reach: the cheapest choices cost {least:g}")
    # The cheapest items, which always fit, are free; what the others cost beyond them is rounded up.
    room = max(budget - least, 0)
    sizes = [[_steps(cost - min(row), room) for cost in row] for row in costs]
    best, taken = np.zeros(STEPS + 1), []
    for row, size in zip(losses, sizes):
        found = np.full((len(row), STEPS + 1), np.inf)
        for item, (loss, steps) in enumerate(zip(row, size)):
            if steps <= STEPS:
                found[item, steps:] = best[: STEPS + 1 - steps] + loss
        taken.append(found.argmin(0))
        best = found.min(0)
    place, chosen = STEPS, []
    for size, items in zip(reversed(sizes), reversed(taken)):
        chosen.append(int(items[place]))
        place -= size[chosen[-1]]
    return chosen[::-1]


def _steps(cost: float, room: float) -> int:
    if cost <= 0:
        return 0
    return STEPS + 1 if cost > room else max(1, math.ceil(cost / room * STEPS - 1e-9))
