"""The runs of a study, and the search for their learning rates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mmod.io.jobs import Job, Runner, Tick
from mmod.planning.options import PlanOptions

Config = TypeVar("Config")
AnyJob = TypeVar("AnyJob", bound=Job[Any])
# Name of a model, and the factor of its learning rate.
Trial = tuple[str, float]


class Search(NamedTuple):
    """How the routing of a run is searched before it starts, and the folder of the search."""

    options: PlanOptions
    folder: Path


@dataclass(frozen=True)
class Run(Job[Config]):
    """The training or evaluation of a model."""

    is_tuned: bool = False  # It starts from the dense model's weights.
    is_trained: bool = True
    search: Search | None = None


def starts_others(first: Run[Any]) -> bool:
    """Return whether the first run of a study trains the dense model that others start from."""
    return first.is_trained and not first.is_tuned


def trials(runs: Sequence[Run[Any]], rates: Sequence[float], split: str, folder: str) -> dict[Trial, Run[Any]]:
    """Return the runs that try factors of the learning rate, evaluated on a split, for the first seed's models."""
    by_trial = {}
    # A first run that others start from comes before all trials.
    for run in runs[1:] if starts_others(runs[0]) else runs:
        if run.seed != 0 or not run.is_trained:
            continue
        data = dataclasses.replace(run.config.data, val_split=split)
        for rate in rates:
            output = f"{folder}/{run.name}-{rate:g}"
            config = dataclasses.replace(with_rate(run.config, rate), data=data, output=output)
            by_trial[run.name, rate] = dataclasses.replace(run, config=config)
    return by_trial


def try_rates(
    runner: Runner, by_trial: Mapping[Trial, AnyJob], do: Callable[[AnyJob, Tick], float], before: Sequence[AnyJob] = ()
) -> dict[Trial, float]:
    """Return the score of every trial, after runs that the trials start from."""
    scores = {job.config.output: score for job, score in runner.run([*before, *by_trial.values()], do)}
    return {trial: scores[job.config.output] for trial, job in by_trial.items()}


def best_rates(scores: Mapping[Trial, float]) -> dict[str, float]:
    """Return the best factor of every model by name, the first of equal ones."""
    best: dict[str, float] = {}
    for (name, rate), score in scores.items():
        if name not in best or score > scores[name, best[name]]:
            best[name] = rate
    return best


def with_rate(config: Any, rate: float) -> Any:
    """Return a config with its learning rate multiplied."""
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=rate * config.optim.lr))
