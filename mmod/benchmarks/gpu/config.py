"""Config and columns of the GPU benchmark."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mmod.benchmarks.report import HIDDEN, Options, Row
from mmod.io.tables import Column
from mmod.values import check_fields

PartName = Literal[
    "environment", "tests", "models", "attention", "ops", "graphs", "llava", "memory", "training", "memcheck"
]


@dataclass(frozen=True, kw_only=True)
class GpuConfig(Options):
    """What to run on a GPU, and for how long.

    Args:
        minutes: Time budget of this call. Parts that do not fit run in the next call with the same folder.
        only: Run this part alone; None runs all of them, the most valuable first.
        tests: Files or folders of the tests that are marked `gpu`, relative to the working directory.
        device: "cuda"; "cpu" rehearses every part on small models.
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
        """Whether all parts run small models on a CPU."""
        return self.device == "cpu"

    @property
    def command(self) -> str:
        """The command line that continues this benchmark."""
        options = {"device": self.device, "minutes": f"{self.minutes:g}", "tests": str(self.tests), "out": self.out}
        options |= {} if self.only is None else {"only": self.only}
        return shlex.join(["mmod", "benchmark", "gpu", *(f"--{name}={value}" for name, value in options.items())])


class UnavailableError(RuntimeError):
    """A part lacks what it needs here; it is recorded as skipped."""


FIGURES: dict[str, Column] = {"what": ("what", ""), "text": ("figures", ""), "figures": HIDDEN}
"""Columns of one subject, such as a model or a file of tests, with its figures as JSON values by name."""


def figures_row(what: str, figures: Mapping[str, Any]) -> Row:
    """Return the row of one subject."""
    return {"what": what, "figures": dict(figures), "text": figures_text(figures)}


def figures_text(figures: Mapping[str, Any]) -> str:
    """Return figures by name as a table's cell: medians of spreads, nothing for None.

    Example:
        >>> figures_text({"speedup": {"median": 1.5, "low": 1.4, "high": 1.6}, "baseline": None, "rounds": 10})
        'speedup 1.5, rounds 10'
    """
    medians = {name: value["median"] if isinstance(value, dict) else value for name, value in figures.items()}
    texts = {name: f"{v:.4g}" if isinstance(v, float) else str(v) for name, v in medians.items() if v is not None}
    return ", ".join(f"{name} {text}" for name, text in texts.items())


SUMMARY: dict[str, Column] = {
    "part": ("part", ""), "status": ("status", ""), "seconds": ("seconds", ".0f"), "what": ("what", ""),
    "figures": ("figures", ""),
}  # fmt: skip
"""Columns of one result of a part, or of why it has none; the seconds of all its calls are in its first row."""
