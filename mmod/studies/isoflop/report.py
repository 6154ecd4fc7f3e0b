"""The results of an isoFLOP study: its points, a curve of loss over size at every budget, table and picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mmod.analysis.statistics import Estimate, difference
from mmod.analysis.style import FAINT, INK, MARKERS, add_hint, add_legend, looks, new_figure, tidy
from mmod.io.tables import Column, table_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Budget and name of a series.
Group = tuple[float, str]
Points = Sequence[Mapping[str, Any]]
_COLUMNS: dict[str, Column] = {
    "budget": ("training FLOPs", ".3g"),
    "series": ("model", ""),
    "size": ("size", ""),
    "parameters": ("parameters", ",.0f"),
    "forward": ("forward FLOPs", ".3g"),
    "steps": ("steps", ""),
    "rate": ("rate", "g"),
    "loss": ("loss", "±.4f"),
    "causal_loss": ("token by token", "±.4f"),
    "agreement": ("alike", ".3f"),
    "difference": ("to the first", ""),
}


@dataclass(frozen=True)
class Curve:
    """A parabola of the loss in the logarithm of the size, through models of one budget and routing."""

    sizes: tuple[float, ...]  # Parameters of the models, ascending.
    flops: tuple[float, ...]  # Of their forward passes.
    coefficients: tuple[float, float, float]  # The highest power first.

    def loss(self, size: float) -> float:
        """Return the loss at a number of parameters."""
        return float(np.polyval(self.coefficients, np.log(size)))

    def forward(self, size: float) -> float:
        """Return the FLOPs of a forward pass at a number of parameters, interpolated between the models."""
        return float(np.exp(np.interp(np.log(size), np.log(self.sizes), np.log(self.flops))))

    @property
    def optimum(self) -> float | None:
        """The number of parameters with the least loss; None where the parabola has no minimum among the sizes."""
        square, slope, _ = self.coefficients
        if square <= 0:
            return None
        best = float(np.exp(-slope / (2 * square)))
        return best if self.sizes[0] <= best <= self.sizes[-1] else None


def fit_curve(sizes: Sequence[float], flops: Sequence[float], losses: Sequence[float]) -> Curve | None:
    """Fit a curve to models by least squares; None for fewer than three sizes.

    Example:
        >>> sizes = [1e4, 1e5, 1e6, 1e7]
        >>> curve = fit_curve(sizes, sizes, [3.0, 2.0, 2.0, 3.0])
        >>> round(curve.optimum), round(curve.loss(curve.optimum), 3)
        (316228, 1.875)
    """
    if len(set(sizes)) < 3:
        return None
    order = np.argsort(sizes)
    size, flop, loss = (np.asarray(values, dtype=float)[order] for values in (sizes, flops, losses))
    square, slope, level = np.polyfit(np.log(size), loss, 2).tolist()
    return Curve(tuple(size.tolist()), tuple(flop.tolist()), (square, slope, level))


def curves_of(points: Points, score: str, seed: int | None = None) -> dict[Group, Curve]:
    """Fit the curve of every budget and series with three sizes or more, to one seed's scores or the means."""
    groups: dict[Group, list[Mapping[str, Any]]] = {}
    for point in points:
        groups.setdefault((point["budget"], point["series"]), []).append(point)
    curves = {}
    for group, rows in groups.items():
        losses = [row[score] if seed is None else row["seeds"][seed][score] for row in rows]
        curve = fit_curve([row["parameters"] for row in rows], [row["forward"] for row in rows], losses)
        if curve is not None:
            curves[group] = curve
    return curves


def optima(points: Points, score: str) -> list[dict[str, Any]]:
    """Return the minimum of every curve, and the difference to that of the first series, of curves paired by seed."""
    seeds = sorted(set.intersection(*(set(point["seeds"]) for point in points)))
    by_seed = {seed: curves_of(points, score, seed) for seed in seeds}
    first = points[0]["series"]
    rows = []
    for (budget, series), curve in curves_of(points, score).items():
        best = curve.optimum
        row: dict[str, Any] = {"budget": budget, "series": series, "difference": None}
        if best is not None:
            row |= {"parameters": best, "forward": curve.forward(best), "loss": curve.loss(best)}
        least = {name: _least(by_seed, (budget, name)) for name in (series, first)}
        if series != first and least[series].keys() & least[first].keys():
            row["difference"] = difference(least[series], least[first])
        rows.append(row)
    return rows


