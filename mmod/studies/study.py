"""A study: one dense model, the entrants made from it, and their costs and scores over several seeds."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from mmod.analysis.plots import draw_tradeoff
from mmod.analysis.statistics import Estimate, published
from mmod.analysis.timing import interleave, relative_times
from mmod.io.claim import differences
from mmod.io.jobs import Runner, Tick
from mmod.io.journal import Journal
from mmod.io.tables import table_of
from mmod.io.yaml import merged, read_yaml
from mmod.studies.config import RUN_FIELDS, StudyConfig
from mmod.studies.entrants import DENSE, Entrant
from mmod.studies.jobs import Run, Search
from mmod.studies.plan import search_for
from mmod.studies.results import COLUMNS, Point, StudyResult, compare, flat, verdict, write_outcome
from mmod.training.engine.evaluate import RoutedResult
from mmod.training.engine.recipe import Reading, Recipe
from mmod.training.engine.run_folder import portable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Config = TypeVar("Config")
Evaluation = TypeVar("Evaluation", bound=RoutedResult)
# The dense model that all fine-tuning starts from; the point shown as dense is fine-tuned like the others.
_BASE = "base"
# Epochs that take about as long as evaluating once.
_EVALUATION = 0.05
# The control of series for which a study names no other.
_CONTROL = "random"
Scores = Mapping[str, Mapping[int, float]]
"""The score of a model by its name and the seed."""
Costs = Mapping[str, Mapping[str, float]]
"""The costs of a model, by its name and that of the cost."""


class Outcome(NamedTuple):
    """The outcome of one run: the evaluation of its final model, and all figures."""

    evaluation: Any
    figures: dict[str, float]


class Study(ABC, Generic[Config, Evaluation]):
    """A comparison of models by cost and score; a subclass says what they are and how they are judged.

    Attributes:
        recipe: The kind of training.
        run_config: The dataclass of a run's config.
        score: The figure of an evaluation, in percent, by which models are compared.
        measure: Name of the score in the picture.
        columns: Names of the table's columns, see `COLUMNS`.
        times: Columns of time per sample and of speed-up over the dense model, by input as in `Recipe.readings`.
    """

    recipe: ClassVar[type[Recipe[Any, Any]]]
    run_config: ClassVar[Any]
    score: str
    measure: str
    columns: Sequence[str]
    times: ClassVar[Mapping[str, tuple[str, str]]]

    def __init__(self, config: StudyConfig) -> None:
        self.config = config
        self.compared: dict[str, Entrant] = {}  # By name, once the study is planned.
        self._plans: dict[str, dict[str, Any]] = {}  # Runs ask for their plan several times.

    @abstractmethod
    def examine(self, job: Run[Config], evaluation: Evaluation) -> dict[str, float]:
        """Count the costs of a finished model, and draw what it keeps."""

    def time(self, jobs: Mapping[str, Run[Config]], *, shown: bool) -> dict[str, dict[str, float]]:
        """Measure the latency of final models in batches of several sizes, all in turns; return figures by model."""
        recipes = {name: self.recipe(job.config) for name, job in jobs.items()}
        readings: dict[tuple[str, int, str], Reading] = {}
        for name, job in jobs.items():
            model = self.load(job)
            for size in self.batch_sizes:
                passes = recipes[name].readings(model, size, max(self.batch_sizes) // size)
                readings |= {(inputs, size, name): reading for inputs, reading in passes.items()}
        calls = {key: reading.call for key, reading in readings.items()}
        with torch.inference_mode():
            device, rounds = recipes[DENSE].device, self.config.latency_rounds
            times = interleave(calls, seconds=0, rounds=rounds, device=device, shown=shown)
        figures: dict[str, dict[str, float]] = {name: {} for name in jobs}
        for inputs, size in dict.fromkeys((inputs, size) for inputs, size, _ in times):
            ms, speedup = self.time_columns(inputs, size)
            by_model = {name: times[inputs, size, name] for name in jobs}
            for name, (total, ratio) in relative_times(by_model, DENSE).items():
                figures[name] |= {ms: total / readings[inputs, size, name].samples, speedup: ratio}
        return figures

    @property
    def batch_sizes(self) -> list[int]:
        """The batch sizes whose latency is measured."""
        return sorted({*self.config.latency_batches, self.config.latency_batch})

    def time_columns(self, inputs: str, size: int) -> tuple[str, str]:
        """Return the names of a batch size's columns of time and of speed-up over the dense model."""
        ms, speedup = self.times[inputs]
        further = "" if size == self.config.latency_batch else f"_b{size}"
        return f"{ms}{further}", f"{speedup}{further}"

    @property
    @abstractmethod
    def costs(self) -> dict[str, str]:
        """Columns of costs that the score is drawn against, to the titles of their axes; times name their batch."""

    def routing(self, fields: dict[str, Any], capacity: float | None) -> Any:
        """Return a run's `routing` from that of a series and a capacity."""
        return fields if capacity is None else {**fields, "capacity": capacity}

    def entrants(self, dense: Config, tuned: Config) -> list[Entrant]:
        """Return what is compared, the dense model first."""
        config, entrants = self.config, [Entrant()]

        def name_of(series: str, budget: float | None) -> str:
            return series if budget is None or config.is_one(series) else f"{series}-{budget:g}"

        for series, budget, fields in config.routed_models():
            control = config.controls.get(series, _CONTROL)
            search = config.search_of(series, budget)
            routing = {key: value for key, value in fields.items() if key not in RUN_FIELDS}
            entrants.append(
                Entrant(
                    name=name_of(series, budget), series=series, capacity=budget, search=search,
                    control=None if control is None else name_of(control, budget),
                    routing=None if search else self.routing(routing, None if "budgets" in fields else budget),
                    image_size=fields.get("image_size"), changes=fields.get("changes", {}),
                    is_trained=config.tune and fields.get("tune", True),
                )
            )  # fmt: skip
        return entrants

    def ready(self, job: Run[Config]) -> Run[Config]:
        """Return a run with the plan of its seed's dense model, where one is searched."""
        if job.search is None:
            return job
        config: Any = job.config
        if (key := str(job.search)) not in self._plans:
            self._plans[key] = search_for(config, *job.search).config.to_dict()
        routing = self.routing(self._plans[key], None)
        return dataclasses.replace(job, config=dataclasses.replace(config, routing=routing), search=None)

    def pictures(self, rows: Sequence[dict[str, Any]]) -> dict[str, Figure]:
        """Draw the points; return figures by the name of their file."""
        return {"tradeoff": draw_tradeoff(rows, self.score, self.measure, self.costs)}

    def compare(self, scores: Scores, partners: Mapping[str, str | None]) -> dict[str, Estimate | None]:
        """Return the difference of every model to its partner."""
        return compare(scores, partners)

    def verdict(self, scores: Scores) -> str:
        """Say in one sentence between which models there is no significant difference."""
        return verdict(scores)

    def to_rivals(self, scores: Scores, costs: Costs) -> dict[str, dict[str, Any]]:
        """Return the difference of every model to the best rival that is as fast, by column; none as a rule."""
        return {name: {} for name in scores}

    def to_best(self, scores: Scores, rivals: Mapping[str, Sequence[str]], suffix: str = "") -> dict[str, Any]:
        """Return the columns of every model's difference to the best of its rivals, and of the name of that rival."""
        best = {
            name: max(others, key=lambda other: mean(scores[other].values()), default=None)
            for name, others in rivals.items()
        }
        gaps = self.compare(scores, best)
        return {name: {f"to_rival{suffix}": gaps[name], f"rival{suffix}": best[name]} for name in scores}

    def ranking(self, scores: Scores, costs: Costs) -> str:
        """Say which models are significantly better."""
        return self.verdict(scores)

    def prepare(self, runner: Runner) -> None:
        """Do what must be done before the runs; nothing as a rule."""

    def complete(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows of the table with columns that need all of them."""
        return rows

    def table(self, rows: Sequence[dict[str, Any]]) -> str:
        """Return the points as a Markdown table."""
        return str(table_of({name: COLUMNS[name] for name in self.columns}, rows))

    def summary(self, rows: Sequence[dict[str, Any]]) -> str:
        """Return the table that is printed; all of it as a rule."""
        return self.table(rows)

    def facts(self) -> dict[str, Any]:
        """Return further entries of the JSON file."""
        return {}

    def run(self, *, progress: bool = True) -> StudyResult:
        """Train or load the dense model and the entrants made from it, evaluate, time, and draw.

        Table and pictures are written as soon as there is a model to compare with the dense one, and again with every
        further model of the first seed and every further seed. Latency joins them at the end, when nothing else runs.
        """
        runner = Runner(self.config.processes, progress)
        self.prepare(runner)
        _, jobs = self.plan()
        # A folder that cannot be written is no news for the end of a run.
        Path(self.config.output).mkdir(parents=True, exist_ok=True)
        first = {job.name: job for job in jobs if job.seed == 0 and job.name != _BASE}
        figures: dict[str, dict[int, dict[str, float]]] = {name: {} for name in first}
        costs: dict[str, dict[str, float]] = {}
        for job, outcome in runner.run(jobs, self.do):
            if job.name not in first:
                continue
            figures[job.name][job.seed] = outcome.figures
            if job.seed == 0:
                costs[job.name] = self.examine(job, outcome.evaluation)
            # Where nothing is trained, the next model is there before a picture is drawn.
            is_first = len(costs) == 2 or job.is_trained
            is_news = (job.seed == 0 and is_first) or all(job.seed in by_seed for by_seed in figures.values())
            if len(costs) > 1 and DENSE in costs and is_news:
                self._write(figures, costs, runner)
        for name, times in self.time(first, shown=progress).items():
            costs[name] |= times
        return self._write(figures, costs, runner)

    def plan(self) -> tuple[list[Entrant], list[Run[Config]]]:
        """Return what is compared, and the runs in the order they must be done."""
        config, runs = self.config, list[Run[Config]]()
        recipe = merged(read_yaml(config.dense), config.changes)
        dense = self.run_config.from_dict({**recipe, "output": config.output})
        tuned = self.run_config.from_dict({**merged(recipe, config.finetune), "output": config.output})
        entrants = self.entrants(dense, tuned)
        names = Counter([_BASE, *(entrant.name for entrant in entrants)])
        if max(names.values()) > 1:
            raise ValueError(f"several models of the study have the name {names.most_common(1)[0][0]!r}")
        self.compared = {entrant.name: entrant for entrant in entrants}
        base = _BASE if config.tune_dense else DENSE
        is_trained = config.train_dense or any(entrant.is_trained for entrant in entrants if entrant.name != base)
        for seed in range(config.seeds if is_trained else 1):
            root = Path(config.output) / f"seed{seed}"
            folder = Path(config.bases) / root.name / _BASE if config.bases else root / base
            seeded = dataclasses.replace(dense, output=str(folder), seed=seed)
            if config.train_dense or not config.tune_dense:
                work = self.recipe(seeded).work if config.train_dense else _EVALUATION
                runs.append(Run(base, seed, seeded, work, is_trained=config.train_dense))
            start: Any = self.recipe(tuned).started_from(str(folder)) if config.train_dense else tuned
            for entrant in entrants:
                if entrant.name == base:
                    continue
                run = entrant.configure(seeded, dataclasses.replace(start, seed=seed))
                run = dataclasses.replace(run, output=str(root / entrant.name))
                work = entrant.share * self.recipe(run).work if entrant.is_trained else _EVALUATION
                search = None if entrant.search is None else Search(entrant.search, root / f"{entrant.series}.plans")
                runs.append(Run(entrant.name, seed, run, work, entrant.is_tuned, entrant.is_trained, search))
        return entrants, runs

    def do(self, job: Run[Config], tick: Tick) -> Outcome:
        """Do one run."""
        job, before = self.ready(job), {}
        if not job.is_trained:
            evaluation = self._evaluate_once(job)
            return Outcome(evaluation, evaluation.columns())
        if job.is_tuned and self.config.before:
            before["before"] = self._evaluate_once(job).columns()[self.score]
        evaluation = self.recipe(job.config).train(tick)
        return Outcome(evaluation, evaluation.columns() | before)

    def load(self, job: Run[Config]) -> nn.Module:
        """Make the final model of a run, in evaluation mode on the device it was trained on."""
        config: Any = self.ready(job).config
        if job.is_trained:
            config = self.recipe(config).finished(config.output)
        return self.recipe(config).load()

    def _evaluate_once(self, job: Run[Config]) -> Evaluation:
        """Evaluate the model that a run starts from, or return the evaluation of an earlier call."""
        run: Any = job.config
        settings = portable(run.to_dict())
        del settings["output"]

        def evaluate() -> Any:
            recipe = self.recipe(run)
            return recipe.assess(recipe.load())

        return self.recipe.result(**evaluate_once(f"{run.output}.before.jsonl", settings, evaluate))

    def _write(
        self,
        figures: Mapping[str, dict[int, dict[str, float]]],
        costs: Mapping[str, dict[str, float]],
        runner: Runner,
    ) -> StudyResult:
        shown = {name: entrant for name, entrant in self.compared.items() if name in costs}
        scores = {name: {seed: by[self.score] for seed, by in sorted(figures[name].items())} for name in shown}
        to_dense = self.compare(scores, dict.fromkeys(shown, DENSE))
        to_control = self.compare(scores, {name: entrant.control for name, entrant in shown.items()})
        to_rivals = self.to_rivals(scores, costs)
        points = [
            Point(
                name, entrant.series, entrant.capacity, costs[name], figures[name], to_dense[name], to_control[name],
                to_rivals[name],
            )
            for name, entrant in shown.items()
        ]  # fmt: skip
        folder, rows = Path(self.config.output), self.complete([point.row() for point in points])
        record = {"config": dataclasses.asdict(self.config), **runner.facts, **self.facts()}
        record["title"] = f"{self.measure[:1].upper()}{self.measure[1:]} against {', '.join(self.costs.values())}"
        record["points"] = [dataclasses.asdict(point, dict_factory=published) for point in points]
        ranking = self.ranking(scores, costs)
        text, summary = (f"{table}\n\n{ranking}" for table in (self.table(rows), self.summary(rows)))
        drawn = self.pictures([{**row, "note": _note(shown[row["name"]], row)} for row in rows])
        write_outcome(folder, "tradeoff", record, [flat(row) for row in rows], text, drawn)
        if len(points) == 2:
            runner.say(f"table and picture, from now on: {folder}/tradeoff.{{md,png}}")
        return StudyResult(folder, points, text, summary, record["cpu_seconds"])


def _note(entrant: Entrant, row: Mapping[str, Any]) -> str:
    """Return differences and settings of a model, the text that a browser shows at its point."""
    gaps = [f"{name.replace('_', ' ')}: {row[name]}" for name in ("to_dense", "to_control") if row[name] is not None]
    size = {} if entrant.image_size is None else {"image_size": entrant.image_size}
    fields = (entrant.routing or {}, *entrant.methods, entrant.args, size)
    settings = ", ".join(f"{name}: {value}" for part in fields for name, value in part.items())
    return "\n".join(filter(None, [*gaps, settings]))


def evaluate_once(path: str | Path, settings: Mapping[str, Any], evaluate: Callable[[], Any]) -> dict[str, Any]:
    """Return the fields of an evaluation with some settings; a journal keeps them for later calls."""
    journal = Journal(path, {}, "evaluation")
    for record in journal.records:
        if not differences(record["settings"], settings):
            return record["evaluation"]
    evaluation = dataclasses.asdict(evaluate())
    journal.add({"settings": settings, "evaluation": evaluation})
    return evaluation
