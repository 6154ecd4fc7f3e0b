"""The runs of a study: what is trained or evaluated, once, and the search for learning rates."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import nn

from mmod.compare.table import Measured, Table, compare, mean_of, measured_once
from mmod.io.files import sha256
from mmod.io.jobs import AnyJob, Callback, Job, Runner
from mmod.io.store import Store
from mmod.opening.weights import find_weights
from mmod.planning.options import PlanOptions
from mmod.studies.plan import search_for
from mmod.training.engine.config import RunConfig
from mmod.training.engine.evaluate import RoutedResult
from mmod.training.engine.run_folder import portable
from mmod.training.kinds import kind_of

Config = TypeVar("Config")
Plans = dict[str, dict[str, Any]]
"""Searched plans by `Search`; runs ask for theirs several times."""
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


def ready(config: Any, plans: Plans, run: Run[Any]) -> Run[Any]:
    """Return a run with the plan of its seed's dense model, where one is searched; it joins the plans.

    Args:
        config: The study's.
    """
    if run.search is None:
        return run
    key = str(run.search)
    if key not in plans:
        plans[key] = search_for(run.config, *run.search).plan.to_dict()
    routing = config.routing_at(plans[key], None)
    return dataclasses.replace(run, config=dataclasses.replace(run.config, routing=routing), search=None)


def load(run: Run[Any]) -> nn.Module:
    """Make the final model of a run, in evaluation mode on the device it was trained on."""
    config = run.config.finished(run.config.output) if run.is_trained else run.config
    return kind_of(config).load()


def measure_run(config: Any, run: Run[Any], callback: Callback, *, store: Store, plans: Plans) -> Measured:
    """Do one run: train its model, or evaluate it as it starts.

    Args:
        config: The study's.
        store: Keeps evaluations without training.
    """
    run = ready(config, plans, run)
    if not run.is_trained:
        return evaluate_start(store, run.config)
    before = {}
    if run.is_tuned and config.before:
        before["before"] = evaluate_start(store, run.config).figures[config.score]
    rows = rows_of(train(run.config, callback))
    return rows._replace(figures={**rows.figures, **before})


def evaluate_start(store: Store, config: RunConfig) -> Measured:
    """Evaluate the model that a run starts from, once."""
    kind = kind_of(config)
    identity = {"work": "rows of samples", **identity_of(config)}

    def measure() -> Measured:
        result, outcomes = kind.assess(kind.load())
        samples = max(map(len, outcomes.values()), default=0)
        return rows_of(result)._replace(samples=samples, outcomes=outcomes)

    return measured_once(store, identity, measure)


def train(config: Any, callback: Callback) -> Any:
    """Train a run, or read the result of a finished one; return the evaluation to report."""
    kind = kind_of(config)
    evaluation = kind.fit(progress=False, after_step=lambda step: callback(step.done / step.total)).best
    if evaluation is None:
        raise ValueError("there is nothing to ask: set data.val")
    return evaluation


def rows_of(evaluation: RoutedResult) -> Measured:
    """Return what the table of a comparison keeps of an evaluation."""
    return Measured(evaluation.columns(), evaluation.kept, getattr(evaluation, "samples", 0))


def identity_of(config: RunConfig) -> dict[str, Any]:
    """Return what stands for the model that a run starts from, and for its data: the config, and checksums of weights.

    The folder of the run is left out, and the path of a checkpoint is relative to it: studies can be moved.
    """
    fields = portable(config.to_dict())
    del fields["output"]
    weights = {}
    for name in ("checkpoint", "image_checkpoint"):
        path = getattr(config.model, name, None)
        if path is not None:
            weights[name] = _checksum(path)
    return {"kind": config.kind, "config": fields, "weights": weights}


def _checksum(checkpoint: str) -> list[str]:
    """Return the checksums of the files that hold weights; of weights on a hub there are none."""
    try:
        path = find_weights(checkpoint)
    except FileNotFoundError:
        # A folder of transformers with several files, or a name on a hub.
        path = Path(checkpoint)
    files = [path] if path.is_file() else sorted([*path.glob("*.safetensors"), *path.glob("*.bin")])
    return [_sha256(file, file.stat().st_mtime_ns) for file in files]


@functools.lru_cache
def _sha256(file: Path, changed: int) -> str:
    return sha256(file)


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
            name = f"{run.name}-{rate:g}"
            config = dataclasses.replace(with_rate(run.config, rate), data=data, output=f"{folder}/{name}")
            by_trial[run.name, rate] = dataclasses.replace(run, name=name, config=config)
    return by_trial


def best_rates(
    table: Table,
    figure: str,
    by_trial: Mapping[Trial, AnyJob],
    measure: Callable[[AnyJob, Callback], Measured],
    runner: Runner,
    before: Sequence[AnyJob] = (),
) -> dict[str, float]:
    """Return the best factor of the learning rate of each model, the first of equal ones; trials join the table.

    Args:
        by_trial: Jobs with names of their own.
        before: Runs that the trials start from.
    """
    for _ in compare(table, [*before, *by_trial.values()], measure, runner):
        pass
    rates: dict[str, dict[str, float]] = {}
    for (name, rate), job in by_trial.items():
        rates.setdefault(name, {})[job.name] = rate
    score = functools.partial(mean_of, table, figure)
    return {name: by_job[max(by_job, key=score)] for name, by_job in rates.items()}


def with_rate(config: Any, rate: float) -> Any:
    """Return a config with its learning rate multiplied."""
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=rate * config.optim.lr))
