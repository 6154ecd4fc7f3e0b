"""A study: one dense model, the candidates made from it, and their costs and scores over several seeds."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from mmod.compare.table import DENSE, Measured, Table, compare
from mmod.compare.times import Reading, sample_times
from mmod.io.jobs import Runner
from mmod.io.store import STORE, Store
from mmod.lazy import import_path
from mmod.opening.weights import find_weights
from mmod.planning.candidate import Candidate
from mmod.studies.candidates import candidates_of
from mmod.studies.config import StudyConfig, TimmStudyConfig
from mmod.studies.kind import Facts, StudyKind, Times
from mmod.studies.report import write_study
from mmod.studies.results import StudyResult
from mmod.studies.runs import (
    Plans,
    Run,
    Search,
    best_rates,
    load,
    ready,
    starts_others,
    trials,
    with_rate,
)
from mmod.training.engine.config import LoopConfig
from mmod.training.engine.kind import Kind, device_of
from mmod.training.kinds import kind_of

STUDIES = {
    "image": "mmod.studies.image:STUDY",
    "features": "mmod.studies.features:STUDY",
    "pairs": "mmod.studies.pairs:STUDY",
    "chat": "mmod.studies.chat:STUDY",
}
"""Import paths of what each kind contributes, by its name in configs."""
# The dense model that all fine-tuning starts from; the point shown as dense is fine-tuned like the others.
_BASE = "base"
# Epochs that take about as long as evaluating once.
_EVALUATION = 0.05


def run_study(config: StudyConfig, *, progress: bool = True) -> StudyResult:
    """Train or load the dense model and the candidates made from it, evaluate, time, and draw.

    Table and pictures are written as soon as there is a model to compare with the dense one, and again with every
    further model of the first seed and every further seed. Latency joins them at the end, when nothing else runs.
    """
    kind = study_kind(config)
    runner = Runner(config.processes, progress)
    candidates, runs = plan(config)
    _find_checkpoints(runs)
    _check_runs(config, runs)
    plans: Plans = {}
    # A folder that cannot be written is no news for the end of a run.
    Path(config.output).mkdir(parents=True, exist_ok=True)
    measure = partial(kind.measure, store=Store(Path(config.output) / STORE), plans=plans)
    rates = _find_rates(config, runs, measure, runner)
    if rates:
        runs = [dataclasses.replace(run, config=with_rate(run.config, rates.get(run.name, 1.0))) for run in runs]
    first = {run.name: run for run in runs if run.seed == 0 and run.name != _BASE}
    table = Table(weigh=kind.weigh)
    facts: Facts = {}
    epochs = epochs_of(runs)
    is_announced = False

    def write() -> StudyResult:
        shown = {candidate.name: candidate for candidate in candidates if candidate.name in table.costs}
        more = {**runner.facts, "rates": rates, "epochs": epochs}
        return write_study(config, kind, table, shown, first, facts, more)

    for run in compare(table, runs, partial(measure, config), runner):
        if run.name not in first:
            continue
        if run.seed == 0:
            model = load(ready(config, plans, run))
            if run.name == DENSE:
                facts = {} if kind.describe is None else kind.describe(config, run, model)
            table.costs[run.name] = kind.count(config, run, model, table.runs[run.name][0])
        # Where nothing is trained, the next model is there before a picture is drawn.
        is_first = run.seed == 0 and (len(table.costs) == 2 or run.is_trained)
        is_seed_done = all(run.seed in table.runs.get(name, {}) for name in first)
        if len(table.costs) > 1 and DENSE in table.costs and (is_first or is_seed_done):
            write()
            if not is_announced:
                runner.say(f"table and picture, from now on: {config.output}/tradeoff.{{md,png}}")
            is_announced = True
    finished = {name: ready(config, plans, run) for name, run in first.items()}
    for name, times in _time(config, kind, table, finished, shown=progress).items():
        table.costs[name] |= times
    return write()


def study_kind(config: StudyConfig) -> StudyKind:
    """Return what the kind of a study contributes; imports its libraries."""
    kind: StudyKind = import_path(STUDIES[config.kind])
    return kind


def plan(config: StudyConfig) -> tuple[list[Candidate], list[Run[Any]]]:
    """Return the compared models, and the runs in the order they must be done."""
    run_config: Any = study_kind(config).run_config
    dense = run_config.from_dict(config.dense_fields)
    tuned = run_config.from_dict(config.tuned_fields)
    config.check(dense, tuned)
    candidates = candidates_of(config, dense, tuned)
    names = Counter([_BASE, *(candidate.name for candidate in candidates)])
    if max(names.values()) > 1:
        raise ValueError(f"several models of the study have the name {names.most_common(1)[0][0]!r}")
    base = _BASE if config.tune_dense else DENSE
    others = [candidate for candidate in candidates if candidate.name != base]
    is_repeated = config.train_dense or any(candidate.is_trained for candidate in others)
    runs = list[Run[Any]]()
    for seed in range(config.seeds if is_repeated else 1):
        root = Path(config.output) / f"seed{seed}"
        folder = Path(config.bases) / root.name / _BASE if config.bases else root / base
        seeded = dataclasses.replace(dense, output=str(folder), seed=seed)
        if config.train_dense or not config.tune_dense:
            work = _work(seeded) if config.train_dense else _EVALUATION
            runs.append(Run(base, seed, seeded, work, is_trained=config.train_dense))
        start: Any = tuned.started_from(str(folder)) if config.train_dense else tuned
        for candidate in others:
            run = candidate.configure(seeded, dataclasses.replace(start, seed=seed))
            run = dataclasses.replace(run, output=str(root / candidate.name))
            work = _work(run) if candidate.is_trained else _EVALUATION
            search = None
            if candidate.search is not None:
                search = Search(candidate.search, root / f"{candidate.series}.plans")
            is_tuned = not candidate.from_scratch
            runs.append(Run(candidate.name, seed, run, work, is_tuned, candidate.is_trained, search))
    return candidates, runs


def _find_rates(
    config: StudyConfig, runs: Sequence[Run[Any]], measure: Callable[..., Measured], runner: Runner
) -> dict[str, float]:
    """Return the best factor of the learning rate by model, once it was searched; empty without a search."""
    if not isinstance(config, TimmStudyConfig) or config.rates is None:
        return {}
    by_trial = trials(runs, config.rates, config.rate_split, f"{config.output}/rates")
    starting = [run for run in runs[:1] if starts_others(run)]
    # Only the trained models count.
    plain = dataclasses.replace(config, before=False)
    return best_rates(Table(), config.score, by_trial, partial(measure, plain), runner, starting)


def _time(config: StudyConfig, kind: StudyKind, table: Table, runs: Mapping[str, Run[Any]], *, shown: bool) -> Times:
    """Measure the latency of final models in batches of several sizes, all in turns; return figures by model."""
    kinds: dict[str, Kind] = {name: kind_of(run.config) for name, run in runs.items()}
    models: dict[str, nn.Module] = {name: load(run) for name, run in runs.items()}
    sizes = config.batch_sizes
    readings: dict[str, dict[tuple[str, int], Reading]] = {name: {} for name in runs}
    for name, model in models.items():
        for size in sizes:
            # As many samples at every size.
            passes = kinds[name].readings(model, size, max(sizes) // size)
            readings[name] |= {(inputs, size): reading for inputs, reading in passes.items()}
    times = sample_times(table, readings, rounds=config.latency_rounds, device=device_of(kinds[DENSE]), shown=shown)
    figures: Times = {name: {} for name in runs}
    for (inputs, size), by_name in times.items():
        ms, speedup = config.time_columns(kind.times[inputs], size)
        for name, (milliseconds, ratio) in by_name.items():
            figures[name] |= {ms: milliseconds, speedup: ratio}
    if kind.add_times is not None:
        kind.add_times(config, kinds, models, figures)
    return figures


def _check_runs(config: StudyConfig, runs: Sequence[Run[Any]]) -> None:
    """Raise a ValueError where a run would be refused, perhaps after hours of the runs before it."""
    written = {run.config.output for run in runs}
    dense: Any = study_kind(config).run_config.from_dict(config.dense_fields)
    for run in runs:
        started = run.config
        # Not there yet; its architecture is the dense model's.
        if not isinstance(started, LoopConfig) and started.model.checkpoint in written:
            started = dataclasses.replace(started, model=dense.model)
        kind = kind_of(started)
        try:
            if run.is_trained:
                kind.check_schedule()
            if run.seed == 0 and run.search is None and (started.routing or started.methods):
                kind.sketch()
        except ValueError as error:
            raise ValueError(f"model {run.name!r} of the study: {error}") from error


def _find_checkpoints(runs: Sequence[Run[Any]]) -> None:
    """Raise a FileNotFoundError where a run starts from a checkpoint that is not there, and that no run writes."""
    written = {run.config.output for run in runs}
    for run in runs:
        if isinstance(run.config, LoopConfig) and run.config.model.checkpoint not in (None, *written):
            find_weights(str(run.config.model.checkpoint))


def _work(config: Any) -> float:
    """Return the duration of a run, in any unit that the runs of a study share."""
    return float(config.epochs) if isinstance(config, LoopConfig) else 1.0


def epochs_of(runs: Sequence[Run[Any]]) -> dict[str, str]:
    """Return the epochs of each model: from scratch, or those of the dense model and of its fine-tuning."""
    first = runs[0]
    base = f"{first.config.epochs} " if starts_others(first) and isinstance(first.config, LoopConfig) else ""
    return {run.name: _epochs(run, base) for run in runs if isinstance(run.config, LoopConfig)}


def _epochs(run: Run[Any], base: str) -> str:
    if not run.is_tuned:
        return str(run.config.epochs) if run.is_trained else ""
    if not run.is_trained:
        return base.strip()
    trained = getattr(run.config, "trained", None)
    return f"{base}+ {run.config.epochs}{'' if trained is None else f' ({trained})'}"
