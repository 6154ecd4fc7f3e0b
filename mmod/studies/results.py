"""The results of a study: its points, the columns of its table, and its files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmod.analysis.statistics import Estimate, published
from mmod.analysis.style import save_figure, svg_of
from mmod.compare.table import means_over_seeds
from mmod.io.files import write_atomically
from mmod.io.tables import Column, write_csv

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS: dict[str, Column] = {
    "name": ("model", ""),
    "capacity": ("capacity", "g"),
    "epochs": ("epochs", ""),
    "gflops": ("GFLOPs", ".4g"),
    "image_gflops": ("GFLOPs / image", ".4f"),
    "text_gflops": ("GFLOPs / caption", ".4f"),
    "image_share": ("image FLOPs", ".3f"),
    "flops_share": ("FLOPs", ".3f"),
    "latency_ms": ("ms / image", ".3f"),
    "speedup": ("speed-up", ".2f"),
    "image_ms": ("ms / image", ".3f"),
    "text_ms": ("ms / caption", ".3f"),
    "image_speedup": ("image speed-up", ".2f"),
    "text_speedup": ("text speed-up", ".2f"),
    "prefill_ms": ("prefill ms", ".2f"),
    "prefill_speedup": ("speed-up", ".2f"),
    "decode_per_s": ("decode tok/s", ".0f"),
    "cache_bytes": ("cache bytes", ","),
    "peak_mb": ("peak MB", ".1f"),
    "mean_iou": ("mean IoU %", "±.2f"),
    "mean_iou_to_dense": ("IoU to dense", ""),
    "objects": ("objects %", "±.2f"),
    "top1": ("top-1 %", ".2f"),
    "top1_std": ("std", ".2f"),
    "knn": ("k-NN %", ".1f"),
    "knn_to_dense": ("k-NN to dense", ""),
    "linear": ("linear %", ".1f"),
    "linear_to_dense": ("linear to dense", ""),
    "recall1": ("R@1 %", ".2f"),
    "recall1_std": ("std", ".2f"),
    "recall5": ("R@5 %", ".2f"),
    "zero_shot_top1": ("zero-shot %", ".2f"),
    "right": ("right %", "±.1f"),
    "to_dense": ("to dense", ""),
    "to_control": ("to control", ""),
    "to_baseline": ("to the best as cheap", ""),
    "baseline": ("which", ""),
    "patches": ("patches %", ".1f"),
    "before": ("before tuning", "±.2f"),
    "cosine": ("cosine", ".3f"),
    "kept": ("kept", ".3f"),
}
"""The columns of all studies by the name that they have in CSV files."""


@dataclass(frozen=True)
class Point:
    """One model of a study: the costs of its first seed, the figures of all seeds, and differences paired by seed."""

    name: str
    series: str
    capacity: float | None
    cost: dict[str, float]
    figures: dict[int, Mapping[str, float]]
    to_dense: Estimate | None
    to_control: Estimate | None
    # The difference to the best baseline that is as fast, and the baseline's name, by column.
    to_baselines: Mapping[str, Estimate | str | None] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """Return all columns by name."""
        row = {"name": self.name, "series": self.series, "capacity": self.capacity, "seeds": len(self.figures)}
        return {
            **row,
            **means_over_seeds(self.figures),
            **self.cost,
            "to_dense": self.to_dense,
            "to_control": self.to_control,
            **self.to_baselines,
        }


@dataclass(frozen=True)
class StudyResult:
    """The outcome of a study: its points, as rows of plain values in an isoFLOP study, and its text as Markdown."""

    folder: Path
    points: list[Any]
    rows: Sequence[Mapping[str, Any]]  # Of the table.
    table: str
    summary: str  # The text with the most important columns.
    cpu_seconds: float  # Of all processes since the study was last started.


def write_outcome(
    folder: Path,
    name: str,
    record: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    text: str,
    pictures: Mapping[str, Figure],
) -> None:
    """Write a study's record as JSON, its rows as CSV, its text as Markdown, and its pictures by their names."""
    for title, figure in pictures.items():
        save_picture(folder, title, figure)
    write_atomically(folder / f"{name}.json", json.dumps(record, indent=2) + "\n")
    write_csv(folder / f"{name}.csv", rows)
    write_atomically(folder / f"{name}.md", text + "\n")


def save_picture(folder: str | Path, name: str, figure: Figure) -> None:
    """Write a figure as PNG and, for pages, as SVG."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_figure(figure, Path(folder) / f"{name}.png", dpi=150, bbox_inches="tight")
    write_atomically(Path(folder) / f"{name}.svg", svg_of(figure))


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with a column `NAME/FIELD` for every field of a difference."""
    columns: dict[str, Any] = {}
    for name, value in row.items():
        fields = dataclasses.asdict(value, dict_factory=published) if isinstance(value, Estimate) else {"": value}
        columns |= {f"{name}/{field}".rstrip("/"): number for field, number in fields.items()}
    return columns


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first few names as a list, those with a comma in quotes, and how many follow.

    Example:
        >>> listed(["a", "b, merged", "c", "d", "e"]), listed(["a", "b"])
        ("a, 'b, merged', c and 2 more", 'a and b')
    """
    shown = [f"'{name}'" if "," in name else name for name in names[:most]]
    if len(names) > most:
        return f"{', '.join(shown)} and {len(names) - most} more"
    return f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else "".join(shown)
