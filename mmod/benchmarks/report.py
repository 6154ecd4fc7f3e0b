"""Results as tables and files, with what is needed to read them: the command's options and the environment."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from mmod.analysis.timing import Spread

NAME = "benchmark"
UNFINISHED = "unfinished.jsonl"
AnyRow = TypeVar("AnyRow", bound="Row")


@dataclass(frozen=True)
class Row:
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
        known = {name: value for name, value in values.items() if name in names}
        return cls(**{name: Spread(**value) if isinstance(value, dict) else value for name, value in known.items()})


@dataclass(frozen=True)
class BenchmarkRow(Row):
    """One routed model in one run. All ratios are taken round by round; memory is that of the whole batch.

    Args:
        router: Its router.
        select: "topk" or "threshold".
        context: What kept tokens attend to: "kept" or "all".
        path: "routed", or a control: "loop" (the same decisions, image by image), "masked" (every token computed, the
            skipped ones thrown away) or "removed" (no decision, the routed blocks are gone).
        capacity: Its capacity; for "threshold" the share that the threshold was set to keep.
        batch_size: Images per call.
        execution: "eager", "compiled" or "cudagraphs".
        step: "forward" or "train".
        rounds: Rounds timed.
        kept: Tokens kept by a routed block, mean over images and blocks.
        most: The largest number of tokens that one block kept of one image.
        dense_ms: Milliseconds per call of the dense model.
        free_ms: The same of free routing at this capacity.
        routed_ms: The same of this model.
        of_free: Speed of this model as a share of free routing's.
        of_topk: Speed under "threshold" as a share of that of the same model under "topk"; None elsewhere.
        speedup: Speed of this model over the dense one's.
        flop_speedup: FLOPs of the dense model over those of this one.
        dense_peak: Most bytes that a training step of the dense model holds beyond the weights; None for "forward".
        routed_peak: The same of this model.
        peak_bound: `dense_peak` less the share of each routed block's activations that belongs to skipped tokens, or
            the gradients where they are more; None where the graph is compiled, which decides itself what it holds.
    """

    HEADER = (
        "batch", "run", "router", "capacity", "kept (most)", "dense ms", "free ms", "routed ms", "routed / free speed",
        "threshold / top-k speed", "speed-up", "FLOP speed-up", "speed-up / FLOP speed-up", "peak / dense peak",
        "peak / bound",
    )  # fmt: skip

    router: str
    select: str
    context: str
    path: str
    capacity: float
    batch_size: int
    execution: str
    step: str
    rounds: int
    kept: float
    most: int
    dense_ms: Spread
    free_ms: Spread
    routed_ms: Spread
    of_free: Spread
    of_topk: Spread | None
    speedup: Spread
    flop_speedup: float
    dense_peak: int | None = None
    routed_peak: int | None = None
    peak_bound: int | None = None

    @property
    def of_flops(self) -> float:
        """Measured speed-up as a share of what FLOPs promise."""
        return self.speedup.median / self.flop_speedup

    @property
    def peak_of_dense(self) -> float | None:
        """Peak memory as a share of the dense model's."""
        return None if self.dense_peak is None or self.routed_peak is None else self.routed_peak / self.dense_peak

    @property
    def peak_of_bound(self) -> float | None:
        """Peak memory over its bound."""
        return None if self.peak_bound is None or self.routed_peak is None else self.routed_peak / self.peak_bound

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain JSON values, with the ratios that follow from them."""
        derived = {name: getattr(self, name) for name in ("of_flops", "peak_of_dense", "peak_of_bound")}
        return {**asdict(self), **derived}

    def cells(self) -> tuple[str, ...]:
        """Return the line as text."""
        model = self.router if self.path == "routed" else f"{self.router}, {self.path}"
        model += ", threshold" * (self.select == "threshold") + ", context all" * (self.context == "all")
        return (
            str(self.batch_size), f"{self.execution} {self.step}", model, f"{self.capacity:g}",
            f"{self.kept:.1f} ({self.most})", f"{self.dense_ms.median:.2f}", f"{self.free_ms.median:.2f}",
            f"{self.routed_ms.median:.2f}", spread_cell(self.of_free), spread_cell(self.of_topk),
            spread_cell(self.speedup), f"{self.flop_speedup:.3f}", f"{self.of_flops:.3f}",
            number_cell(self.peak_of_dense), number_cell(self.peak_of_bound),
        )  # fmt: skip


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
    rows: Sequence[Row]
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
        (folder / f"{NAME}.md").write_text(self.markdown())
        # Last, because this file says that the benchmark is finished.
        (folder / f"{NAME}.json").write_text(json.dumps(plain, indent=2) + "\n")


def check_same(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise a ValueError unless results were begun with these options in this environment.

    Args:
        path: The file that holds them.
        found: Its `config` and `environment`.
        wanted: The same of now.
    """
    pairs = [
        f"{name} ({found[part].get(name)!r}, now {wanted[part].get(name)!r})"
        for part in wanted
        for name in {**found[part], **wanted[part]}
        if found[part].get(name) != wanted[part].get(name)
    ]
    if pairs:
        raise ValueError(f"{path} was begun with other {', '.join(pairs)}: give another out folder, or remove it")


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


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned Markdown table; numbers are set to the right.

    Args:
        header: Titles of the columns.
        rows: Cells, as many in each row as there are titles.

    Example:
        >>> print(markdown_table(["name", "ms"], [["dense", "2.0"]]))
        | name  |  ms |
        | :---- | --: |
        | dense | 2.0 |
    """
    widths = [max(3, *(len(row[column]) for row in (header, *rows))) for column in range(len(header))]
    numeric = [all(not row[column] or row[column][:1].isdigit() for row in rows) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (c.rjust(w) if n else c.ljust(w) for c, w, n in zip(cells, widths, numeric))
        return f"| {' | '.join(padded)} |"

    rule = ["-" * (w - 1) + ":" if n else ":" + "-" * (w - 1) for w, n in zip(widths, numeric)]
    return "\n".join([line(header), line(rule), *map(line, rows)])


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
    found = json.loads(path.read_text())
    check_same(path, found, {"config": config, "environment": environment})
    rows: list[dict[str, Any]] = found["rows"]
    return rows
