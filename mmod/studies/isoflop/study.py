"""The runs of an isoFLOP study: trials of learning rates, then every model with every seed."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmod.analysis.statistics import published
from mmod.studies.isoflop.config import IsoflopConfig
from mmod.studies.isoflop.grid import Place, plan
from mmod.studies.isoflop.report import draw, optima, point_of, table
from mmod.studies.jobs import Job, Runner, Tick
from mmod.studies.results import write_outcome
from mmod.training.text.config import TrainConfig
from mmod.training.text.evaluate import EvalResult
from mmod.training.text.recipe import TextRecipe

__all__ = ["IsoflopResult", "describe", "run_study"]


@dataclass(frozen=True)
class IsoflopResult:
    """The outcome of a study.

    Args:
        folder: The study's folder, with `isoflop.{csv,json,md,png}`.
        points: A row for each model.
        table: Points and least losses as Markdown.
        cpu_seconds: CPU time of all processes since the study was last started.
    """

    folder: Path
    points: list[dict[str, Any]]
    table: str
    cpu_seconds: float


def run_study(config: IsoflopConfig, *, progress: bool = True) -> IsoflopResult:
    """Find each model's learning rate, train it with every seed, and write table and picture.

    They are written with each seed that all models have been trained with.

    Args:
        config: The study.
        progress: Show a bar.

    Raises:
        ValueError: The folder holds runs of another config, or a budget does not fit the model or the text.
        FloatingPointError: All learning rates of a model let its loss stop being finite.
    """
    places, runner = plan(config), Runner(config.processes, progress)
    rates = _find_rates(config, places, runner)
    root, found = Path(config.output), {place.name: dict[int, EvalResult]() for place in places}
    # By seed, so that there is a picture after the first.
    jobs = {
        (place.name, seed): place.job(rates[place.name], seed, root / f"seed{seed}")
        for seed in range(config.seeds)
        for place in places
    }
    of_folder = {job.config.output: key for key, job in jobs.items()}
    result = None
    for job, evaluation in runner.run(list(jobs.values()), _train):
        name, seed = of_folder[job.config.output]
        found[name][seed] = evaluation
        if all(seed in own for own in found.values()):
            points = [point_of(place, rates[place.name], found[place.name]) for place in places]
            result = _write(config, points, runner)
    assert result is not None
    return result


def describe(config: IsoflopConfig) -> str:
    """Say what a study would do: runs, steps and FLOPs of each model."""
    places = plan(config)
    trials = len(config.rates) if len(config.rates) > 1 else 0
    runs = trials + config.seeds
    lines = [
        f"{place.name}: {place.parameters:,} parameters, {place.forward:.3g} FLOPs a window, {place.steps} steps, "
        f"{place.spent:.3g} FLOPs a run"
        for place in places
    ]
    total = runs * sum(place.spent for place in places)
    return "\n".join([*lines, f"{runs * len(places)} runs of {len(places)} models, {total:.3g} FLOPs in all"])


def _find_rates(config: IsoflopConfig, places: list[Place], runner: Runner) -> dict[str, float]:
    """Return the learning rate of each model by name; lower ones come first where losses are equal."""
    if len(config.rates) == 1:
        return {place.name: config.rates[0] for place in places}
    # Nothing is reported of this seed.
    seed, root = config.seeds, Path(config.output) / "rates"
    jobs = {
        (place.name, rate): place.job(rate, seed, root / f"{rate:g}")
        for place in places
        for rate in sorted(config.rates)
    }
    of_folder = {job.config.output: key for key, job in jobs.items()}
    losses: dict[str, dict[float, float]] = {place.name: {} for place in places}
    for job, loss in runner.run(list(jobs.values()), _try):
        name, rate = of_folder[job.config.output]
        losses[name][rate] = loss
    for name, own in losses.items():
        if min(own.values()) == math.inf:
            raise FloatingPointError(f"{name} is trained by none of the rates {sorted(own)}: give smaller ones")
    return {name: min(sorted(own), key=own.__getitem__) for name, own in losses.items()}


def _train(job: Job[TrainConfig], tick: Tick) -> EvalResult:
    return TextRecipe(job.config).train(tick)


def _try(job: Job[TrainConfig], tick: Tick) -> float:
    """Return the loss that a learning rate leads to, infinite where it stops being a number."""
    try:
        return _train(job, tick).loss
    except FloatingPointError:
        return math.inf


def _write(config: IsoflopConfig, points: list[dict[str, Any]], runner: Runner) -> IsoflopResult:
    folder = Path(config.output)
    text = table(points, config.score)
    least = [
        {**row, "difference": row["difference"] and dataclasses.asdict(row["difference"], dict_factory=published)}
        for row in optima(points, config.score)
    ]
    facts = runner.facts
    record = {"config": dataclasses.asdict(config), **facts, "points": points, "optima": least}
    rows = [{key: value for key, value in row.items() if key != "seeds"} for row in points]
    write_outcome(folder, "isoflop", record, rows, text, {"isoflop": draw(points, config.score)})
    runner.say(f"{len(points)} models after {facts['cpu_seconds']:.0f} CPU seconds: {folder}/isoflop.{{md,png}}")
    return IsoflopResult(folder, points, text, facts["cpu_seconds"])
