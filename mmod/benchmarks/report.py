"""Results as tables and files, with what is needed to read them: the command's options and the environment."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from mmod.analysis.tables import markdown_table
from mmod.analysis.timing import Spread
from mmod.io.claim import check_same
from mmod.io.files import parse_json, write_atomically

NAME = "benchmark"
UNFINISHED = "unfinished.jsonl"
# Columns under the names that results and suites of earlier versions have for them.
FORMER_COLUMNS = {"rival": "baseline", "of_rival": "of_baseline"}
AnyRow = TypeVar("AnyRow", bound="ReportRow")


@dataclass(frozen=True)
class ReportRow:
    """A line of a report: a dataclass whose subclasses say how it is printed.

    Attributes:
        HEADER: Titles of the columns.
    """

    HEADER: ClassVar[tuple[str, ...]] = ()

    def cells(self) -> tuple[str, ...]:
        """Return the line as text, one cell for each title."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls: type[AnyRow], values: Mapping[str, Any]) -> AnyRow:
        """Make a row from the values that `to_dict` returned.

        Args:
            values: Plain JSON values; those that follow from others may be among them.
        """
        names = {field.name for field in fields(cls)}
        known = {name: value for name, value in current_columns(values).items() if name in names}
        return cls(**{name: Spread(**value) if isinstance(value, dict) else value for name, value in known.items()})


@dataclass(frozen=True)
class BenchmarkReport:
    """The rows of a benchmark and where they come from.

    Args:
        title: What was measured, in a few words.
        config: The options, as plain values.
        environment: See `environment`.
        rows: The lines, all of one class.
        notes: What a reader of the table must know, a sentence each.
    """

    title: str
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    rows: Sequence[ReportRow]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """Return the rows as a Markdown table: medians, quartiles in brackets, no columns without a value."""
        header = self.rows[0].HEADER if self.rows else ()
        lines = [cells for cells in (row.cells() for row in self.rows) if any(cells)]
        used = [column for column in range(len(header)) if any(line[column] for line in lines)]
        table = markdown_table([header[c] for c in used], [[line[c] for c in used] for line in lines])
        named = ", ".join(f"{name} {value}" for name, value in self.environment.items())
        notes = "".join(f"\n{note}\n" for note in self.notes)
        return f"{self.title}; {named}.\n\n{table}\n{notes}"

    def save(self, folder: Path) -> None:
        """Write `benchmark.json` and `benchmark.md` into a folder.

        Args:
            folder: Made if it is not there. It must hold no other benchmark: see `refuse_to_overwrite`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        plain = {
            "title": self.title,
            "config": dict(self.config),
            "environment": dict(self.environment),
            "notes": list(self.notes),
            "rows": [row.to_dict() for row in self.rows],
        }
        write_atomically(folder / f"{NAME}.md", self.markdown())
        # Last, because this file says that the benchmark is finished.
        write_atomically(folder / f"{NAME}.json", json.dumps(plain, indent=2) + "\n")


def current_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row that an earlier version may have written with the columns' present names."""
    return {FORMER_COLUMNS.get(name, name): value for name, value in row.items()}


def refuse_to_overwrite(folder: Path) -> None:
    """Raise a FileExistsError if a folder holds a benchmark already."""
    unfinished = (folder / UNFINISHED).exists()
    for path in (folder / f"{NAME}.json", folder / f"{NAME}.md"):
        if path.exists() and not unfinished:
            raise FileExistsError(f"{path} exists: give another out folder, or remove it")


def environment(device: str = "cpu") -> dict[str, Any]:
    """Return what a measurement depends on: versions, processor and threads.

    Args:
        device: Where the measurement runs.

    Raises:
        ValueError: `device` is CUDA and no GPU is there.
    """
    found: dict[str, Any] = {"torch": str(torch.__version__), "python": platform.python_version(), "device": device}
    if torch.device(device).type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device {device!r} was asked for and torch sees no GPU; use 'cpu'")
        return {**found, "gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return {**found, "processor": _processor(), "threads": torch.get_num_threads()}


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def spread_cell(spread: Spread | None) -> str:
    """Return a spread as a table's cell, empty for None."""
    return "" if spread is None else f"{spread.median:.3f} [{spread.low:.3f}, {spread.high:.3f}]"


def number_cell(value: float | None) -> str:
    """Return a number as a table's cell, empty for None."""
    return "" if value is None else f"{value:.3f}"


def plain_options(config: Any) -> dict[str, Any]:
    """Return the options of a benchmark that its results depend on, as plain JSON values.

    Args:
        config: A dataclass with a field `out`, which is left out.
    """
    options: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    options.pop("out")
    return options


def finished_rows(
    folder: Path, config: Mapping[str, Any], environment: Mapping[str, Any]
) -> list[dict[str, Any]] | None:
    """Return the rows of a finished benchmark as plain values, or None where the folder holds none.

    Args:
        folder: Where its results are.
        config: The options it must have been run with, see `plain_options`.
        environment: The environment it must have been run in.

    Raises:
        ValueError: It was run with other options or in another environment.
    """
    path = folder / f"{NAME}.json"
    if not path.exists():
        return None
    found = parse_json(path.read_bytes(), str(path))
    head = {"config": config, "environment": environment}
    check_same(path, {name: found[name] for name in head}, head, kind="a benchmark")
    return [current_columns(row) for row in found["rows"]]
