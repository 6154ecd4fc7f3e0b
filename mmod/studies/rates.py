"""The best learning rate of each candidate, which is searched before its runs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mmod.analysis.table import Measured, Table, by_seed, fill
from mmod.io.jobs import Callback, Runner
from mmod.io.store import Store
from mmod.io.yaml import merged
from mmod.studies.measure import Measure, Measurer, starting_weights
from mmod.studies.runs import Run
from mmod.training.engine.config import LoopConfig, RunConfig, config_as


class Rates(NamedTuple):
    """Factors of the learning rate, of which every trained candidate uses the best, the first of equal ones.

    Attributes:
        factors: Those that are tried; one at which the loss is no longer finite is not chosen.
        figure: The figure that decides; the highest is best.
        measure: Does a trial.
        folder: Trials go there, by candidate and factor.
        data: Fields of the config's `data` that trials set differently, such as the split that evaluates them.
        seed: The seed of trials.
    """

    factors: Sequence[float]
    figure: str
    measure: Measure
    folder: Path
    data: Mapping[str, object] = {}
    seed: int = 0


def best_rates(runs: Sequence[Run], rates: Rates, store: Store, runner: Runner) -> dict[str, float]:
    """Return the best factor of the learning rate of each trained candidate, by its name.

    Args:
        runs: Those of a comparison, of which the first may train the dense model that trials start from.

    Raises:
        FloatingPointError: The loss of a candidate is finite at no rate.
    """
    trials = trials_of(runs, rates)
    if len(rates.factors) == 1:
        return dict.fromkeys(trials, rates.factors[0])
    # Trials start from the dense model too, which may not be trained yet.
    jobs = _start_of(runs) + list(itertools.chain.from_iterable(trials.values()))
    table = Table()
    measurer = Measurer(rates.measure, store, starting_weights(jobs))
    fill(table, [jobs], functools.partial(_try, measurer, rates.figure), runner)
    best = {}
    for name, tried in trials.items():
        scores = [by_seed(table, rates.figure, trial.name)[rates.seed] for trial in tried]
        if max(scores) == -float("inf"):
            raise FloatingPointError(f"{name} is trained by none of the rates {list(rates.factors)}: give smaller ones")
        best[name] = rates.factors[scores.index(max(scores))]
    return best


def trials_of(runs: Sequence[Run], rates: Rates) -> dict[str, list[Run]]:
    """Return the trials of each trained candidate by its name, one for each factor; none of a single factor."""
    factors = rates.factors if len(rates.factors) > 1 else ()
    trials = {}
    for run in runs[len(_start_of(runs)) :]:
        if run.seed == 0 and run.is_trained:
            trials[run.name] = [_trial(run, rates, factor) for factor in factors]
    return trials


def _start_of(runs: Sequence[Run]) -> list[Run]:
    """Return the run of the dense model that trials start from, if it is trained."""
    return [run for run in runs[:1] if run.is_trained and not run.is_tuned]


def _trial(run: Run, rates: Rates, factor: float) -> Run:
    name = f"{run.name}-{factor:g}"
    run_config = _with_rate(run.training, factor)
    run_config = type(run_config).from_dict(merged(run_config.as_written(), {"data": rates.data}))
    run_config = dataclasses.replace(run_config, output=str(rates.folder / name), seed=rates.seed)
    return dataclasses.replace(run, name=name, seed=rates.seed, training=run_config)


def at_rates(runs: Sequence[Run], factors: Mapping[str, float]) -> list[Run]:
    """Return runs with the learning rates of candidates multiplied by their factors."""
    return [dataclasses.replace(run, training=_with_rate(run.training, factors.get(run.name, 1.0))) for run in runs]


def _try(measurer: Measurer, figure: str, run: Run, callback: Callback) -> Measured | None:
    """Return the rows of a trial, with the worst figure where its loss diverges."""
    try:
        return measurer(run, callback)
    except FloatingPointError:
        # No trial, which has a name of its own: the dense model that all trials start from.
        if run.name == run.candidate.name:
            raise
        return Measured({figure: -float("inf")})


def _with_rate(run_config: RunConfig, rate: float) -> RunConfig:
    """Return a config with its learning rate multiplied."""
    if rate == 1.0:
        return run_config
    config = config_as(run_config, LoopConfig)
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=rate * config.optim.lr))
