"""Config and rows of the GPU benchmark."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mmod.benchmarks.options import Options
from mmod.benchmarks.report import ReportRow
from mmod.values import check_fields

PartName = Literal[
    "environment", "tests", "models", "attention", "ops", "graphs", "llava", "memory", "training", "memcheck"
]


@dataclass(frozen=True, kw_only=True)
class GpuConfig(Options):
    """What to run on a GPU, and for how long; other options are those of `Options`.

    Args:
        minutes: Time budget of this call. Parts that do not fit run in the next call with the same folder.
        only: Run this part alone; None runs all of them, the most valuable first.
        tests: Files or folders of the tests that are marked `gpu`, relative to the working directory.
        device: "cuda"; "cpu" rehearses every part on small models.

    Raises:
        ValueError: An unknown part or device, or no time.
    """

    minutes: float = 9.0
    only: PartName | None = None
    tests: list[str] = field(default_factory=lambda: ["tests/ops", "tests/blocks"])
    device: Literal["cuda", "cpu"] = "cuda"
    out: str = "runs/benchmark/gpu"

    def __post_init__(self) -> None:
        check_fields(self, minutes="(0, inf)", threads="[1, inf)")

    @property
    def rehearses(self) -> bool:
        """Whether every part runs small, on a CPU."""
        return self.device == "cpu"

    @property
    def command(self) -> str:
        """The command line that continues this benchmark."""
        options = {"device": self.device, "minutes": f"{self.minutes:g}", "tests": str(self.tests), "out": self.out}
        options |= {} if self.only is None else {"only": self.only}
        return shlex.join(["mmod", "benchmark", "gpu", *(f"--{name}={value}" for name, value in options.items())])


class UnavailableError(RuntimeError):
    """A part lacks what it needs here; it is recorded as skipped."""


@dataclass(frozen=True)
class FiguresRow(ReportRow):
    """One thing and what was measured of it.

    Args:
        what: The thing: a model, a file of tests, a property of the machine.
        figures: Values by name, each of which JSON can hold.
    """

    HEADER = ("what", "figures")

    what: str
    figures: dict[str, Any]

    def cells(self) -> tuple[str, ...]:
        """Return the line as text."""
        return (self.what, figures_text(self.figures))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FiguresRow:
        """Make a row from the values that `to_dict` returned."""
        return cls(**values)


def figures_text(figures: Mapping[str, Any]) -> str:
    """Return figures as a table's cell: medians of spreads, nothing for None.

    Args:
        figures: Values by name.

    Example:
        >>> figures_text({"speedup": {"median": 1.5, "low": 1.4, "high": 1.6}, "baseline": None, "rounds": 10})
        'speedup 1.5, rounds 10'
    """
    medians = {name: value["median"] if isinstance(value, dict) else value for name, value in figures.items()}
    texts = {name: f"{v:.4g}" if isinstance(v, float) else str(v) for name, v in medians.items() if v is not None}
    return ", ".join(f"{name} {text}" for name, text in texts.items())


@dataclass(frozen=True)
class SummaryRow(ReportRow):
    """One result of a part, or the reason for which it has none.

    Args:
        part: Name of the part.
        status: "done", "skipped", "failed", "timed out" or "not run yet".
        seconds: Seconds that it has taken, over all calls; None on lines after a part's first.
        what: What the figures belong to.
        figures: Figures with their names, or why there are none.
    """

    HEADER = ("part", "status", "seconds", "what", "figures")

    part: str
    status: str
    seconds: float | None
    what: str
    figures: str

    def cells(self) -> tuple[str, ...]:
        """Return the line as text."""
        return (self.part, self.status, "" if self.seconds is None else f"{self.seconds:.0f}", self.what, self.figures)
