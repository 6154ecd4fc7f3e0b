"""Suites: several benchmarks by one command, checked against thresholds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from mmod.benchmarks.generation import GenerationConfig, GenerationRow
from mmod.benchmarks.models.benchmark import BenchmarkConfig, BenchmarkRow
from mmod.benchmarks.ops.benchmark import OpBenchmarkConfig, OpRow
from mmod.benchmarks.report import (
    UNFINISHED,
    BenchmarkReport,
    Options,
    ReportRow,
    benchmark,
    environment,
    finished_rows,
    plain_options,
    refuse_to_overwrite,
)


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """A limit on a column of benchmark rows, lower or upper.

    Args:
        name: The requirement in words.
        parts: Folders of the benchmarks that it applies to.
        where: Values of columns that select rows; a list has alternatives.
        column: The limited column; of a spread, the median counts.
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

    def check(self, rows: Sequence[Mapping[str, Any]]) -> CriterionRow:
        """Return whether rows, as plain values, meet the limit, and the margin of the worst row.

        Example:
            >>> fast = Criterion(name="fast", parts=["ops"], column="of_bound", at_least=0.85)
            >>> row = fast.check([{"op": "merge_rows", "of_bound": {"median": 0.8}}])
            >>> row.met, round(row.margin, 2)
            (False, -0.05)
        """
        limit, sign = (self.at_most, -1.0) if self.at_least is None else (self.at_least, 1.0)
        assert limit is not None
        counted = [(row, value) for row in rows if self._counts(row) and (value := self._value(row)) is not None]
        if not counted:
            return CriterionRow(self.name, 0, "", None, limit, None, False)
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
        worst_row: The selected row with the smallest margin, and `worst` its value; None without rows.
        margin: Distance to the limit; negative if it is missed.
    """

    COLUMNS: ClassVar = {
        "name": ("threshold", ""), "verdict": ("verdict", ""), "limit": ("limit", "g"), "worst": ("worst", ".4g"),
        "rows": ("rows", ""), "worst_row": ("worst row", ""),
    }  # fmt: skip

    name: str
    rows: int
    worst_row: str
    worst: float | None
    limit: float
    margin: float | None
    met: bool

    def cells(self) -> dict[str, Any]:
        """Return the cells, with the verdict in words."""
        missed = "not measured" if self.margin is None else f"missed by {-self.margin:.3g}"
        return {**super().cells(), "verdict": "met" if self.met else missed}


@dataclass(frozen=True, kw_only=True)
class SuiteConfig:
    """Benchmarks and the thresholds that they must keep.

    Args:
        ops: Benchmarks of ops; `out` names the folder of each within that of the suite.
        models: Benchmarks of models, likewise.
        generation: Benchmarks of generation, likewise.
        thresholds: Limits that their rows must keep.
        out: Folder for all results. A suite that was killed goes on in the same folder.
    """

    ops: list[OpBenchmarkConfig] = field(default_factory=list)
    models: list[BenchmarkConfig] = field(default_factory=list)
    generation: list[GenerationConfig] = field(default_factory=list)
    thresholds: list[Criterion] = field(default_factory=list)
    out: str = "runs/benchmark_suite"

    def __post_init__(self) -> None:
        names = [member.out for member in self.benchmarks]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a suite needs at least one part, each with an out folder of its own, got {names}")
        rows: list[tuple[Sequence[Options], type[ReportRow]]] = [
            (self.ops, OpRow), (self.models, BenchmarkRow), (self.generation, GenerationRow),
        ]  # fmt: skip
        columns = {member.out: set(row.names()) for members, row in rows for member in members}
        for threshold in self.thresholds:
            for name in threshold.parts:
                if name not in columns:
                    raise ValueError(
                        f"the threshold {threshold.name!r} is set for {name!r}; parts are {', '.join(names)}"
                    )
                unknown = sorted({threshold.column, *threshold.where} - columns[name])
                if unknown:
                    raise ValueError(
                        f"the threshold {threshold.name!r} names columns {unknown}; "
                        f"{name} has {', '.join(sorted(columns[name]))}"
                    )

    @property
    def benchmarks(self) -> list[Options]:
        """All benchmarks, in the order in which they run."""
        return [*self.ops, *self.models, *self.generation]


class SuiteFailedError(RuntimeError):
    """Benchmarks of a suite failed; the others were measured and checked, and the report names the failures."""

    def __init__(self, failures: Mapping[str, str], report: BenchmarkReport) -> None:
        super().__init__(f"parts of the suite failed: {'; '.join(f'{name}: {why}' for name, why in failures.items())}")
        self.report = report


def benchmark_suite(config: SuiteConfig, progress: bool = True) -> BenchmarkReport:
    """Run all benchmarks of a suite that are not finished yet, and check their rows against its thresholds.

    A benchmark that fails does not keep the next ones from running; the same command tries it again.

    Returns:
        A row for each threshold. The benchmarks' tables are in their folders.

    Raises:
        FileExistsError: The output folder holds a finished suite.
        ValueError: It holds a benchmark with other options or of another machine.
        SuiteFailedError: Benchmarks failed. The report is written all the same; thresholds over them are not checked.
    """
    folder = Path(config.out)
    refuse_to_overwrite(folder)
    rows: dict[str, list[dict[str, Any]]] = {}
    failures: dict[str, str] = {}
    for member in config.benchmarks:
        out = folder / member.out
        finished = finished_rows(member, out)
        try:
            if finished is None:
                finished = [row.to_dict() for row in benchmark(replace(member, out=str(out)), progress).rows]
            rows[member.out] = finished
        except Exception as error:
            failures[member.out] = f"{type(error).__name__}: {error}"
    checked = [
        threshold.check([] if failures.keys() & {*threshold.parts} else [r for n in threshold.parts for r in rows[n]])
        for threshold in config.thresholds
    ]
    notes = [f"{name} failed: {why}" for name, why in failures.items()]
    machine = environment(config.benchmarks[0].device)
    report = BenchmarkReport("thresholds", plain_options(config), machine, checked, notes)
    report.save(folder)
    if failures:
        (folder / UNFINISHED).touch()
        raise SuiteFailedError(failures, report)
    (folder / UNFINISHED).unlink(missing_ok=True)
    return report


def describe(row: Mapping[str, Any]) -> str:
    """Return what a row, as plain values, is about: its texts and counts, without what was measured."""
    about = [f"{v:g}" if isinstance(v, float) else str(v) for n, v in row.items() if n in _ABOUT and v is not None]
    return " ".join(about)


_ABOUT = (
    "op", "images", "tokens", "kept", "dtype", "path", "router", "select", "context", "capacity", "batch_size",
    "execution", "step", "preset", "image_tokens", "what",
)  # fmt: skip
