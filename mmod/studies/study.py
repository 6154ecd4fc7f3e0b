"""A study: its config becomes candidates, which are compared; what they cost and lose is written and told."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mmod.analysis.style import save_picture
from mmod.analysis.table import DENSE, Measured, Table
from mmod.io.jobs import Runner
from mmod.lazy import import_path
from mmod.planning.candidate import Candidate
from mmod.studies.compare import (
    BASE,
    Comparison,
    Measure,
    Measurer,
    Rates,
    Run,
    Timing,
    compare,
    identity_of_final,
    measure_run,
)
from mmod.studies.config import StudyConfig, TimmStudyConfig
from mmod.studies.report import Draw, Facts, StudyKind, StudyResult, write_study
from mmod.training.engine.config import RunConfig


def run_study(config: StudyConfig, *, progress: bool = True) -> StudyResult:
    """Train or load the dense model and the candidates made from it, evaluate, time, and draw.

    Table and pictures are written as soon as there is a model to compare with the dense one, and again with every
    further model of the first seed and every further seed. Latency joins them at the end, when nothing else runs.
    """
    study = study_kind(config.kind)
    comparison = comparison_of(config)
    names = [candidate.name for candidate in comparison.candidates]
    runner = Runner(config.processes, progress)
    facts: Facts = {}
    if study.describe is not None:
        facts = study.describe(comparison.dense, comparison.train or comparison.dense)
    runner.say(". ".join([f"{len(names)} models", *comparison.left_out]))
    # The runs of the first seed that are done.
    done: dict[str, Run] = {}
    is_announced = False

    def count(run: Run, measurer: Measurer, rows: Measured) -> dict[str, float]:
        identity = {"work": "costs", "batch": config.latency_batch}
        costs: dict[str, float] = measurer.of_final(run, identity, lambda model: study.count(config, run, model, rows))
        if study.draw is not None:
            _draw_once(config, run, measurer, study.draw)
        return costs

    def write(table: Table) -> StudyResult:
        runs = {name: done[name] for name in names if name in table.costs}
        return write_study(config, study, comparison, table, runs, facts, runner.facts)

    def each(table: Table, run: Run) -> None:
        nonlocal is_announced
        # It is no candidate: the others start from it.
        if run.name == BASE:
            return
        if run.seed == 0:
            done[run.name] = run
        # Where nothing is trained, the next model is there before a picture is drawn.
        is_first = run.seed == 0 and (len(table.costs) == 2 or run.is_trained)
        is_seed_done = all(run.seed in table.runs.get(name, {}) for name in names)
        if len(table.costs) > 1 and DENSE in table.costs and (is_first or is_seed_done):
            write(table)
            if not is_announced:
                runner.say(f"table and picture, from now on: {config.output}/tradeoff.{{md,png}}")
            is_announced = True

    measure, rates = _measures(config, study, comparison.dense)
    table = compare(
        comparison,
        rates=rates,
        measure=measure,
        weigh=study.weigh,
        count=count,
        timing=Timing(list(config.size_suffixes), config.latency_rounds, study.readings),
        each=each,
        runner=runner,
    )
    return write(table)


def _draw_once(config: Any, run: Run, measurer: Measurer, draw: Draw[StudyConfig]) -> None:
    """Draw what a model keeps, unless that is what its pictures in the study's folder show."""
    name = {"work": "pictures", "name": run.name}
    shown = json.dumps({"maps": config.maps, **identity_of_final(run)}, sort_keys=True)
    drawn = measurer.store.get(name) or {"shown": "", "titles": []}
    # A user may have deleted some.
    is_whole = all((Path(config.output) / f"{title}.svg").exists() for title in drawn["titles"])
    if drawn["shown"] == shown and is_whole:
        return
    pictures = draw(config, run, measurer.final(run))
    for title, figure in pictures.items():
        save_picture(config.output, title, figure)
    measurer.store.put(name, {"shown": shown, "titles": list(pictures)})


def study_kind(kind: str) -> StudyKind[StudyConfig]:
    """Return what a kind contributes to a study: `STUDY` of the module with its name. Imports its libraries."""
    study: StudyKind[StudyConfig] = import_path(f"mmod.studies.{kind}:STUDY")
    return study


def comparison_of(config: StudyConfig) -> Comparison:
    """Return what a study compares."""
    study = study_kind(config.kind)
    dense, tuned = config.run_configs()
    candidates = [Candidate(DENSE, series=DENSE, budget=1.0, is_trained=config.tune_dense)]
    candidates += [Candidate(**fields) for fields in config.routed_models()]
    left_out: Mapping[str, str] = {}
    if study.candidates is not None:
        candidates, left_out = study.candidates(config, candidates, dense, tuned)
    names = Counter([BASE, *(candidate.name for candidate in candidates)])
    if max(names.values()) > 1:
        raise ValueError(f"several models of the study have the name {names.most_common(1)[0][0]!r}")
    return Comparison(
        candidates=candidates,
        dense=dense,
        # Untuned models are evaluated on the data and in the precision of the dense one.
        train=tuned if config.tune else None,
        seeds=config.seeds,
        train_dense=config.train_dense,
        bases=config.bases,
        left_out=[f"Left out: {name}: {reason}" for name, reason in left_out.items()],
    )


def _measures(config: StudyConfig, study: StudyKind[StudyConfig], dense: RunConfig) -> tuple[Measure, Rates | None]:
    """Return what does the runs of a study, and the learning rates that are tried first."""
    if study.measure is None:
        before = config.score if config.before else None
        # Models of several seeds are paired by seed.
        measure: Measure = partial(measure_run, before=before, by_sample=config.seeds == 1)
        trial: Measure = measure_run
    else:
        measure = partial(study.measure, config, dense)
        # Of a trial, only the trained model counts.
        trial = partial(study.measure, dataclasses.replace(config, before=False), dense)
    if not isinstance(config, TimmStudyConfig) or config.rates is None:
        return measure, None
    return measure, Rates(config.rates, config.score, trial, {"val_split": config.rate_split})
