"""The results of a study: its points, the columns of its table, its files, and differences paired by seed."""

from __future__ import annotations

import dataclasses
import json
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from mmod.analysis.statistics import BySeed, Estimate, difference, published
from mmod.analysis.style import save_figure, svg_of
from mmod.io.files import write_atomically
from mmod.io.tables import Column, write_csv
from mmod.planning.candidate import DENSE, Candidate
from mmod.planning.comparison import Scores

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Groups of models without significant differences that a sentence names.
_GROUPS = 3
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
    "to_rival": ("to the best as cheap", ""),
    "rival": ("which", ""),
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
    figures: dict[int, dict[str, float]]
    to_dense: Estimate | None
    to_control: Estimate | None
    # The difference to the best rival that is as fast, and the rival's name, by column.
    to_rivals: Mapping[str, Estimate | str | None] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """Return all columns by name."""
        row = {"name": self.name, "series": self.series, "capacity": self.capacity, "seeds": len(self.figures)}
        return {
            **row,
            **means_over_seeds(self.figures),
            **self.cost,
            "to_dense": self.to_dense,
            "to_control": self.to_control,
            **self.to_rivals,
        }


def compare(
    candidates: Iterable[Candidate],
    scores: Scores,
    figures: Mapping[str, dict[int, dict[str, float]]],
    costs: Mapping[str, dict[str, float]],
    rivals: Mapping[str, Mapping[str, Sequence[str]]],
) -> list[Point]:
    """Return candidates with their differences to the dense model, to their control and to the best of their rivals.

    Args:
        figures: All figures of a candidate by seed.
        costs: The costs of a candidate, times among them.
        rivals: Names of the candidates that each is compared with where they are as cheap, by a suffix of columns.
    """
    shown = {candidate.name: candidate for candidate in candidates}
    to_dense = scores.gaps(dict.fromkeys(shown, DENSE))
    to_control = scores.gaps({name: candidate.control for name, candidate in shown.items()})
    to_rivals: dict[str, dict[str, Estimate | str | None]] = {name: {} for name in shown}
    for suffix, others in rivals.items():
        best = {name: scores.best(names) for name, names in others.items()}
        for name, gap in scores.gaps(best).items():
            to_rivals[name] |= {f"to_rival{suffix}": gap, f"rival{suffix}": best[name]}
    return [
        Point(
            name,
            candidate.series,
            candidate.budget,
            costs[name],
            figures[name],
            to_dense[name],
            to_control[name],
            to_rivals[name],
        )
        for name, candidate in shown.items()
    ]


@dataclass(frozen=True)
class StudyResult:
    """The outcome of a study: its points, as rows of plain values in an isoFLOP study, and its text as Markdown."""

    folder: Path
    points: list[Any]
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


def means_over_seeds(figures: Mapping[int, Mapping[str, float]]) -> dict[str, float | None]:
    """Return the mean `x` and standard deviation `x_std` of every figure by seed; None is that of a single seed."""
    columns: dict[str, float | None] = {}
    for name in dict.fromkeys(chain.from_iterable(figures.values())):
        by_seed = [values[name] for _, values in sorted(figures.items()) if name in values]
        columns |= {name: mean(by_seed), f"{name}_std": stdev(by_seed) if len(by_seed) > 1 else None}
    return columns


class StudyScores(Scores):
    """Scores that a report puts in words.

    Attributes:
        note: The quantity that confidence intervals refer to; empty if another part of the report says so.
    """

    note = ""

    @abstractmethod
    def verdict(self) -> str:
        """Say between which models there is no significant difference."""


class SeedScores(StudyScores):
    """Scores of models that are paired by seed.

    Args:
        by_seed: The scores of a model by seed.
    """

    def __init__(self, by_seed: Mapping[str, BySeed]) -> None:
        self.by_seed = by_seed

    def mean(self, name: str) -> float:
        """Return the mean over seeds."""
        return mean(self.by_seed[name].values())

    def gap(self, name: str, other: str) -> Estimate | None:
        """Return the difference of a model's score to another's; None where the other has no run of a seed yet."""
        figures = self.by_seed[name]
        others = self.by_seed.get(other, {})
        return difference(figures, others) if set(figures) & set(others) else None

    def verdict(self) -> str:
        """Say in one sentence between which models there is no significant difference.

        Example:
            >>> scores = {"dense": {0: 95.0, 1: 95.2}, "a": {0: 94.9, 1: 95.2}, "b": {0: 70.0, 1: 70.1}}
            >>> print(SeedScores(scores).verdict())
            Paired over 2 seeds (95 % intervals), no significant difference between dense and a.
        """
        seeds = max((len(values) for values in self.by_seed.values()), default=0)
        if seeds < 2:
            return "One seed: differences are not tested. Add --seeds 5 for confidence intervals."
        groups = self._close_groups()
        text = "; ".join(listed(group, most=6) for group in groups[:_GROUPS])
        further = f"; {len(groups) - _GROUPS} more groups are as close" if len(groups) > _GROUPS else ""
        differing = f"no significant difference between {text}{further}" if text else "all differences are significant"
        return f"Paired over {seeds} seeds (95 % intervals), {differing}."

    def _close_groups(self) -> list[list[str]]:
        """Return groups of models without a significant difference, such that every such pair stands in one of them."""
        near: dict[str, set[str]] = {}
        for name in self.by_seed:
            gaps = self.gaps(dict.fromkeys(self.by_seed, name))
            near[name] = {other for other, gap in gaps.items() if gap is None or not gap.is_clear}
        groups: list[list[str]] = []
        for one, two in combinations(self.by_seed, 2):
            if two not in near[one] or any({one, two} <= set(group) for group in groups):
                continue
            group = [one, two]
            for name in self.by_seed:
                if name not in group and near[name].issuperset(group):
                    group.append(name)
            groups.append([name for name in self.by_seed if name in group])
        return groups


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
