"""Suites: several benchmarks by one command, checked against thresholds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from mmod.benchmarks.generation.benchmark import benchmark_generation
from mmod.benchmarks.generation.config import GenerationConfig, GenerationRow
from mmod.benchmarks.models.benchmark import benchmark
from mmod.benchmarks.models.config import BenchmarkConfig, BenchmarkRow
from mmod.benchmarks.ops.benchmark import OpBenchmarkConfig, OpRow, benchmark_ops
from mmod.benchmarks.report import (
    FORMER_COLUMNS,
    UNFINISHED,
    BenchmarkReport,
    ReportRow,
    current_columns,
    environment,
    finished_rows,
    plain_options,
    refuse_to_overwrite,
)


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """A pass criterion: a limit on a column of benchmark rows.

    Args:
        name: The requirement in words.
        parts: Folders of the benchmarks that it applies to.
        where: Values of columns that select rows; a list has alternatives.
        column: The limited column; of a spread, the median counts.
        at_least: Lower limit, or None.
        at_most: Upper limit, or None.

    Raises:
        ValueError: No limit or two.
    """

    name: str
    parts: list[str]
    column: str
    where: dict[str, Any] = field(default_factory=dict)
    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError(f"the threshold {self.name!r} needs either at_least or at_most")
        object.__setattr__(self, "column", FORMER_COLUMNS.get(self.column, self.column))
        object.__setattr__(self, "where", current_columns(self.where))

    def check(self, rows: Sequence[Mapping[str, Any]]) -> CriterionRow:
        """Return whether rows meet the limit, and the margin of the worst row.

        Args:
            rows: Rows of the benchmarks, as plain values.

        Example:
            >>> fast = Criterion(name="fast", parts=["ops"], column="of_bound", at_least=0.85)
            >>> row = fast.check([{"op": "merge_rows", "of_bound": {"median": 0.8}}])
            >>> row.met, round(row.margin, 2)
            (False, -0.05)
        """
        limit = self.at_least if self.at_least is not None else self.at_most
        assert limit is not None
        counted = [(row, value) for row in rows if self._counts(row) and (value := self._value(row)) is not None]
        if not counted:
            return CriterionRow(self.name, 0, "", None, limit, None, False)
        sign = 1.0 if self.at_least is not None else -1.0
        row, worst = min(counted, key=lambda pair: sign * pair[1])
        margin = sign * (worst - limit)
        return CriterionRow(self.name, len(counted), describe(row), worst, limit, margin, margin >= 0)

    def _counts(self, row: Mapping[str, Any]) -> bool:
        return all(row[name] in (v if isinstance(v, list) else [v]) for name, v in self.where.items())

    def _value(self, row: Mapping[str, Any]) -> float | None:
        value = row[self.column]
        number: float | None = value["median"] if isinstance(value, Mapping) else value
        return number


@dataclass(frozen=True)
class CriterionRow(ReportRow):
    """A criterion and its result.

    Args:
        name: The requirement.
        rows: Number of selected rows.
        worst_row: The row with the smallest margin.
        worst: Its value; None without rows.
        limit: The limit.
        margin: Distance to the limit; negative if it is missed.
        met: All rows meet the limit; False without rows.
    """

    HEADER = ("threshold", "verdict", "limit", "worst", "rows", "worst row")

    name: str
    rows: int
    worst_row: str
    worst: float | None
    limit: float
    margin: float | None
    met: bool

    def cells(self) -> tuple[str, ...]:
        """Return the line as text."""
        if self.worst is None or self.margin is None:
            return (self.name, "not measured", f"{self.limit:g}", "", "0", "")
        verdict = "met" if self.met else f"missed by {-self.margin:.3g}"
        return (self.name, verdict, f"{self.limit:g}", f"{self.worst:.4g}", str(self.rows), self.worst_row)


@dataclass(frozen=True, kw_only=True)
class SuiteConfig:
    """Benchmarks and the thresholds that they must keep.

    Args:
        ops: Benchmarks of ops; `out` names the folder of each within that of the suite.
        models: Benchmarks of models, likewise.
        generation: Benchmarks of generation, likewise.
        thresholds: Limits that their rows must keep.
        out: Folder for all results. A suite that was killed goes on in the same folder.

    Raises:
        ValueError: Parts that share a folder, or a threshold over parts or columns that do not exist.
    """

    ops: list[OpBenchmarkConfig] = field(default_factory=list)
    models: list[BenchmarkConfig] = field(default_factory=list)
    generation: list[GenerationConfig] = field(default_factory=list)
    thresholds: list[Criterion] = field(default_factory=list)
    out: str = "runs/benchmark_suite"

    def __post_init__(self) -> None:
        names = [part.out for part, _, _ in self.parts]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a suite needs at least one part, each with an out folder of its own, got {names}")
        columns = {part.out: _columns(row) for part, _, row in self.parts}
        for threshold in self.thresholds:
            for part in threshold.parts:
                if part not in columns:
                    raise ValueError(
                        f"the threshold {threshold.name!r} is set for {part!r}; parts are {', '.join(names)}"
                    )
                unknown = sorted({threshold.column, *threshold.where} - columns[part])
                if unknown:
                    raise ValueError(
                        f"the threshold {threshold.name!r} names columns {unknown}; "
                        f"{part} has {', '.join(sorted(columns[part]))}"
                    )

    @property
    def parts(self) -> list[tuple[Any, Any, type[ReportRow]]]:
        """Each benchmark with what runs it and the class of its rows."""
        kinds: tuple[tuple[Sequence[Any], Any, type[ReportRow]], ...] = (
            (self.ops, benchmark_ops, OpRow),
            (self.models, benchmark, BenchmarkRow),
            (self.generation, benchmark_generation, GenerationRow),
        )
        return [(part, run, row) for parts, run, row in kinds for part in parts]


class SuiteFailedError(RuntimeError):
    """Parts of a suite failed; the others were measured and checked.

    Args:
        failures: What went wrong, by part.
        report: The report, which names the failures too.
    """

    def __init__(self, failures: Mapping[str, str], report: BenchmarkReport) -> None:
        super().__init__(f"parts of the suite failed: {'; '.join(f'{part}: {why}' for part, why in failures.items())}")
        self.report = report


def benchmark_suite(config: SuiteConfig, progress: bool = True) -> BenchmarkReport:
    """Run all benchmarks of a suite that are not finished yet, and check their rows against its thresholds.

    A part that fails does not keep the next ones from running; the same command tries it again.

    Args:
        config: The suite.
        progress: Show progress bars on stderr.

    Returns:
        A row for each threshold. The benchmarks' own tables are in the folders of the parts.

    Raises:
        FileExistsError: The output folder holds a finished suite.
        ValueError: It holds a part with other options or of another machine.
        SuiteFailedError: Parts failed. The report is written all the same; thresholds over them are not checked.
    """
    folder = Path(config.out)
    refuse_to_overwrite(folder)
    rows: dict[str, list[dict[str, Any]]] = {}
    failures: dict[str, str] = {}
    for part, run, _ in config.parts:
        found = _finished(part, folder)
        try:
            rows[part.out] = _run(part, run, folder, progress) if found is None else found
        except Exception as error:
            failures[part.out] = f"{type(error).__name__}: {error}"
    checked = [
        each.check([] if failures.keys() & set(each.parts) else [row for part in each.parts for row in rows[part]])
        for each in config.thresholds
    ]
    notes = [f"{part} failed: {why}" for part, why in failures.items()]
    report = BenchmarkReport(
        "thresholds", plain_options(config), environment(config.parts[0][0].device), checked, notes
    )
    report.save(folder)
    if failures:
        (folder / UNFINISHED).touch()
        raise SuiteFailedError(failures, report)
    (folder / UNFINISHED).unlink(missing_ok=True)
    return report


def _finished(part: Any, folder: Path) -> list[dict[str, Any]] | None:
    """Return the rows of a part that was measured before, or None."""
    if part.threads is not None:
        torch.set_num_threads(part.threads)
    return finished_rows(folder / part.out, plain_options(part), environment(part.device))


def _run(part: Any, run: Any, folder: Path, progress: bool) -> list[dict[str, Any]]:
    """Measure a part and return its rows."""
    report: BenchmarkReport = run(replace(part, out=str(folder / part.out)), progress)
    return [row.to_dict() for row in report.rows]


def _columns(row: type[ReportRow]) -> set[str]:
    derived = {name for name, value in vars(row).items() if isinstance(value, property)}
    return {f.name for f in fields(row)} | derived


def describe(row: Mapping[str, Any]) -> str:
    """Return what a row is about: its texts and counts, without what was measured.

    Args:
        row: A row of any benchmark, as plain values.

    Example:
        >>> describe({"op": "gather_rows", "images": 8, "ms": 0.1})
        'gather_rows 8'
    """
    about = [f"{v:g}" if isinstance(v, float) else str(v) for n, v in row.items() if n in _ABOUT and v is not None]
    return " ".join(about)


_ABOUT = (
    "op", "images", "tokens", "kept", "dtype", "path", "router", "select", "context", "capacity", "batch_size",
    "execution", "step", "preset", "image_tokens", "what",
)  # fmt: skip
