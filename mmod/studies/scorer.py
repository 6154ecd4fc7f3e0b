"""How the models of a study are scored: by the evaluations of their runs, paired by seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple

from mmod.io.claim import differences
from mmod.io.jobs import Tick
from mmod.io.journal import Journal
from mmod.studies.costs import AnyStudyConfig
from mmod.studies.jobs import Run
from mmod.studies.results import SeedScores, StudyScores
from mmod.training.engine.run_folder import portable
from mmod.training.kinds import kind_of


class Outcome(NamedTuple):
    """The outcome of one run: the evaluation of its final model, and all figures."""

    evaluation: Any
    figures: dict[str, float]


@dataclass
class Findings:
    """Results of the finished runs of a study, by the name of the model."""

    figures: dict[str, dict[int, dict[str, float]]]  # By seed.
    costs: dict[str, dict[str, float]] = field(default_factory=dict)
    # Of the first seed.
    evaluations: dict[str, Any] = field(default_factory=dict)
    runs: dict[str, Run[Any]] = field(default_factory=dict)

    def by_seed(self, name: str, figure: str) -> dict[int, float]:
        """Return a figure of a model by seed."""
        return {seed: values[figure] for seed, values in sorted(self.figures[name].items())}


class Scorer(Generic[AnyStudyConfig]):
    """Scores models by one figure of their evaluation.

    Args:
        score: The figure of an evaluation, in percent, by which models are compared.
        measure: Name of the score in the picture.
    """

    def __init__(self, config: AnyStudyConfig, score: str, measure: str) -> None:
        self.config = config
        self.score = score
        self.measure = measure

    def evaluate(self, run: Run[Any], tick: Tick) -> Outcome:
        """Do one run: train its model, or evaluate it as it starts."""
        if not run.is_trained:
            evaluation = self._evaluate_start(run.config)
            return Outcome(evaluation, evaluation.columns())
        before = {}
        if run.is_tuned and self.config.before:
            before["before"] = self._evaluate_start(run.config).columns()[self.score]
        evaluation = train(run.config, tick)
        return Outcome(evaluation, evaluation.columns() | before)

    def scores(self, names: Iterable[str], findings: Findings) -> StudyScores:
        """Return the scores of models, to be compared."""
        return SeedScores({name: findings.by_seed(name, self.score) for name in names})

    def complete(self, rows: Sequence[dict[str, Any]], findings: Findings) -> list[dict[str, Any]]:
        """Return the rows of the table with further comparisons; none as a rule."""
        return list(rows)

    def _evaluate_start(self, config: Any) -> Any:
        """Evaluate the model that a run starts from, or return the evaluation of an earlier call."""
        kind = kind_of(config)
        settings = portable(config.to_dict())
        del settings["output"]

        def evaluate() -> Any:
            return kind.assess(kind.load())

        return kind.result(**evaluate_once(f"{config.output}.before.jsonl", settings, evaluate))


def train(config: Any, tick: Tick) -> Any:
    """Train a run, or read the result of a finished one; return the evaluation to report."""
    evaluation = kind_of(config).fit(progress=False, tick=tick).best
    if evaluation is None:
        raise ValueError("there is nothing to ask: set data.val")
    return evaluation


def evaluate_once(path: str | Path, settings: Mapping[str, Any], evaluate: Callable[[], Any]) -> dict[str, Any]:
    """Return the fields of an evaluation with some settings; a journal keeps them for later calls."""
    journal = Journal(path, {}, "evaluation")
    for record in journal.records:
        if not differences(record["settings"], settings):
            return record["evaluation"]
    evaluation = dataclasses.asdict(evaluate())
    journal.add({"settings": settings, "evaluation": evaluation})
    return evaluation