def table(points: Points, score: str) -> str:
    """Return points and minima as Markdown; models are compared with those of the first series, paired by seed."""
    firsts = {
        (point["budget"], point["size"]): point["seeds"] for point in points if point["series"] == points[0]["series"]
    }
    rows = []
    for point in points:
        first = firsts[point["budget"], point["size"]]
        gap = None
        if point["seeds"] is not first:
            one = {seed: row[score] for seed, row in point["seeds"].items()}
            other = {seed: row[score] for seed, row in first.items()}
            gap = difference(one, other)
        rows.append({**point, "difference": _in_nats(gap)})
    minima = [{**row, "difference": _in_nats(row["difference"])} for row in optima(points, score)]
    return "\n\n".join(str(table_of(_COLUMNS, lines)) for lines in (rows, minima) if lines)


def verdict(points: Points, score: str) -> str:
    """Say at which size every curve is lowest, and how far below the first series' minimum."""
    sentences = []
    for row in optima(points, score):
        at = f"At {row['budget']:.3g} training FLOPs"
        if "loss" not in row:
            sentences.append(f"{at} the loss of {row['series']} has no minimum among the sizes.")
            continue
        best = f"{at} {row['series']} is best with {row['parameters']:,.0f} parameters: {row['loss']:.4f} nats a byte"
        gap = "" if row["difference"] is None else f", {_in_nats(row['difference'])} to {points[0]['series']}"
        sentences.append(f"{best}{gap}.")
    return " ".join(sentences) or "No curve was fitted: a budget needs three sizes or more."


def draw(points: Points, score: str) -> Figure:
    """Draw loss against parameters and against FLOPs: colours are series, markers budgets, stars minima of curves."""
    from matplotlib.lines import Line2D

    figure = new_figure(11.2, 4.7)
    axes = figure.subplots(1, 2, sharey=True)
    styles = looks(point["series"] for point in points)
    budgets = sorted({point["budget"] for point in points})
    markers = {budget: MARKERS[number % len(MARKERS)] for number, budget in enumerate(budgets)}
    for axis, key, title in zip(axes, ("parameters", "forward"), ("parameters", "FLOPs of a window's forward pass")):
        for (_, name), curve in curves_of(points, score).items():
            _draw_curve(axis, curve, key, styles[name])
        for point in points:
            look = {"color": styles[point["series"]]["color"], "marker": markers[point["budget"]], "markersize": 5}
            axis.errorbar(point[key], point[score], point.get(f"{score}_std") or 0.0, capsize=2, ecolor=look["color"])
            (mark,) = axis.plot(point[key], point[score], **look)
            add_hint(mark, f"{point['series']} {point['size']}, {point['budget']:.3g} FLOPs: {point[score]:.4f}")
        axis.set(xlabel=title, xscale="log")
        tidy(axis)
    axes[0].set_ylabel(f"{score.replace('_', ' ')} in nats a byte", color=INK)
    handles = {
        name: Line2D([], [], color=styles[name]["color"], linestyle=styles[name]["linestyle"] or "-")
        for name in dict.fromkeys(point["series"] for point in points)
    }
    handles |= {
        f"{budget:.3g} FLOPs": Line2D([], [], color=FAINT, marker=marker, linestyle="")
        for budget, marker in markers.items()
    }
    add_legend(figure, handles, 6)
    seeds = max(len(point["seeds"]) for point in points)
    note = f"mean and standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    figure.suptitle(f"stars: least loss of a curve · {note}", fontsize=9, color=FAINT, x=0.99, ha="right")
    return figure


def _draw_curve(axis: Axes, curve: Curve, key: str, style: Mapping[str, Any]) -> None:
    sizes = np.geomspace(curve.sizes[0], curve.sizes[-1], 60)
    colour = style["color"]

    def place(size: float) -> float:
        return size if key == "parameters" else curve.forward(size)

    line = style["linestyle"] or "-"
    axis.plot([place(size) for size in sizes], [curve.loss(size) for size in sizes], line, color=colour, linewidth=1.2)
    best = curve.optimum
    if best is not None:
        axis.plot([place(best)], [curve.loss(best)], "*", color=colour, markersize=13, markeredgecolor=INK)


def _least(curves: Mapping[int, Mapping[Group, Curve]], group: Group) -> dict[int, float]:
    """Return the minimum of a group's curve for every seed that has one."""
    minima = {}
    for seed, by_group in curves.items():
        best = by_group[group].optimum if group in by_group else None
        if best is not None:
            minima[seed] = by_group[group].loss(best)
    return minima


def _in_nats(gap: Estimate | None) -> str | None:
    if gap is None:
        return None
    return f"{gap:+.4f} ({gap.seeds} seeds)"
