"""A study: its config becomes candidates, which are compared; what they cost and lose is written and told."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mmod.analysis.timing import relative_times
from mmod.compare.table import DENSE, Table
from mmod.io.jobs import Runner
from mmod.io.store import STORE, Store
from mmod.lazy import import_path
from mmod.planning.candidate import Candidate
from mmod.studies.compare import (
    BASE,
    Measure,
    Measurer,
    Run,
    Timing,
    best_rates,
    check_runs,
    compare,
    first_runs,
    measure_run,
    runs_of,
)
from mmod.studies.config import StudyConfig
from mmod.studies.kind import StudyKind
from mmod.studies.report import StudyResult, write_study
from mmod.training.kinds import kind_of


def run_study(config: StudyConfig, *, progress: bool = True) -> StudyResult:
    """Train or load the dense model and the candidates made from it, evaluate, time, and draw.

    Table and pictures are written as soon as there is a model to compare with the dense one, and again with every
    further model of the first seed and every further seed. Latency joins them at the end, when nothing else runs.
    """
    study = study_kind(config.kind)
    runner = Runner(config.processes, progress)
    compared = _compared(config)
    candidates: Sequence[Candidate] = compared["candidates"]
    runs = runs_of(**compared)
    rates = _find_rates(config, study, runs, compared["kind"], runner)
    facts = {} if study.describe is None else study.describe(config, compared["kind"])
    epochs = epochs_of(runs)
    first = first_runs(runs)
    is_announced = False

    def write(table: Table) -> StudyResult:
        shown = {candidate.name: candidate for candidate in candidates if candidate.name in table.costs}
        more = {**runner.facts, "rates": rates, "epochs": epochs}
        return write_study(config, study, table, shown, first, facts, more)

    def each(table: Table, run: Run) -> None:
        nonlocal is_announced
        if run.name not in first:
            return
        # A searched plan is known now.
        first[run.name] = run if run.seed == 0 else first[run.name]
        # Where nothing is trained, the next model is there before a picture is drawn.
        is_first = run.seed == 0 and (len(table.costs) == 2 or run.is_trained)
        is_seed_done = all(run.seed in table.runs.get(name, {}) for name in first)
        if len(table.costs) > 1 and DENSE in table.costs and (is_first or is_seed_done):
            write(table)
            if not is_announced:
                runner.say(f"table and picture, from now on: {config.output}/tradeoff.{{md,png}}")
            is_announced = True

    table = compare(
        **compared,
        rates=rates,
        measure=_measure_of(config, study),
        weigh=study.weigh,
        count=partial(study.count, config),
        timing=Timing(config.batch_sizes, config.latency_rounds, study.readings),
        each=each,
        runner=runner,
    )
    for (inputs, size), ms in table.times.items():
        columns = config.time_columns(study.times[inputs], size)
        for name, figures in relative_times(ms, DENSE).items():
            table.costs[name].update(zip(columns, figures))
    if study.derive is not None:
        study.derive(table.costs)
    return write(table)


def study_kind(kind: str) -> StudyKind:
    """Return what a kind contributes to a study: `STUDY` of the module with its name. Imports its libraries."""
    study: StudyKind = import_path(f"mmod.studies.{kind}:STUDY")
    return study


def plan(config: StudyConfig) -> tuple[list[Candidate], list[Run]]:
    """Return the compared models, and the runs in the order they must be done."""
    compared = _compared(config)
    return compared["candidates"], runs_of(**compared)


def _compared(config: StudyConfig) -> dict[str, Any]:
    """Return what a study compares, as the arguments of `runs_of`."""
    study = study_kind(config.kind)
    run_config: Any = study.run_config
    dense = run_config.from_dict(config.dense_fields)
    tuned = run_config.from_dict(config.tuned_fields)
    config.check(dense, tuned)
    candidates = study.candidates(config, dense, tuned)
    names = Counter([BASE, *(candidate.name for candidate in candidates)])
    if max(names.values()) > 1:
        raise ValueError(f"several models of the study have the name {names.most_common(1)[0][0]!r}")
    return {
        "candidates": candidates,
        "kind": kind_of(dense),
        "train": tuned,
        "seeds": config.seeds,
        "train_dense": config.train_dense,
        "bases": config.bases,
    }


def _measure_of(config: Any, study: StudyKind, *, is_trial: bool = False) -> Measure:
    """Return what trains or evaluates a run of a study; of a trial, only the trained model counts."""
    if is_trial:
        config = dataclasses.replace(config, before=False)
    if study.measure is not None:
        return partial(study.measure, config)
    # Models of several seeds are paired by seed.
    by_sample = config.seeds == 1 and not is_trial
    return partial(measure_run, before=config.score if config.before else None, by_sample=by_sample)


def _find_rates(config: Any, study: StudyKind, runs: Sequence[Run], kind: Any, runner: Runner) -> dict[str, float]:
    """Return the best factor of the learning rate by model, once it was searched; empty without a search."""
    if config.rates is None:
        return {}
    check_runs(kind, runs)
    before = [run for run in runs[:1] if starts_others(run)]
    tried = [run for run in runs[len(before) :] if run.seed == 0 and run.is_trained]
    measurer = Measurer(_measure_of(config, study, is_trial=True), Store(Path(config.output) / STORE))
    data = {"val_split": config.rate_split}
    folder = f"{config.output}/rates"
    return best_rates(tried, config.rates, config.score, measurer, runner, folder, data=data, before=before)


def starts_others(first: Run) -> bool:
    """Return whether the first run of a study trains the dense model that others start from."""
    return first.is_trained and not first.is_tuned


def epochs_of(runs: Sequence[Run]) -> dict[str, str]:
    """Return the epochs of each model: from scratch, or those of the dense model and of its fine-tuning."""
    first = runs[0]
    if first.config.epochs is None:
        return {}
    base = f"{first.config.epochs} " if starts_others(first) else ""
    return {run.name: _epochs(run, base) for run in runs}


def _epochs(run: Run, base: str) -> str:
    if not run.is_tuned:
        return str(run.config.epochs) if run.is_trained else ""
    if not run.is_trained:
        return base.strip()
    trained = getattr(run.config, "trained", None)
    return f"{base}+ {run.config.epochs}{'' if trained is None else f' ({trained})'}"
