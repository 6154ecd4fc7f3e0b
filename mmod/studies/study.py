"""A study: one dense model, the entrants made from it, and what they cost and score over several seeds."""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from mmod.analysis.plots import draw_tradeoff
from mmod.analysis.statistics import Estimate, published
from mmod.analysis.timing import interleave, relative_times
from mmod.io.claim import differences
from mmod.io.files import parse_json, write_atomically
from mmod.io.yaml import merged, read_yaml
from mmod.studies.config import BESIDE, StudyConfig
from mmod.studies.entrants import DENSE, Changed, Dense, Entrant
from mmod.studies.jobs import Job, Runner, Search, Tick
from mmod.studies.paired import compare, verdict
from mmod.studies.plan import search_for
from mmod.studies.results import Column, Point, StudyResult, flat, table_of, write_outcome
from mmod.training.engine.loop import seed_draws
from mmod.training.engine.recipe import Recipe
from mmod.training.engine.run_folder import portable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Study", "latencies"]

Config = TypeVar("Config")
Found = TypeVar("Found")
# The dense model that all fine-tuning starts from; the point shown as dense is fine-tuned like the others.
_BASE = "base"
# The series that others are compared with where a study names no other control.
_CONTROL = "random"
Scores = Mapping[str, Mapping[int, float]]
"""The score of each model by its name and the seed."""
Costs = Mapping[str, Mapping[str, float]]
"""What each model costs, by its name and that of the figure."""


class Outcome(NamedTuple):
    """What came out of one run: the evaluation of its final model, and all of its figures."""

    found: Any
    figures: dict[str, float]


