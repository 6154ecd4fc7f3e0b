"""What a kind of model contributes to a study."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from mmod.compare.table import Measured, Table, Weigh
from mmod.io.tables import Column
from mmod.planning.candidate import Candidate
from mmod.studies.runs import Run, measure_run
from mmod.training.engine.config import RunConfig
from mmod.training.engine.kind import Kind

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Candidates = Mapping[str, Candidate]
"""The candidates that are measured so far by name, the dense one first."""
Facts = Mapping[str, Any]
"""What is known of the data and the dense model, also for the study's record."""
Rows = Sequence[Mapping[str, Any]]
"""The columns of each candidate by name."""
Times = dict[str, dict[str, float]]
"""Times and speed-ups by candidate and column."""


class Told(NamedTuple):
    """What a study tells.

    Attributes:
        columns: Columns of the table.
        text: What follows from it.
        summary: Columns of the table that is printed; None prints all.
        last_rows: Rows below the candidates.
        recommended: Candidates that the text recommends.
        code: Lines that apply them, as Markdown.
        pictures: Further pictures by the name of their file.
    """

    columns: Mapping[str, Column]
    text: str
    summary: Mapping[str, Column] | None = None
    last_rows: Rows = ()
    recommended: Sequence[str] = ()
    code: str = ""
    pictures: Mapping[str, Figure] | None = None


@dataclass(frozen=True, kw_only=True)
class StudyKind:
    """What a kind of model contributes to a study: functions of its config and of what was measured.

    Attributes:
        run_config: The config of a run.
        measures: Titles of the figures by which candidates may be compared; the config's `score` is one of them.
        axes: Columns of costs that the score is drawn against, with the titles of their axes; times name the batch.
        times: Columns of time per sample and of speed-up over the dense model, by input as in `Kind.readings`.
        count: Counts the costs of a candidate, and draws the tokens it keeps.
        tell: Says what follows from the table.
        measure: Trains or evaluates the model of a run.
        weigh: See `Table.weigh`.
        describe: Facts, from the run of the dense model.
        add_times: Adds what is measured or follows once all models have been timed.
        baselines: The candidates that each is compared with where they are as cheap, by a suffix of columns.
        complete: Adds columns to the rows of candidates, from their runs of the first seed.
    """

    run_config: type[RunConfig]
    measures: Mapping[str, str]
    axes: Callable[[Any], dict[str, str]]
    times: Mapping[str, tuple[str, str]]
    count: Callable[[Any, Run[Any], nn.Module, Measured], dict[str, float]]
    tell: Callable[[Any, Table, Candidates, Rows, Facts], Told]
    measure: Callable[..., Measured] = measure_run
    weigh: Mapping[str, Weigh] = field(default_factory=dict)
    describe: Callable[[Any, Run[Any], nn.Module], Facts] | None = None
    add_times: Callable[[Any, Mapping[str, Kind], Mapping[str, nn.Module], Times], None] | None = None
    baselines: Callable[[Any, Table, Candidates], Mapping[str, Mapping[str, Sequence[str]]]] | None = None
    complete: Callable[[Any, Table, Rows, Mapping[str, Run[Any]]], Rows] | None = None
