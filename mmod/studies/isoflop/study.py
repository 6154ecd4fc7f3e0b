"""An isoFLOP study: its grid of models, trials of learning rates, then every model with every seed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mmod.analysis.prefill import training_flops
from mmod.analysis.statistics import published
from mmod.compare.table import Measured, Table, compare, mean_of, means_over_seeds
from mmod.data.loader import text_stream
from mmod.io.jobs import Callback, Job, Runner
from mmod.io.yaml import merged, read_yaml
from mmod.planning.candidate import Candidate
from mmod.studies.config import IsoflopConfig
from mmod.studies.isoflop.report import draw, optima, table, verdict
from mmod.studies.results import StudyResult, write_outcome
from mmod.studies.runs import best_rates, rows_of, train, with_rate
from mmod.training.engine.kind import steps_of_epoch
from mmod.training.text.config import TrainConfig
from mmod.training.text.kind import TextKind
from mmod.training.text.model import window_flops
from mmod.values import refuse_unknown

# The negative loss, so that more is better.
_GAIN = "gain"


class Place(NamedTuple):
    """One model of the grid, trained with one budget; all but the config are its columns in the study's table."""

    series: str
    size: str
    budget: float
    parameters: int  # Routers included.
    forward: int  # FLOPs of the forward pass of a window.
    steps: int
    spent: float  # FLOPs of all steps.
    config: TrainConfig  # Without learning rate, seed and folder.

    @property
    def name(self) -> str:
        """Name of its runs."""
        return f"{self.series}-{self.size}-{self.budget:g}"

    def row(self, rate: float, seeds: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
        """Return its columns at a learning rate: the figures of every seed, and their means."""
        facts = {name: value for name, value in self._asdict().items() if name != "config"}
        return {**facts, "rate": rate, "seeds": seeds, **means_over_seeds(seeds)}

    def job(self, rate: float, seed: int, folder: Path) -> Job[TrainConfig]:
        """Return the run with a learning rate and a seed, in a folder named after the place."""
        config = dataclasses.replace(self.config, output=str(folder / self.name), seed=seed)
        config = with_rate(config, rate / config.optim.lr)
        return Job(f"{self.name} at rate {rate:g}", seed, config, work=self.spent)


def plan(config: IsoflopConfig) -> list[Place]:
    """Return the models of a study, by budget, series and size."""
    fields = merged(read_yaml(config.dense), config.changes)
    dense = TrainConfig.from_dict({**fields, "output": config.output, "routing": None})
    places = []
    for candidate in _candidates(config):
        for size, changes in config.sizes.items():
            sized = dataclasses.replace(candidate, changes={"model": {"config": changes}})
            run = sized.configure(dense, dense)
            model = TextKind(run).create()
            parameters = sum(parameter.numel() for parameter in model.parameters())
            # Counted as in training: logits of every token, and the top-k of routed layers.
            forward = window_flops(model, run.data.length)
            window = training_flops(model, run.data.length)
            for budget in config.budgets:
                step = window * run.data.batch_size * run.accumulate
                timed = _timed(run, budget, step, f"{candidate.name} {size}")
                steps = timed.epochs * (timed.epoch_steps or 0)
                spent = float(step * steps)
                places.append(Place(candidate.name, size, budget, parameters, forward, steps, spent, timed))
    _check_text(places)
    return sorted(places, key=lambda place: place.budget)


def _candidates(config: IsoflopConfig) -> list[Candidate]:
    """Return the models compared at every size and budget."""
    candidates = []
    for series, fields in config.routings.items():
        if fields is None or "methods" not in fields:
            candidates.append(Candidate(series, routing=fields))
            continue
        refuse_unknown(f"field beside routings.{series}.methods", fields, ("methods", "routing"))
        candidates.append(Candidate(series, methods=tuple(fields["methods"]), routing=fields.get("routing")))
    return candidates


def run_study(config: IsoflopConfig, *, progress: bool = True) -> StudyResult:
    """Find every model's learning rate, train it, and write `isoflop.{csv,json,md,png}` after each seed."""
    places = plan(config)
    runner = Runner(config.processes, progress)
    rates = _find_rates(config, places, runner)
    table = Table()
    # By seed, so that there is a picture after the first.
    jobs = []
    for seed in range(config.seeds):
        folder = Path(config.output) / f"seed{seed}"
        jobs += [place.job(rates[place.name], seed, folder) for place in places]
    names = [job.name for job in jobs[: len(places)]]
    result = None
    for job in compare(table, jobs, _train, runner):
        if all(job.seed in table.runs.get(name, {}) for name in names):
            figures = [table.figures(name) for name in names]
            points = [place.row(rates[place.name], by_seed) for place, by_seed in zip(places, figures)]
            result = _write(config, points, runner)
    assert result is not None
    return result


def describe(config: IsoflopConfig) -> str:
    """Say what a study would do: runs, steps and FLOPs of every model."""
    places = plan(config)
    trials = len(config.rates) if len(config.rates) > 1 else 0
    runs = trials + config.seeds
    lines = [
        f"{place.name}: {place.parameters:,} parameters, {place.forward:.3g} FLOPs a window, {place.steps} steps, "
        f"{place.spent:.3g} FLOPs a run"
        for place in places
    ]
    total = runs * sum(place.spent for place in places)
    return "\n".join([*lines, f"{runs * len(places)} runs of {len(places)} models, {total:.3g} FLOPs in total"])


def _timed(config: TrainConfig, budget: float, step: int, name: str) -> TrainConfig:
    """Return the config of a run whose steps of some FLOPs come nearest to the budget."""
    paid = budget / step
    numbers = range(config.epochs, 2 * config.epochs)
    if paid < config.epochs:
        raise ValueError(
            f"budget {budget:g} pays for {paid:.1f} steps of {name}, and its run has {config.epochs} epochs: "
            "give a larger budget, or smaller batches"
        )
    epochs = min(numbers, key=lambda number: abs(number * round(paid / number) - paid))
    return dataclasses.replace(config, epochs=epochs, epoch_steps=round(paid / epochs), eval_every=epochs)


def _check_text(places: list[Place]) -> None:
    longest = max(places, key=lambda place: place.steps)
    stream = text_stream(longest.config.data, seed=0)
    available = steps_of_epoch(dataclasses.replace(longest.config, epoch_steps=None), stream)
    if longest.steps > available:
        raise ValueError(
            f"budget {longest.budget:g} trains {longest.series} {longest.size} for {longest.steps} steps, and the text "
            f"has {available}: give a smaller budget, or smaller batches"
        )


def _find_rates(config: IsoflopConfig, places: list[Place], runner: Runner) -> dict[str, float]:
    """Return the learning rate of every model by name, the lowest of equal losses."""
    if len(config.rates) == 1:
        return {place.name: config.rates[0] for place in places}
    # This seed's results are not reported.
    seed = config.seeds
    root = Path(config.output) / "rates"
    jobs: dict[tuple[str, float], Job[TrainConfig]] = {}
    for place in places:
        jobs |= {(place.name, rate): place.job(rate, seed, root / f"{rate:g}") for rate in sorted(config.rates)}
    tried = Table()
    best = best_rates(tried, _GAIN, jobs, _try, runner)
    for name, rate in best.items():
        if mean_of(tried, _GAIN, jobs[name, rate].name) == -math.inf:
            raise FloatingPointError(
                f"{name} is trained by none of the rates {sorted(config.rates)}: give smaller ones"
            )
    return best


def _train(job: Job[TrainConfig], callback: Callback) -> Measured:
    return rows_of(train(job.config, callback))


def _try(job: Job[TrainConfig], callback: Callback) -> Measured:
    """Return what a learning rate gains, negatively infinite where the loss diverges."""
    try:
        return Measured({_GAIN: -_train(job, callback).figures["loss"]})
    except FloatingPointError:
        return Measured({_GAIN: -math.inf})


def _write(config: IsoflopConfig, points: list[dict[str, Any]], runner: Runner) -> StudyResult:
    folder = Path(config.output)
    facts = runner.facts
    text = f"{table(points, config.score)}\n\n{verdict(points, config.score)}"
    least = [
        {**row, "difference": row["difference"] and dataclasses.asdict(row["difference"], dict_factory=published)}
        for row in optima(points, config.score)
    ]
    record = {"config": dataclasses.asdict(config), **facts, "points": points, "optima": least}
    record["title"] = "Loss against parameters and FLOPs of a forward pass at equal training FLOPs"
    rows = [{key: value for key, value in row.items() if key != "seeds"} for row in points]
    write_outcome(folder, "isoflop", record, rows, text, {"isoflop": draw(points, config.score)})
    runner.say(f"{len(points)} models after {facts['cpu_seconds']:.0f} CPU seconds: {folder}/isoflop.{{md,png}}")
    return StudyResult(folder, points, points, text, text, facts["cpu_seconds"])