class Study(ABC, Generic[Config, Found]):
    """A comparison of models by cost and score; a subclass says what they are and how they are judged.

    Args:
        config: The study.

    Attributes:
        recipe: The kind of training.
        run_config: The dataclass of a run's config.
        found: The dataclass of an evaluation.
        score: The figure, in percent, by which models are compared.
        measure: What the score is, for the picture.
        columns: Name of each column of the table to its title and format.
    """

    recipe: ClassVar[type[Recipe[Any, Any]]]
    run_config: ClassVar[Any]
    found: ClassVar[type]
    score: str
    measure: str
    columns: ClassVar[dict[str, Column]]

    def __init__(self, config: StudyConfig) -> None:
        self.config = config
        self._searched: dict[str, dict[str, Any]] = {}  # Runs ask for their plan several times.

    def create(self, config: Config) -> nn.Module:
        """Make the model that a run starts from, routed as its config says."""
        return self.recipe(config).create()

    def start_from(self, config: Config, folder: str) -> Config:
        """Return the config of the same run from the final weights of the run in `folder`."""
        started: Config = self.recipe(config).started_from(folder)
        return started

    def train(self, config: Config, tick: Tick) -> Found:
        """Do a run, or read the result of one that is finished."""
        found: Found = self.recipe(config).train(tick)
        return found

    def evaluate(self, config: Config) -> Found:
        """Judge the model that a run starts from."""
        recipe = self.recipe(config)
        found: Found = recipe.assess(self.create(config).to(recipe.device))
        return found

    @abstractmethod
    def figures(self, found: Found) -> dict[str, float]:
        """Return the figures of an evaluation by name, the score among them."""

    @abstractmethod
    def examine(self, job: Job[Config], found: Found) -> dict[str, float]:
        """Count what a finished model costs, and draw what it keeps."""

    @abstractmethod
    def time(self, jobs: Mapping[str, Job[Config]]) -> dict[str, dict[str, float]]:
        """Measure the final models of some runs side by side; return each one's figures."""

    def routing(self, fields: dict[str, Any], capacity: float | None) -> Any:
        """Return a run's `routing` from that of a series and a capacity."""
        return fields if capacity is None else {**fields, "capacity": capacity}

    def entrants(self, dense: Config, tuned: Config) -> list[Entrant]:
        """Return what is compared, the dense model first."""
        config, entrants = self.config, list[Entrant]([Dense()])
        runs = [
            (series, fields, capacity)
            for series, fields in config.routers.items()
            for capacity in ([None] if config.is_one(series) else config.capacities)
        ]

        def name_of(series: str, capacity: float | None) -> str:
            return series if capacity is None or config.is_one(series) else f"{series}-{capacity:g}"

        for series, fields, capacity in runs:
            control = config.controls.get(series, _CONTROL)
            name, against = name_of(series, capacity), None if control is None else name_of(control, capacity)
            search = config.search_of(series, capacity)
            own = {key: value for key, value in fields.items() if key not in BESIDE}
            entrants.append(
                Changed(
                    name=name, series=series, capacity=capacity, control=against, search=search,
                    routing=None if search else self.routing(own, capacity), image_size=fields.get("image_size"),
                    changes=fields.get("changes", {}), is_trained=config.tune and fields.get("tune", True),
                )
            )  # fmt: skip
        return entrants

    def ready(self, job: Job[Config]) -> Job[Config]:
        """Return a run as it starts: with the plan of its seed's dense model, where one is searched."""
        if job.search is None:
            return job
        own: Any = job.config
        if (key := str(job.search)) not in self._searched:
            self._searched[key] = search_for(own, *job.search).config.to_dict()
        routing = self.routing(self._searched[key], None)
        return dataclasses.replace(job, config=dataclasses.replace(own, routing=routing), search=None)

    @property
    @abstractmethod
    def costs(self) -> dict[str, str]:
        """Columns of costs that the score is drawn against, to the titles of their axes; times name their batch."""

    def pictures(self, rows: Sequence[dict[str, Any]]) -> dict[str, Figure]:
        """Draw the points; return figures by the name of their file."""
        return {"tradeoff": draw_tradeoff(rows, self.score, self.measure, self.costs)}

    def compare(self, scores: Scores, partners: Mapping[str, str | None]) -> dict[str, Estimate | None]:
        """Return each model's difference to the model that is its partner."""
        return compare(scores, partners)

    def verdict(self, scores: Scores) -> str:
        """Say in one sentence which models are not told apart."""
        return verdict(scores)

    def to_rivals(self, scores: Scores, costs: Costs) -> dict[str, dict[str, Any]]:
        """Return each model's difference to the best rival that is as fast, by column; none as a rule."""
        return {name: {} for name in scores}

    def ranking(self, scores: Scores, costs: Costs) -> str:
        """Say which models may be called better."""
        return self.verdict(scores)

    def prepare(self, runner: Runner) -> None:
        """Find out what must be known before the runs; nothing as a rule."""

    def complete(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows of the table with what follows from all of them together."""
        return rows

    def table(self, rows: Sequence[dict[str, Any]]) -> str:
        """Return the points as a Markdown table."""
        return table_of(self.columns, rows)

    def facts(self) -> dict[str, Any]:
        """Return what the JSON file says beyond config and points."""
        return {}

    def run(self, *, progress: bool = True) -> StudyResult:
        """Train or load the dense model and the entrants made from it, evaluate, time, and draw.

        Table and pictures are written as soon as there is a model to compare with the dense one, and again with each
        further model of the first seed and each further seed. Latency joins them at the end, when nothing else runs.

        Args:
            progress: Show a bar.

        Returns:
            The points; the same are written as CSV, JSON, Markdown and pictures.

        Raises:
            ValueError: The folder holds runs of another config, or a part of the config does not fit the model.
        """
        runner = Runner(self.config.processes, progress)
        self.prepare(runner)
        entrants, jobs = self.plan()
        first = {job.name: job for job in jobs if job.seed == 0 and job.name != _BASE}
        figures: dict[str, dict[int, dict[str, float]]] = {name: {} for name in first}
        costs: dict[str, dict[str, float]] = {}

        def write() -> StudyResult:
            shown = {entrant.name: entrant for entrant in entrants if entrant.name in costs}
            scores = {name: {seed: own[self.score] for seed, own in sorted(figures[name].items())} for name in shown}
            to_dense = self.compare(scores, dict.fromkeys(shown, DENSE))
            to_control = self.compare(scores, {name: entrant.control for name, entrant in shown.items()})
            to_rivals = self.to_rivals(scores, costs)
            points = [
                Point(
                    name, own.series, own.capacity, costs[name], figures[name], to_dense[name], to_control[name],
                    to_rivals[name],
                )
                for name, own in shown.items()
            ]  # fmt: skip
            return self._write(points, self.ranking(scores, costs), runner)

        for job, outcome in runner.run(jobs, self.do):
            if job.name not in first:
                continue
            figures[job.name][job.seed] = outcome.figures
            if job.seed == 0:
                costs[job.name] = self.examine(job, outcome.found)
            is_news = job.seed == 0 or all(job.seed in seeds for seeds in figures.values())
            if len(costs) > 1 and DENSE in costs and is_news:
                write()
        for name, times in self.time(first).items():
            costs[name] |= times
        return write()

    def plan(self) -> tuple[list[Entrant], list[Job[Config]]]:
        """Return what is compared, and the runs in the order they must be done."""
        config, runs = self.config, list[Job[Config]]()
        recipe = merged(read_yaml(config.dense), config.changes)
        dense = self.run_config.from_dict({**recipe, "output": config.output})
        tuned = self.run_config.from_dict({**merged(recipe, config.finetune), "output": config.output})
        entrants = self.entrants(dense, tuned)
        names = Counter([_BASE, *(entrant.name for entrant in entrants)])
        if max(names.values()) > 1:
            raise ValueError(f"several models of the study have the name {names.most_common(1)[0][0]!r}")
        base = _BASE if config.tune_dense else DENSE
        for seed in range(config.seeds):
            root = Path(config.output) / f"seed{seed}"
            place = Path(config.bases) / root.name / _BASE if config.bases else root / base
            own = dataclasses.replace(dense, output=str(place), seed=seed)
            if config.train_dense or not config.tune_dense:
                runs.append(Job(base, seed, own, is_trained=config.train_dense, work=self.recipe(own).work))
            start: Any = self.start_from(tuned, str(place)) if config.train_dense else tuned
            for entrant in entrants:
                if entrant.name == base:
                    continue
                run = entrant.configure(own, dataclasses.replace(start, seed=seed))
                run = dataclasses.replace(run, output=str(root / entrant.name))
                # Evaluating alone takes about as long as a twentieth of an epoch.
                work = entrant.share * self.recipe(run).work if entrant.is_trained else 0.05
                search = None if entrant.search is None else Search(entrant.search, root / f"{entrant.series}.plans")
                runs.append(Job(entrant.name, seed, run, entrant.is_tuned, entrant.is_trained, work, search))
        return entrants, runs

    def do(self, job: Job[Config], tick: Tick) -> Outcome:
        """Do one run."""
        job = self.ready(job)
        if not job.is_trained:
            found = self._evaluate_once(job)
            return Outcome(found, self.figures(found))
        before = {}
        if job.is_tuned and self.config.before:
            before["before"] = self.figures(self._evaluate_once(job))[self.score]
        found = self.train(job.config, tick)
        return Outcome(found, self.figures(found) | before)

    def load(self, job: Job[Config]) -> nn.Module:
        """Make the final model of a run, in evaluation mode on the device it was trained on."""
        config: Any = self.ready(job).config
        if job.is_trained:
            config = self.recipe(config).finished(config.output)
        return self.create(config).to(self.recipe(config).device).eval()

    def _evaluate_once(self, job: Job[Config]) -> Found:
        """Evaluate the model that a run starts from; read again when that was done before."""
        run: Any = job.config
        path = Path(f"{run.output}.before.json")
        config = portable(run.to_dict())
        del config["output"]
        if path.exists():
            kept = parse_json(path.read_bytes(), str(path))
            if not differences(kept.get("config") or {}, config):
                found: Found = self.found(**kept["found"])
                return found
        # As at the start of training, so that routers are drawn alike.
        seed_draws(run.seed, 0, 0)
        found = self.evaluate(run)
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {"config": config, "found": dataclasses.asdict(found)}  # type: ignore[call-overload]
        write_atomically(path, json.dumps(record) + "\n")
        return found

    def _write(self, points: list[Point], told: str, runner: Runner) -> StudyResult:
        folder, rows = Path(self.config.output), self.complete([point.row() for point in points])
        record = {"config": dataclasses.asdict(self.config), **runner.facts, **self.facts()}
        record["picture"] = {"score": self.score, "measure": self.measure, "costs": self.costs}
        record["points"] = [dataclasses.asdict(point, dict_factory=published) for point in points]
        result = StudyResult(folder, points, f"{self.table(rows)}\n\n{told}", record["cpu_seconds"])
        write_outcome(folder, "tradeoff", record, [flat(row) for row in rows], result.table, self.pictures(rows))
        runner.say(f"{len(points)} models after {result.cpu_seconds:.0f} CPU seconds: {folder}/tradeoff.{{md,png}}")
        return result


def latencies(
    calls: Mapping[str, Callable[[], object]], count: int, rounds: int, device: torch.device
) -> dict[str, tuple[float, float]]:
    """Time calls in interleaved rounds; return milliseconds and speed-up over "dense" by name.

    Args:
        calls: What to time, "dense" among it.
        count: Samples that a call takes; the time returned is that of one.
        rounds: Rounds of the measurement.
        device: Where they run.
    """
    with torch.inference_mode():
        times = interleave(calls, seconds=0, rounds=rounds, device=device)
    return {name: (ms / count, speedup) for name, (ms, speedup) in relative_times(times, DENSE).items()}
