"""A study: what is compared, its config, and what a kind of study measures, counts, draws and tells.

It is another kind than the `Kind` of a run's training, which makes and evaluates models: studies of images and of
features have the same runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from torch import nn

from mmod.analysis.table import Measured, Table, Weigh
from mmod.analysis.timing import Reading
from mmod.io.jobs import Callback
from mmod.io.tables import Column, MarkdownTable
from mmod.lazy import import_path
from mmod.studies.config import StudyConfig
from mmod.studies.measure import Measure, Measurer, measure_run
from mmod.studies.runs import Comparison, Run
from mmod.training.engine.config import RunConfig
from mmod.training.engine.kind import Kind, readings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Runs = Mapping[str, Run]
"""The runs of the first seed, of the candidates that are measured so far by name, the dense one first."""
Lines = Sequence[Mapping[str, Any]]
"""The columns of each candidate by name."""


class Facts(TypedDict, total=False):
    """What is known of the data, also for the study's record: sentences on images, percent right of a prior."""

    images: list[str]
    prior: Mapping[str, float]


class Told(NamedTuple):
    """What a study tells.

    Attributes:
        rows: The rows of candidates, perhaps with further columns.
        columns: Columns of the table.
        measure: Title of the score.
        axes: Columns of costs that the score is drawn against, with the titles of their axes.
        verdict: What to use: sentences, and the table of what they name.
        parts: What else follows from the table: sentences, and tables of what they name.
        summary: Columns of the table that is printed; None prints all.
        last_rows: Rows below the candidates.
        recommended: Candidates that the text recommends.
        code: Blocks of lines that apply each of them, as Markdown: of Python, and of a training config.
        printed: The block of Python that is printed, of the models that the sentences are about.
        pictures: Further pictures by the name of their file.
        began_by_chance: The dense model guessed before it was fine-tuned: no training can have done harm then.
    """

    rows: Lines
    columns: Mapping[str, Column]
    measure: str
    axes: Mapping[str, str]
    parts: Sequence[str | MarkdownTable]
    verdict: Sequence[str | MarkdownTable] = ()
    summary: Mapping[str, Column] | None = None
    last_rows: Lines = ()
    recommended: Sequence[str] = ()
    code: Sequence[str] = ()
    printed: Sequence[str] = ()
    pictures: Mapping[str, Figure] | None = None
    began_by_chance: bool = False


class Study(NamedTuple):
    """What is compared with a dense model, and the config that says how they are evaluated, timed and drawn."""

    kind: StudyKind
    comparison: Comparison
    config: StudyConfig

    @property
    def dense(self) -> RunConfig:
        """The training config of the dense model."""
        return self.comparison.dense

    @property
    def measure(self) -> Measure:
        """What does its runs; other processes get it pickled."""
        if self.kind.measure is not None:
            return partial(self.kind.measure, self)
        before = self.config.score if self.config.before else None
        # Models of several seeds are paired by seed.
        return partial(measure_run, before=before, by_sample=self.comparison.seeds == 1)


@dataclass(frozen=True, kw_only=True)
class StudyKind:
    """What a kind of study consists of: functions, of which most get the study first.

    Attributes:
        times: Columns of time per sample and of speed-up over the dense model, by input as in `Kind.inputs`.
        count: Counts the costs of a candidate by column, from its final model and its rows.
        tell: Says what follows from the table.
        weigh: See `Table.weigh`.
        describe: Returns what is known of the data before anything runs, by the training configs of the dense model and
            of fine-tuning it.
        measure: Does a run; None does it by `mmod.studies.measure.measure_run`.
        draw: Draws the tokens that a routed candidate keeps, where they are those of pictures; None draws none.
        readings: Returns the passes that are timed, see `mmod.training.engine.kind.readings`.
        derive: Returns further columns of a candidate that follow from those of times.
        baselines: Returns the candidates that each is compared with where they are as cheap, by a suffix of columns.
    """

    times: Mapping[str, tuple[str, str]]
    count: Callable[[Study, Run, nn.Module, Measured], dict[str, float]]
    tell: Callable[[Study, Table, Runs, Lines, Facts], Told]
    weigh: Mapping[str, Weigh] = field(default_factory=dict)
    describe: Callable[[RunConfig, RunConfig], Facts] = lambda dense, tuned: {}
    measure: Callable[[Study, Run, Callback, Measurer], Measured] | None = None
    draw: Callable[[Study, Run, nn.Module], Figure | None] | None = None
    readings: Callable[[Kind, nn.Module, int, int], Mapping[str, Reading]] = readings
    derive: Callable[[Mapping[str, float]], Mapping[str, float]] = lambda figures: {}
    baselines: Callable[[Study, Table, Runs], Mapping[str, Mapping[str, Sequence[str]]]] = lambda *_: {}


def study_kind(name: str) -> StudyKind:
    """Return the kind of study of a name, which is `STUDY` in its module. Imports its libraries."""
    return import_path(f"mmod.studies.{name}:STUDY")
