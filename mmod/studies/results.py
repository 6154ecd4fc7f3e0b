"""What a study finds: its points, and how they are written."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from mmod.analysis.statistics import Estimate, published
from mmod.analysis.tables import markdown_table
from mmod.io.files import write_atomically
from mmod.studies.paired import spread
from mmod.training.engine.logging import write_csv

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Column", "Point", "StudyResult", "flat", "table_of", "write_outcome"]

Column = tuple[str, str]
"""Title of a column, and how its values are formatted; `±` in front adds the standard deviation over seeds."""


@dataclass(frozen=True)
class Point:
    """One model of a study.

    Args:
        name: Its name.
        series: Its series.
        capacity: Capacity of its routed blocks; 1 without any, None where the study sets none.
        cost: FLOPs, latency and the like of the first seed's model.
        figures: What its evaluation found with each seed: figures by name.
        to_dense: How much higher it scores than the dense model, paired by seed; None for the dense model.
        to_control: The same against its control; None where it has none.
        to_rivals: The same against the best rival that is as fast, and its name, by column.
    """

    name: str
    series: str
    capacity: float | None
    cost: dict[str, float]
    figures: dict[int, dict[str, float]]
    to_dense: Estimate | None
    to_control: Estimate | None
    to_rivals: Mapping[str, Estimate | str | None] = field(default_factory=dict)

    def values(self, figure: str) -> list[float]:
        """Return a figure's value for each seed that has one."""
        return [own[figure] for _, own in sorted(self.figures.items()) if figure in own]

    def row(self) -> dict[str, Any]:
        """Return everything by name; a figure `x` gives its mean `x` and the standard deviation `x_std`."""
        row = {"name": self.name, "series": self.series, "capacity": self.capacity, "seeds": len(self.figures)}
        for figure in dict.fromkeys(name for own in self.figures.values() for name in own):
            values = self.values(figure)
            row |= {figure: mean(values), f"{figure}_std": spread(values)}
        return {**row, **self.cost, "to_dense": self.to_dense, "to_control": self.to_control, **self.to_rivals}


@dataclass(frozen=True)
class StudyResult:
    """The outcome of a study.

    Args:
        folder: The study's folder with `tradeoff.{csv,json,md,png}` and other pictures.
        points: Its points.
        table: The points as a Markdown table, and which of them the seeds do not tell apart.
        cpu_seconds: CPU time of all processes since the study was last started.
    """

    folder: Path
    points: list[Point]
    table: str
    cpu_seconds: float


def table_of(columns: Mapping[str, Column], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as a Markdown table; columns without any value are left out.

    Args:
        columns: Name of each column to its title and format.
        rows: Values by name of the column.

    Example:
        >>> rows = [{"name": "dense", "top1": 95.82, "top1_std": 0.11}, {"name": "shallow", "top1": 95.0}]
        >>> print(table_of({"name": ("model", ""), "top1": ("top-1 %", "±.1f"), "kept": ("kept", ".3f")}, rows))
        | model   |    top-1 % |
        | :------ | ---------: |
        | dense   | 95.8 ± 0.1 |
        | shallow |       95.0 |
    """
    cells = {title: [_cell(row, name, form) for row in rows] for name, (title, form) in columns.items()}
    used = {title: column for title, column in cells.items() if any(column)}
    return markdown_table(list(used), list(zip(*used.values())))


def write_outcome(
    folder: Path,
    name: str,
    record: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    text: str,
    pictures: Mapping[str, Figure],
) -> None:
    """Write what a study found.

    Args:
        folder: The study's folder.
        name: What the files are called but for their endings.
        record: All of it, as JSON values.
        rows: A row for each model.
        text: Table and verdict as Markdown.
        pictures: Figures by the name of their file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"{name}.json", json.dumps(record, indent=2) + "\n")
    write_csv(folder / f"{name}.csv", rows)
    write_atomically(folder / f"{name}.md", text + "\n")
    for title, figure in pictures.items():
        figure.savefig(folder / f"{title}.png", dpi=150)


def _cell(row: Mapping[str, Any], name: str, form: str) -> str:
    if row.get(name) is None:
        return ""
    text, std = format(row[name], form.lstrip("±")), row.get(f"{name}_std")
    return text if std is None or not form.startswith("±") else f"{text} ± {std:{form[1:]}}"


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with a column `NAME/FIELD` for each field of a difference."""
    columns: dict[str, Any] = {}
    for name, value in row.items():
        parts = dataclasses.asdict(value, dict_factory=published) if isinstance(value, Estimate) else {"": value}
        columns |= {f"{name}/{part}".rstrip("/"): number for part, number in parts.items()}
    return columns
