"""What a kind of model contributes to a study, how its runs are measured, and what it tells of a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from torch import nn

from mmod.analysis.table import Measured, Table, Weigh, measured_once
from mmod.analysis.timing import Reading
from mmod.io.jobs import Callback
from mmod.io.store import Store
from mmod.io.tables import Column, MarkdownTable
from mmod.lazy import import_path
from mmod.studies.compare import Measurer, Rates, identity_of
from mmod.studies.config import Evaluation
from mmod.studies.runs import Comparison, Run
from mmod.training import kinds
from mmod.training.engine.config import RunConfig
from mmod.training.engine.evaluate import Evaluated, RoutedResult
from mmod.training.engine.kind import Kind, evaluate, load, readings
from mmod.training.engine.run_folder import FitResult
from mmod.training.kinds import kind_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BEFORE = "before"
"""Name of the figure that a model has before it is fine-tuned."""
Runs = Mapping[str, Run]
"""The runs of the first seed, of the candidates that are measured so far by name, the dense one first."""
Facts = Mapping[str, Any]
"""What is known of the data and the dense model, also for the study's record."""
Lines = Sequence[Mapping[str, Any]]
"""The columns of each candidate by name."""
Load = Callable[[RunConfig], nn.Module]
"""Loads the model that a run starts from, see `Kind.load`."""


class Told(NamedTuple):
    """What a study tells.

    Attributes:
        rows: The rows of candidates, perhaps with further columns.
        columns: Columns of the table.
        measure: Title of the score.
        axes: Columns of costs that the score is drawn against, with the titles of their axes.
        parts: What follows from it: sentences, and tables of what they name.
        summary: Columns of the table that is printed; None prints all.
        last_rows: Rows below the candidates.
        recommended: Candidates that the text recommends.
        code: Blocks of lines that apply each of them, as Markdown: of Python, and of a training config.
        printed: The block of Python that is printed, of the models that the sentences are about.
        pictures: Further pictures by the name of their file.
    """

    rows: Lines
    columns: Mapping[str, Column]
    measure: str
    axes: Mapping[str, str]
    parts: Sequence[str | MarkdownTable]
    summary: Mapping[str, Column] | None = None
    last_rows: Lines = ()
    recommended: Sequence[str] = ()
    code: Sequence[str] = ()
    printed: Sequence[str] = ()
    pictures: Mapping[str, Figure] | None = None


@dataclass(frozen=True)
class StudyKind:
    """What a kind of model contributes to a study; a kind overrides what differs.

    Attributes:
        times: Columns of time per sample and of speed-up over the dense model, by input as in `Kind.inputs`.
        weigh: See `Table.weigh`.

    Args:
        comparison: The dense model, and what is compared with it.
        evaluation: How models are evaluated, timed and drawn.
    """

    comparison: Comparison
    evaluation: Evaluation

    times: ClassVar[Mapping[str, tuple[str, str]]]
    weigh: ClassVar[Mapping[str, Weigh]] = {}

    @property
    def dense(self) -> Any:
        """The training config of the dense model."""
        return self.comparison.dense

    def describe(self) -> Facts:
        """Return what is known of the data and the dense model before anything runs."""
        return {}

    def measure(self, run: Run, callback: Callback, measurer: Measurer) -> Measured:
        """Do a run; other processes get the study pickled."""
        before = self.evaluation.score if self.evaluation.before else None
        # Models of several seeds are paired by seed.
        return measure_run(run, callback, measurer, before=before, by_sample=self.comparison.seeds == 1)

    def rates(self) -> Rates | None:
        """Return the learning rates that are tried first, on a split of their own; None trains as configs say."""
        evaluation = self.evaluation
        if evaluation.rates is None:
            return None
        # Of a trial the trained model alone counts.
        trial = dataclasses.replace(self, evaluation=dataclasses.replace(evaluation, before=False))
        return Rates(evaluation.rates, evaluation.score, trial.measure, {"val_split": evaluation.rate_split})

    def count(self, run: Run, model: nn.Module, rows: Measured) -> dict[str, float]:
        """Count the costs of a candidate by column, from its final model and its rows."""
        raise NotImplementedError

    def draw(self, run: Run, model: nn.Module) -> Mapping[str, Figure]:
        """Draw the tokens that a candidate keeps, by the name of the picture."""
        return {}

    def readings(self, kind: Kind, model: nn.Module, size: int, batches: int) -> Mapping[str, Reading]:
        """Return the passes that are timed, see `mmod.training.engine.kind.readings`."""
        return readings(kind, model, size, batches)

    def derive(self, times: Mapping[str, dict[str, float]]) -> None:
        """Add columns that follow from those of times, by candidate."""

    def baselines(self, table: Table, runs: Runs) -> Mapping[str, Mapping[str, Sequence[str]]]:
        """Return the candidates that each is compared with where they are as cheap, by a suffix of columns."""
        return {}

    def began_by_chance(self, table: Table) -> bool:
        """Return whether the dense model guessed before it was fine-tuned: no training can have done harm then."""
        return False

    def tell(self, table: Table, runs: Runs, rows: Lines, facts: Facts) -> Told:
        """Say what follows from the table."""
        raise NotImplementedError


