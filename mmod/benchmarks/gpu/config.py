"""Options and columns of the checks of a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mmod.benchmarks.report import HIDDEN, Options, Row
from mmod.io.tables import Column
from mmod.values import check_fields


@dataclass(frozen=True, kw_only=True)
class GpuOptions(Options):
    """Options of the checks of a GPU.

    Args:
        tests: Files or folders of the tests that are marked `gpu`, relative to the working directory.
        device: "cuda"; "cpu" rehearses on small models.
    """

    tests: list[str] = field(default_factory=lambda: ["tests/ops", "tests/blocks"])
    device: Literal["cuda", "cpu"] = "cuda"

    def __post_init__(self) -> None:
        check_fields(self, limit="(0, inf)", threads="[1, inf)")

    @property
    def rehearses(self) -> bool:
        """Whether small models run on a CPU."""
        return self.device == "cpu"


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
