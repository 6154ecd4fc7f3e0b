"""How the models of a study are scored: by the evaluations of their runs, paired by seed."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple

from mmod.io.files import sha256
from mmod.io.jobs import Tick
from mmod.io.store import STORE, Store
from mmod.studies.costs import AnyStudyConfig
from mmod.studies.jobs import Run
from mmod.studies.results import SeedScores, StudyScores
from mmod.training.engine.checkpoint import find_weights
from mmod.training.engine.config import RunConfig
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
        self.store = Store(Path(config.output) / STORE)

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
        """Evaluate the model that a run starts from, once."""
        kind = kind_of(config)

        def evaluate() -> Any:
            return kind.assess(kind.load())

        return kind.result(**self.store.once({"work": "evaluation", **identity_of(config)}, evaluate))


def train(config: Any, tick: Tick) -> Any:
    """Train a run, or read the result of a finished one; return the evaluation to report."""
    evaluation = kind_of(config).fit(progress=False, tick=tick).best
    if evaluation is None:
        raise ValueError("there is nothing to ask: set data.val")
    return evaluation


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
