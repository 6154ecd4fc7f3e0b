"""What a kind of model contributes to a study, and what it tells of a table.

Of the study it knows the `Comparison` and the `Evaluation`, and gets no `StudyConfig`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import nn

from mmod.analysis.table import Measured, Table, Weigh
from mmod.analysis.timing import Reading
from mmod.io.jobs import Callback
from mmod.io.tables import Column, MarkdownTable
from mmod.lazy import import_path
from mmod.studies.config import Evaluation
from mmod.studies.measure import Measurer, measure_run
from mmod.studies.rates import Rates
from mmod.studies.runs import Comparison, Run
from mmod.training.engine.kind import Kind, readings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Runs = Mapping[str, Run]
"""The runs of the first seed, of the candidates that are measured so far by name, the dense one first."""
Facts = Mapping[str, Any]
"""What is known of the data and the dense model, also for the study's record."""
Lines = Sequence[Mapping[str, Any]]
"""The columns of each candidate by name."""


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


def study_kind(kind: str) -> type[StudyKind]:
    """Return what a kind contributes to a study: the class of its name in its module. Imports its libraries."""
    study: type[StudyKind] = import_path(f"mmod.studies.{kind}:{kind.title()}Study")
    return study
