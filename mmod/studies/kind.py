"""What a kind of model contributes to a study."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from torch import nn

from mmod.analysis.table import Measured, Table, Weigh
from mmod.analysis.timing import Reading
from mmod.io.tables import Column
from mmod.planning.candidate import Candidate
from mmod.studies.candidates import Chosen
from mmod.studies.compare import Run, readings_of
from mmod.studies.config import StudyConfig
from mmod.training.engine.kind import Kind

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Runs = Mapping[str, Run]
"""The runs of the first seed, of the candidates that are measured so far by name, the dense one first."""
Facts = Mapping[str, Any]
"""What is known of the data and the dense model, also for the study's record."""
Study = TypeVar("Study", bound=StudyConfig)
Draw = Callable[[Study, Run, nn.Module], Mapping[str, "Figure"]]
"""From a study's config, a run and its final model to pictures by name."""
Lines = Sequence[Mapping[str, Any]]
"""The columns of each candidate by name."""


class Told(NamedTuple):
    """What a study tells.

    Attributes:
        rows: The rows of candidates, perhaps with further columns.
        columns: Columns of the table.
        measure: Title of the score.
        axes: Columns of costs that the score is drawn against, with the titles of their axes.
        text: What follows from it.
        summary: Columns of the table that is printed; None prints all.
        last_rows: Rows below the candidates.
        recommended: Candidates that the text recommends.
        code: Lines that apply them, as Markdown.
        pictures: Further pictures by the name of their file.
    """

    rows: Lines
    columns: Mapping[str, Column]
    measure: str
    axes: Mapping[str, str]
    text: str
    summary: Mapping[str, Column] | None = None
    last_rows: Lines = ()
    recommended: Sequence[str] = ()
    code: str = ""
    pictures: Mapping[str, Figure] | None = None


@dataclass(frozen=True, kw_only=True)
class StudyKind(Generic[Study]):
    """What a kind of model contributes to a study: functions of its config and of what was measured.

    Attributes:
        times: Columns of time per sample and of speed-up over the dense model, by input as in `Kind.readings`.
        candidates: What is compared and why other candidates are left out, from the study's config, the routed models
            of its series, and the training configs of the dense model and of fine-tuning it; None compares the dense
            model with the routed ones alone.
        count: Counts the costs of a candidate.
        draw: Draws the tokens that a candidate keeps, by the name of the picture.
        tell: Says what follows from the table.
        weigh: See `Table.weigh`.
        measure: Does a run, with the study's config as its first argument; None is `measure_run`.
        describe: Facts, from the training configs of the dense model and of fine-tuning it.
        readings: The passes that are timed, see `Timing`.
        derive: Adds columns that follow from those of times, by candidate.
        baselines: The candidates that each is compared with where they are as cheap, by a suffix of columns.
    """

    times: Mapping[str, tuple[str, str]]
    count: Callable[[Study, Run, nn.Module, Measured], dict[str, float]]
    tell: Callable[[Study, Table, Runs, Lines, Facts], Told]
    candidates: Callable[[Study, list[Candidate], Any, Any], Chosen] | None = None
    measure: Callable[..., Measured] | None = None
    weigh: Mapping[str, Weigh] = field(default_factory=dict)
    describe: Callable[[Any, Any], Facts] | None = None
    draw: Draw[Study] | None = None
    readings: Callable[[Kind, nn.Module, int, int], Mapping[str, Reading]] = readings_of
    derive: Callable[[Mapping[str, dict[str, float]]], None] | None = None
    baselines: Callable[[Table, Runs], Mapping[str, Mapping[str, Sequence[str]]]] | None = None
