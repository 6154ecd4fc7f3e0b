"""Milliseconds of plans, measured on the machine that searches, and the plan that keeps to a budget of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from mmod.analysis.timing import interleave, relative_times
from mmod.config import Plan, RoutingConfig
from mmod.planning.found import PlanSearch
from mmod.planning.scoring import routed

ROUNDS = 7
CORRECTIONS = 6
# What a plan's time may differ from the budget before another plan is looked for.
TOLERANCE = 0.05

Measure = Callable[[Sequence[RoutingConfig]], tuple[float, list[float]]]
"""Returns milliseconds of the dense model, and of each routing as a share of them."""


def stopwatch(model: nn.Module, part: str, batch: Any) -> Measure:
    """Return what measures one pass over a batch; of a language model, the prefill with what comes before it.

    Routings and the dense model take turns, so that the load of the machine affects all of them alike.

    Args:
        model: The dense model, in evaluation mode.
        part: The part that is routed.
        batch: Its arguments by name, or its only argument.
    """

    def run() -> None:
        if not isinstance(batch, Mapping):
            model(batch)
            return
        given = {name: value for name, value in batch.items() if name != "labels"}
        generates: Any = getattr(model, "can_generate", bool)
        model(**given, **({"use_cache": True, "logits_to_keep": 1} if generates() else {}))

    def measure(configs: Sequence[RoutingConfig]) -> tuple[float, list[float]]:
        device = next(model.parameters()).device
        times: dict[int, list[float]] = {place: [] for place in range(-1, len(configs))}
        for _ in range(ROUNDS):
            for place, config in enumerate([None, *configs], -1):
                if config is None:
                    times[place] += interleave({0: run}, seconds=0, rounds=1, warmup=1, device=device)[0]
                    continue
                with routed(model, part, config):
                    times[place] += interleave({0: run}, seconds=0, rounds=1, warmup=1, device=device)[0]
        found = relative_times(times, -1)
        return found[-1][0], [1 / found[place][1] for place in range(len(configs))]

    return measure


def in_time(found: PlanSearch, measure: Measure) -> PlanSearch:
    """Return a search with the plan that keeps to its budget of milliseconds as measured.

    Times of blocks do not quite add up: the plan for the budget is measured, and the estimate asked for less or more
    until a plan's time is the budget's or no other plan lies between. Of all plans that were measured and keep to the
    budget, or exceed it by less than a twentieth, the one with the least sum of scores is taken.

    Args:
        found: The search, with a plan for the estimate.
        measure: Measures.

    Raises:
        ValueError: All plans that were tried exceed the budget.
    """
    budget, low, high = found.budget, found.costs.least_share, 1.0
    asked, shares = budget, dict[Plan, float]()
    for _ in range(CORRECTIONS):
        plan = found.plan_for(asked)
        if plan not in shares:
            shares[plan] = measure([RoutingConfig.from_plan(plan)])[1][0]
        share = shares[plan]
        if abs(share / budget - 1) <= TOLERANCE:
            break
        low, high = (low, asked) if share > budget else (asked, high)
        # As if what is saved were off by one factor, unless that leads out of what is left.
        asked = 1 - (1 - asked) * (1 - budget) / (1 - share) if share < 1 else low
        asked = asked if low < asked < high else (low + high) / 2
    fitting = [plan for plan, share in shares.items() if share <= budget * (1 + TOLERANCE)]
    if not fitting:
        total, least = found.costs.total, min(shares.values())
        raise ValueError(
            f"a budget of {budget * total:.4g} ms is out of reach: plans took at least {least * total:.4g}"
        )
    best = min(fitting, key=found.score)
    return dataclasses.replace(found, plan=best, divergence=None, time=shares[best] * found.costs.total)
