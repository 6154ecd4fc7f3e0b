"""Results as tables and files, with what is needed to read them: the command's options and the environment."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mmod.measuring.latency import Spread

NAME = "benchmark"


@dataclass(frozen=True)
class BenchmarkRow:
    """One routed model in one run. All ratios are taken round by round.

    Args:
        router: Its router.
        capacity: Its capacity.
        batch_size: Images per call.
        execution: "eager" or "compiled".
        step: "forward" or "train".
        rounds: Rounds timed.
        dense_ms: Milliseconds per call of the dense model.
        free_ms: The same of free routing.
        routed_ms: The same of the routed model.
        of_free: Speed of the routed model as a share of free routing's.
        speedup: Speed of the routed model over the dense one's.
        flop_speedup: FLOPs of the dense model over those of the routed one.
    """

    router: str
    capacity: float
    batch_size: int
    execution: str
    step: str
    rounds: int
    dense_ms: Spread
    free_ms: Spread
    routed_ms: Spread
    of_free: Spread
    speedup: Spread
    flop_speedup: float

    @property
    def of_flops(self) -> float:
        """Measured speed-up as a share of what FLOPs promise."""
        return self.speedup.median / self.flop_speedup

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain JSON values."""
        return {**asdict(self), "of_flops": self.of_flops}


@dataclass(frozen=True)
class BenchmarkReport:
    """The rows of a benchmark and where they come from.

    Args:
        config: The options, as plain values.
        environment: See `environment`.
        rows: One row for each routed model in each run.
    """

    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    rows: Sequence[BenchmarkRow]

    def markdown(self) -> str:
        """Return the rows as a Markdown table, medians with quartiles in brackets."""
        header = (
            "batch", "run", "router", "capacity", "dense ms", "free ms", "routed ms",
            "routed / free speed", "speed-up", "FLOP speed-up", "speed-up / FLOP speed-up",
        )  # fmt: skip
        rows = [
            (
                str(row.batch_size), f"{row.execution} {row.step}", row.router, f"{row.capacity:g}",
                f"{row.dense_ms.median:.2f}", f"{row.free_ms.median:.2f}", f"{row.routed_ms.median:.2f}",
                _spread(row.of_free), _spread(row.speedup), f"{row.flop_speedup:.3f}", f"{row.of_flops:.3f}",
            )
            for row in self.rows
        ]  # fmt: skip
        named = ", ".join(f"{name} {value}" for name, value in self.environment.items())
        model = f"{self.config['model']}, {self.config['dtype']}"
        return f"{model}; {named}.\n\n{markdown_table(header, rows)}\n"

    def save(self, folder: Path) -> None:
        """Write `benchmark.json` and `benchmark.md` into a folder.

        Raises:
            FileExistsError: The folder holds a benchmark already.
        """
        refuse_to_overwrite(folder)
        folder.mkdir(parents=True, exist_ok=True)
        plain = {
            "config": dict(self.config),
            "environment": dict(self.environment),
            "rows": [row.to_dict() for row in self.rows],
        }
        (folder / f"{NAME}.json").write_text(json.dumps(plain, indent=2) + "\n")
        (folder / f"{NAME}.md").write_text(self.markdown())


def refuse_to_overwrite(folder: Path) -> None:
    """Raise a FileExistsError if a folder holds a benchmark already."""
    for suffix in ("json", "md"):
        path = folder / f"{NAME}.{suffix}"
        if path.exists():
            raise FileExistsError(f"{path} exists: give another out folder, or remove it")


def environment(device: str = "cpu") -> dict[str, Any]:
    """Return what a measurement depends on: versions, processor and threads.

    Args:
        device: Where the measurement runs.
    """
    found: dict[str, Any] = {"torch": str(torch.__version__), "python": platform.python_version(), "device": device}
    if torch.device(device).type == "cuda":
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

    Example:
        >>> print(markdown_table(["name", "ms"], [["dense", "2.0"]]))
        | name  |  ms |
        | :---- | --: |
        | dense | 2.0 |
    """
    widths = [max(3, *(len(row[column]) for row in (header, *rows))) for column in range(len(header))]
    numeric = [all(row[column][:1].isdigit() for row in rows) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (c.rjust(w) if n else c.ljust(w) for c, w, n in zip(cells, widths, numeric))
        return f"| {' | '.join(padded)} |"

    rule = ["-" * (w - 1) + ":" if n else ":" + "-" * (w - 1) for w, n in zip(widths, numeric)]
    return "\n".join([line(header), line(rule), *map(line, rows)])


def _spread(spread: Spread) -> str:
    return f"{spread.median:.3f} [{spread.low:.3f}, {spread.high:.3f}]"