def measure_run(
    run: Run,
    callback: Callback,
    measurer: Measurer,
    *,
    before: str | None = None,
    by_sample: bool = False,
    progress: bool = False,
) -> Measured:
    """Do one run: train its model, or evaluate it as it starts.

    Args:
        before: A figure of models that are fine-tuned, evaluated before that too; None evaluates them once.
        by_sample: Keep the outcomes of samples of trained models too, for which runs that are read are evaluated.
        progress: Show a bar over the samples of an evaluation without training.
    """
    if not run.is_trained:
        return evaluate_start(measurer.store, run.config, measurer.load, progress)
    figures: dict[str, float] = {}
    outcomes: dict[str, np.ndarray] = {}
    if before is not None and not run.candidate.from_scratch:
        start = evaluate_start(measurer.store, run.config)
        figures[BEFORE] = start.figures[before]
        if by_sample and before in start.outcomes:
            outcomes[BEFORE] = start.outcomes[before]
    fitted = fit(run.config, callback, measurer.store)
    rows = measured_of(fitted.best)
    if by_sample:
        evaluated = Evaluated(fitted.best, fitted.outcomes) if fitted.outcomes else None
        # Kept in the store: the record of a finished run has no outcomes of samples.
        final = evaluate_start(measurer.store, run.final_config, evaluated=evaluated)
        rows = rows._replace(samples=final.samples)
        outcomes |= final.outcomes
    return rows._replace(figures={**rows.figures, **figures}, outcomes=outcomes)


def fit(run_config: RunConfig, callback: Callback, store: Store) -> FitResult[Any]:
    """Train a run, or read the result of a finished one; refuse one without an evaluation.

    Args:
        store: That of the comparison, whose runs share the check of their evaluation samples.
    """
    fitted = kinds.fit(
        run_config, progress=False, after_step=lambda step: callback(step.done / step.total), store=store
    )
    if fitted.best is None:
        raise ValueError("there is nothing to ask: set data.val")
    return fitted


def load_start(run_config: RunConfig) -> nn.Module:
    """Load the model that a run starts from; see `Kind.load`."""
    return load(kind_of(run_config))


def evaluate_start(
    store: Store,
    run_config: RunConfig,
    load: Load = load_start,
    progress: bool = False,
    evaluated: Evaluated | None = None,
) -> Measured:
    """Evaluate the model that a run starts from, once; `load` loads it if it was not evaluated before.

    Args:
        evaluated: Its evaluation, where the training that ended with it has made it.
    """
    kind = kind_of(run_config)
    identity = {"work": "rows of samples", **identity_of(run_config)}

    def measure() -> Measured:
        result, outcomes = evaluated or evaluate(kind, load(run_config), progress)
        samples = max(map(len, outcomes.values()), default=0)
        return measured_of(result)._replace(samples=samples, outcomes=outcomes)

    return measured_once(store, identity, measure)


def measured_of(evaluation: RoutedResult) -> Measured:
    """Return what the table of a comparison keeps of an evaluation."""
    samples = getattr(evaluation, "samples", 0)
    return Measured(evaluation.columns(), evaluation.kept, samples, text=str(evaluation))


def study_kind(kind: str) -> type[StudyKind]:
    """Return what a kind contributes to a study: the class of its name in its module. Imports its libraries."""
    study: type[StudyKind] = import_path(f"mmod.studies.{kind}:{kind.title()}Study")
    return study
