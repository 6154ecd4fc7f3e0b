"""Suites: several benchmarks by one command, checked against thresholds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mmod.benchmarks import generation, models, ops
from mmod.benchmarks.generation import GenerationConfig
from mmod.benchmarks.models.benchmark import BenchmarkConfig
from mmod.benchmarks.ops.benchmark import OpBenchmarkConfig
from mmod.benchmarks.report import (
    HIDDEN,
    BenchmarkReport,
    Options,
    Row,
    benchmark,
    earlier_report,
    identity_of,
)
from mmod.io.tables import Column


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

    def check(self, rows: Sequence[Row]) -> Row:
        """Return whether rows meet the limit, and the margin of the worst row: negative if it is missed.

        Example:
            >>> fast = Criterion(name="fast", parts=["ops"], column="of_bound", at_least=0.85)
            >>> row = fast.check([{"op": "merge_rows", "of_bound": {"median": 0.8}}])
            >>> row["met"], round(row["margin"], 2)
            (False, -0.05)
        """
        limit, sign = (self.at_most, -1.0) if self.at_least is None else (self.at_least, 1.0)
        assert limit is not None
        counted = [(row, value) for row in rows if self._counts(row) and (value := self._value(row)) is not None]
        about = {"name": self.name, "rows": len(counted), "limit": limit}
        if not counted:
            return {**about, "met": False, "verdict": "not measured"}
        row, worst = min(counted, key=lambda pair: sign * pair[1])
        margin = sign * (worst - limit)
        verdict = "met" if margin >= 0 else f"missed by {-margin:.3g}"
        about |= {"met": margin >= 0, "verdict": verdict, "margin": margin}
        return {**about, "worst": worst, "worst_row": describe(row)}

    def _counts(self, row: Row) -> bool:
        return all(row[name] in (v if isinstance(v, list) else [v]) for name, v in self.where.items())

    def _value(self, row: Row) -> float | None:
        value = row.get(self.column)
        number: float | None = value["median"] if isinstance(value, Mapping) else value
        return number


COLUMNS: dict[str, Column] = {
    "name": ("threshold", ""), "verdict": ("verdict", ""), "limit": ("limit", "g"), "worst": ("worst", ".4g"),
    "rows": ("rows", ""), "worst_row": ("worst row", ""), "margin": HIDDEN, "met": HIDDEN,
}  # fmt: skip


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
        kinds: list[tuple[Sequence[Options], Mapping[str, Column]]] = [
            (self.ops, ops.benchmark.COLUMNS), (self.models, models.benchmark.COLUMNS),
            (self.generation, generation.COLUMNS),
        ]  # fmt: skip
        columns = {member.out: set(known) for members, known in kinds for member in members}
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
    def device(self) -> str:
        """The device of the first benchmark."""
        return self.benchmarks[0].device

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
    """Run all benchmarks of a suite that are not finished yet, and check the rows of all against its thresholds.

    A benchmark that fails does not keep the next ones from running; the same command tries it again.

    Returns:
        A row for each threshold. The benchmarks' tables are in their folders.

    Raises:
        ValueError: The output folder holds another suite.
        SuiteFailedError: Benchmarks failed. The report is written all the same; thresholds over them are not checked.
    """
    folder, identity = Path(config.out), identity_of(config)
    earlier_report(folder, identity)
    rows: dict[str, Sequence[Row]] = {}
    failures: dict[str, str] = {}
    for member in config.benchmarks:
        try:
            rows[member.out] = benchmark(replace(member, out=str(folder / member.out)), progress).rows
        except Exception as error:
            failures[member.out] = f"{type(error).__name__}: {error}"
    checked = [
        threshold.check([] if failures.keys() & {*threshold.parts} else [r for n in threshold.parts for r in rows[n]])
        for threshold in config.thresholds
    ]
    notes = [f"{name} failed: {why}" for name, why in failures.items()]
    report = BenchmarkReport("thresholds", COLUMNS, **identity, rows=checked, notes=notes)
    report.save(folder)
    if failures:
        raise SuiteFailedError(failures, report)
    return report


def describe(row: Row) -> str:
    """Return what a row is about: its texts and counts, without what was measured."""
    about = [f"{v:g}" if isinstance(v, float) else str(v) for n, v in row.items() if n in _ABOUT and v is not None]
    return " ".join(about)


_ABOUT = (
    "op", "images", "tokens", "kept", "dtype", "path", "router", "select", "context", "capacity", "batch_size",
    "execution", "step", "preset", "image_tokens", "what",
)  # fmt: skip
