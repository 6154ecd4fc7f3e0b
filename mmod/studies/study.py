"""A study: one dense model, the candidates made from it, and their costs and scores over several seeds."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from mmod.analysis.statistics import published
from mmod.io.jobs import Runner, Tick
from mmod.planning.candidate import DENSE, Candidate
from mmod.studies.candidates import candidates_of
from mmod.studies.config import StudyConfig, TimmStudyConfig
from mmod.studies.costs import Costs
from mmod.studies.jobs import Run, Search, best_rates, starts_others, trials, try_rates, with_rate
from mmod.studies.plan import search_for
from mmod.studies.report import Report, hint
from mmod.studies.results import StudyResult, compare, flat, write_outcome
from mmod.studies.scorer import Findings, Outcome, Scorer, train
from mmod.training.engine.checkpoint import find_weights
from mmod.training.engine.config import LoopConfig, RunConfig
from mmod.training.kinds import kind_of

# The dense model that all fine-tuning starts from; the point shown as dense is fine-tuned like the others.
_BASE = "base"
# Epochs that take about as long as evaluating once.
_EVALUATION = 0.05


class Study:
    """A comparison of models by cost and score.

    Args:
        run_config: The dataclass of a run's config.
        scorer: Does and scores the runs.
        costs: Counts and times the models.
        report: Tells of them.
    """

    def __init__(
        self,
        config: StudyConfig,
        run_config: type[RunConfig],
        scorer: Scorer[Any],
        costs: Costs[Any],
        report: Report[Any, Any],
    ) -> None:
        self.config = config
        self.run_config: Any = run_config
        self.scorer = scorer
        self.costs = costs
        self.report = report
        # By model: factors of the learning rates, once they are found, and a text on the epochs of its training.
        self.rates: dict[str, float] = {}
        self.epochs: dict[str, str] = {}
        # Runs ask for their plan several times.
        self._plans: dict[str, dict[str, Any]] = {}

    def run(self, *, progress: bool = True) -> StudyResult:
        """Train or load the dense model and the candidates made from it, evaluate, time, and draw.

        Table and pictures are written as soon as there is a model to compare with the dense one, and again with every
        further model of the first seed and every further seed. Latency joins them at the end, when nothing else runs.
        """
        runner = Runner(self.config.processes, progress)
        candidates, runs = self.plan()
        _find_checkpoints(runs)
        self._check_runs(runs)
        if isinstance(self.config, TimmStudyConfig) and self.config.rates is not None:
            by_trial = trials(runs, self.config.rates, self.config.rate_split, f"{self.config.output}/rates")
            starting = [run for run in runs[:1] if starts_others(run)]
            self.rates = best_rates(try_rates(runner, by_trial, self._try_rate, starting))
            runs = [
                dataclasses.replace(run, config=with_rate(run.config, self.rates.get(run.name, 1.0))) for run in runs
            ]
        # A folder that cannot be written is no news for the end of a run.
        Path(self.config.output).mkdir(parents=True, exist_ok=True)
        first = {run.name: run for run in runs if run.seed == 0 and run.name != _BASE}
        findings = Findings({name: {} for name in first}, runs=first)
        for run, outcome in runner.run(runs, self.do):
            if run.name not in first:
                continue
            findings.figures[run.name][run.seed] = outcome.figures
            if run.seed == 0:
                findings.evaluations[run.name] = outcome.evaluation
                findings.costs[run.name] = self.costs.count(run, self.load(run), outcome.evaluation)
            # Where nothing is trained, the next model is there before a picture is drawn.
            is_first = run.seed == 0 and (len(findings.costs) == 2 or run.is_trained)
            is_seed_done = all(run.seed in by_seed for by_seed in findings.figures.values())
            if len(findings.costs) > 1 and DENSE in findings.costs and (is_first or is_seed_done):
                self._write(candidates, findings, runner)
        kinds = {name: kind_of(run.config) for name, run in first.items()}
        models = {name: self.load(run) for name, run in first.items()}
        for name, times in self.costs.time(kinds, models, shown=progress).items():
            findings.costs[name] |= times
        return self._write(candidates, findings, runner)

    def plan(self) -> tuple[list[Candidate], list[Run[Any]]]:
        """Return the compared models, and the runs in the order they must be done."""
        config = self.config
        dense = self.run_config.from_dict(config.dense_fields)
        tuned = self.run_config.from_dict(config.tuned_fields)
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
        base_epochs = f"{dense.epochs} " if starts_others(runs[0]) and isinstance(dense, LoopConfig) else ""
        self.epochs = {run.name: _epochs(run, base_epochs) for run in runs if isinstance(run.config, LoopConfig)}
        return candidates, runs

    def do(self, run: Run[Any], tick: Tick) -> Outcome:
        """Do one run."""
        return self.scorer.evaluate(self.ready(run), tick)

    def ready(self, run: Run[Any]) -> Run[Any]:
        """Return a run with the plan of its seed's dense model, where one is searched."""
        if run.search is None:
            return run
        key = str(run.search)
        if key not in self._plans:
            self._plans[key] = search_for(run.config, *run.search).plan.to_dict()
        routing = self.config.routing_at(self._plans[key], None)
        return dataclasses.replace(run, config=dataclasses.replace(run.config, routing=routing), search=None)

    def load(self, run: Run[Any]) -> nn.Module:
        """Make the final model of a run, in evaluation mode on the device it was trained on."""
        config = self.ready(run).config
        if run.is_trained:
            config = config.finished(config.output)
        return kind_of(config).load()

    def _try_rate(self, run: Run[Any], tick: Tick) -> float:
        """Return the score of a run of the search for learning rates."""
        evaluation = train(self.ready(run).config, tick)
        return float(evaluation.columns()[self.scorer.score])

    def _check_runs(self, runs: Sequence[Run[Any]]) -> None:
        """Raise a ValueError where a run would be refused, perhaps after hours of the runs before it."""
        written = {run.config.output for run in runs}
        dense = self.run_config.from_dict(self.config.dense_fields)
        for run in runs:
            config = run.config
            # Not there yet; its architecture is the dense model's.
            if str(Path(str(config.model.checkpoint)).parent) in written:
                config = dataclasses.replace(config, model=dense.model)
            kind = kind_of(config)
            try:
                if run.is_trained:
                    kind.check_schedule()
                if run.seed == 0 and run.search is None and (config.routing or config.methods):
                    kind.sketch()
            except ValueError as error:
                raise ValueError(f"model {run.name!r} of the study: {error}") from error

    def _write(self, candidates: Sequence[Candidate], findings: Findings, runner: Runner) -> StudyResult:
        """Write what is known so far."""
        shown = {candidate.name: candidate for candidate in candidates if candidate.name in findings.costs}
        scores = self.scorer.scores(shown, findings)
        rivals = self.costs.rivals(findings.costs, shown)
        points = compare(shown.values(), scores, findings.figures, findings.costs, rivals)
        rows = [point.row() for point in points]
        if self.epochs:
            rows = [{**row, "epochs": self.epochs[row["name"]]} for row in rows]
        rows = self.scorer.complete(rows, findings)
        report = self.report
        costs = {name: findings.costs[name] for name in shown}
        recommended = report.recommended(scores, costs)
        record = {
            "config": dataclasses.asdict(self.config),
            **runner.facts,
            "rates": self.rates,
            **report.facts(),
            "recommended": recommended,
            "summary": report.summary(rows),
            "code": report.code([shown[name] for name in recommended]),
            "title": report.title,
            "points": [dataclasses.asdict(point, dict_factory=published) for point in points],
        }
        text = "\n\n".join(filter(None, [report.text(scores, costs), record["code"]]))
        table = f"{report.table(rows)}\n\n{text}"
        summary = f"{report.summary(rows)}\n\n{text}"
        drawn = report.pictures([{**row, "note": hint(shown[row["name"]], row)} for row in rows])
        folder = Path(self.config.output)
        write_outcome(folder, "tradeoff", record, [flat(row) for row in rows], table, drawn)
        if len(points) == 2:
            runner.say(f"table and picture, from now on: {folder}/tradeoff.{{md,png}}")
        return StudyResult(folder, points, table, summary, record["cpu_seconds"])


def _work(config: Any) -> float:
    """Return the duration of a run, in any unit that the runs of a study share."""
    return float(config.epochs) if isinstance(config, LoopConfig) else 1.0


def _find_checkpoints(runs: Sequence[Run[Any]]) -> None:
    """Raise a FileNotFoundError where a run starts from a checkpoint that is not there, and that no run writes."""
    written = {run.config.output for run in runs}
    for run in runs:
        if isinstance(run.config, LoopConfig) and run.config.model.checkpoint not in (None, *written):
            find_weights(str(run.config.model.checkpoint))


def _epochs(run: Run[Any], base: str) -> str:
    """Return a model's epochs: from scratch, or those of the dense model (`base`) and of its fine-tuning."""
    if not run.is_tuned:
        return str(run.config.epochs) if run.is_trained else ""
    if not run.is_trained:
        return base.strip()
    trained = getattr(run.config, "trained", None)
    return f"{base}+ {run.config.epochs}{'' if trained is None else f' ({trained})'}"
