"""The search for a learning rate, the same for every model of a study."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mmod.studies.jobs import Job

__all__ = ["best_rates", "trials", "with_rate"]

# Name of a model, and the factor of its learning rate.
Trial = tuple[str, float]


def trials(jobs: Sequence[Job[Any]], rates: Sequence[float], split: str, folder: str) -> dict[Trial, Job[Any]]:
    """Return the runs that try learning rates.

    Args:
        jobs: The runs of the study; those of the first seed that are trained are tried, apart from one that others
            start from, which comes first.
        rates: Factors of the learning rate.
        split: Split that the trials are evaluated on.
        folder: Where they go.
    """
    others = jobs[1:] if starts_others(jobs[0]) else jobs
    return {
        (job.name, rate): dataclasses.replace(job, config=_tried(job.config, rate, split, f"{folder}/{job.name}"))
        for job in others
        if job.seed == 0 and job.is_trained
        for rate in rates
    }


def starts_others(first: Job[Any]) -> bool:
    """Return whether the first run of a study trains the dense model that others start from."""
    return first.is_trained and not first.is_tuned


def best_rates(scores: Mapping[Trial, float]) -> dict[str, float]:
    """Return the best factor of each model by name, the first of equal ones.

    Example:
        >>> best_rates({("a", 0.5): 90.0, ("a", 1.0): 91.0, ("b", 0.5): 80.0, ("b", 1.0): 80.0})
        {'a': 1.0, 'b': 0.5}
    """
    best: dict[str, float] = {}
    for (name, rate), score in scores.items():
        if name not in best or score > scores[name, best[name]]:
            best[name] = rate
    return best


def with_rate(config: Any, rate: float) -> Any:
    """Return a config with its learning rate multiplied."""
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=rate * config.optim.lr))


def _tried(config: Any, rate: float, split: str, folder: str) -> Any:
    data = dataclasses.replace(config.data, val_split=split)
    return dataclasses.replace(with_rate(config, rate), data=data, output=f"{folder}-{rate:g}")
