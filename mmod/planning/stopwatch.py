"""Measured milliseconds of plans, and the plan that meets a time budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from mmod.analysis.timing import interleave, relative_times
from mmod.config import Plan, RoutingConfig
from mmod.planning.plan_search import PlanSearch
from mmod.planning.scoring import routed

ROUNDS = 7
CORRECTIONS = 6
# Relative error of a plan's time at which the search for a better fit stops.
TOLERANCE = 0.05

Measure = Callable[[Sequence[RoutingConfig]], tuple[float, list[float]]]
"""Returns the dense model's milliseconds, and each routing's time as a share of them."""


def stopwatch(model: nn.Module, part: str, batch: Any) -> Measure:
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
        for _ in range(ROUNDS):
            for place, config in enumerate([None, *configs], -1):
                if config is None:
                    times[place] += interleave({0: run}, seconds=0, rounds=1, warmup=1, device=device)[0]
                    continue
                with routed(model, part, config):
                    times[place] += interleave({0: run}, seconds=0, rounds=1, warmup=1, device=device)[0]
        speedups = relative_times(times, -1)
        return speedups[-1][0], [1 / speedups[place][1] for place in range(len(configs))]

    return measure


def in_time(search: PlanSearch, measure: Measure) -> PlanSearch:
    """Return a search whose plan meets the time budget as measured.

    Block times do not add up exactly. So the plan for the estimated budget is measured, and the estimate is corrected
    until the measured time fits or no other plan lies between. Among the measured plans within 5 % above the budget,
    the one with the lowest sum of scores wins.
    """
    budget, low, high = search.budget, search.costs.least_share, 1.0
    target, shares = budget, dict[Plan, float]()
    for _ in range(CORRECTIONS):
        plan = search.plan_for(target)
        if plan not in shares:
            shares[plan] = measure([RoutingConfig.from_plan(plan)])[1][0]
        share = shares[plan]
        if abs(share / budget - 1) <= TOLERANCE:
            break
        low, high = (low, target) if share > budget else (target, high)
        # Scale the saving by the observed error; bisect if that leaves the bracket.
        target = 1 - (1 - target) * (1 - budget) / (1 - share) if share < 1 else low
        target = target if low < target < high else (low + high) / 2
    fitting = [plan for plan, share in shares.items() if share <= budget * (1 + TOLERANCE)]
    if not fitting:
        total, least = search.costs.total, min(shares.values())
        raise ValueError(
            f"a budget of {budget * total:.4g} ms is out of reach: the fastest plan took {least * total:.4g} ms"
        )
    best = min(fitting, key=search.score)
    return dataclasses.replace(search, plan=best, divergence=None, time=shares[best] * search.costs.total)
