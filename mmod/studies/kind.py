"""What a kind of model contributes to a study."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from mmod.compare.table import Measured, Table, Weigh
from mmod.io.jobs import Tick
from mmod.io.store import Store
from mmod.io.tables import Column
from mmod.planning.candidate import Candidate
from mmod.studies.runs import Run, measure_run
from mmod.training.engine.config import RunConfig
from mmod.training.engine.kind import Kind

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Candidates = Mapping[str, Candidate]
"""The candidates that are measured so far by name, the dense one first."""
Costs = Mapping[str, Mapping[str, float]]
"""Costs by candidate and name."""
Facts = Mapping[str, Any]
"""What is known of the data and the dense model, also for the study's record."""
Row = Mapping[str, Any]


class Told(NamedTuple):
    """What a study says in words, the candidates that this recommends, and lines that apply them as Markdown."""

    text: str
    recommended: Sequence[str] = ()
    code: str = ""


def _describe(config: Any, run: Run[Any], model: nn.Module) -> Facts:
    return {}


def _unchanged(config: Any, kinds: Mapping[str, Kind], models: Mapping[str, nn.Module], times: Costs) -> Costs:
    return times


def _no_rivals(config: Any, table: Table, candidates: Candidates) -> dict[str, dict[str, list[str]]]:
    return {}


def _complete(
    config: Any, table: Table, rows: Sequence[dict[str, Any]], runs: Mapping[str, Run[Any]]
) -> list[dict[str, Any]]:
    return list(rows)


def _pictures(rows: Sequence[Row], facts: Facts) -> dict[str, Figure]:
    return {}


def _no_rows(facts: Facts) -> list[Row]:
    return []


@dataclass(frozen=True, kw_only=True)
class StudyKind:
    """What a kind of model contributes to a study: functions of its config and of what was measured.

    Attributes:
        run_config: The config of a run.
        measures: Titles of the figures by which candidates may be compared; the config's `score` is one of them.
        columns: Columns of the table, from the config and the facts.
        axes: Columns of costs that the score is drawn against, with the titles of their axes; times name the batch.
        times: Columns of time per sample and of speed-up over the dense model, by input as in `Kind.readings`.
        count: Counts the costs of a candidate, and draws the tokens it keeps.
        tell: Says what follows from the table.
        measure: Trains or evaluates the model of a run.
        weigh: See `Table.weigh`.
        describe: Facts, from the run of the dense model.
        complete_times: Adds costs that are measured or that follow when all models have been timed.
        rivals: The candidates that each is compared with where they are as cheap, by a suffix of columns.
        complete: Adds columns to the rows of the table, from the runs of the first seed.
        summary: Columns of the table that is printed; None prints all.
        pictures: Further pictures by the name of their file.
        last_rows: Rows below the candidates in the table.
    """

    run_config: type[RunConfig]
    measures: Mapping[str, str]
    columns: Callable[[Any, Facts], Mapping[str, Column]]
    axes: Callable[[Any], dict[str, str]]
    times: Mapping[str, tuple[str, str]]
    count: Callable[[Any, Run[Any], nn.Module, Measured], dict[str, float]]
    tell: Callable[[Any, Table, Candidates, Facts], Told]
    measure: Callable[[Any, Store, Run[Any], Tick], Measured] = measure_run
    weigh: Mapping[str, Weigh] = field(default_factory=dict)
    describe: Callable[[Any, Run[Any], nn.Module], Facts] = _describe
    complete_times: Callable[[Any, Mapping[str, Kind], Mapping[str, nn.Module], Costs], Costs] = _unchanged
    rivals: Callable[[Any, Table, Candidates], Mapping[str, Mapping[str, Sequence[str]]]] = _no_rivals
    complete: Callable[..., list[dict[str, Any]]] = _complete
    summary: Callable[[Any], Mapping[str, Column]] | None = None
    pictures: Callable[[Sequence[Row], Facts], dict[str, Figure]] = _pictures
    last_rows: Callable[[Facts], list[Row]] = _no_rows
