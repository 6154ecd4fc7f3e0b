"""The search for the learning rate of every model of a study."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mmod.studies.jobs import Do, Job, Runner

# Name of a model, and the factor of its learning rate.
Trial = tuple[str, float]


def trials(jobs: Sequence[Job[Any]], rates: Sequence[float], split: str, folder: str) -> dict[Trial, Job[Any]]:
    """Return the runs that try factors of the learning rate, evaluated on a split, for the first seed's models.

    A first run that others start from is not tried: it comes before all others.
    """
    return {
        (job.name, rate): dataclasses.replace(job, config=_trial(job.config, rate, split, f"{folder}/{job.name}"))
        for job in (jobs[1:] if starts_others(jobs[0]) else jobs)
        if job.seed == 0 and job.is_trained
        for rate in rates
    }


def starts_others(first: Job[Any]) -> bool:
    """Return whether the first run of a study trains the dense model that others start from."""
    return first.is_trained and not first.is_tuned


def try_rates(
    runner: Runner, by_trial: Mapping[Trial, Job[Any]], do: Do[Any, float], before: Sequence[Job[Any]] = ()
) -> dict[Trial, float]:
    """Return the score of every trial, after runs that the trials start from."""
    scores = {job.config.output: score for job, score in runner.run([*before, *by_trial.values()], do)}
    return {trial: scores[job.config.output] for trial, job in by_trial.items()}


def best_rates(scores: Mapping[Trial, float]) -> dict[str, float]:
    """Return the best factor of every model by name, the first of equal ones.

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


def _trial(config: Any, rate: float, split: str, folder: str) -> Any:
    data = dataclasses.replace(config.data, val_split=split)
    return dataclasses.replace(with_rate(config, rate), data=data, output=f"{folder}-{rate:g}")
