"""What an isoFLOP study found: its points, the least loss of each curve, table and picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np

from mmod.analysis.statistics import difference
from mmod.analysis.style import FAINT, INK, MARKERS, PALETTE, new_figure, tidy
from mmod.studies.isoflop.fit import Curve, fit_curve
from mmod.studies.isoflop.grid import Place
from mmod.studies.paired import spread
from mmod.studies.results import Column, table_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["curves_of", "draw", "optima", "point_of", "table"]

# Budget and name of a series.
Group = tuple[float, str]
_POINTS: dict[str, Column] = {
    "budget": ("training FLOPs", ".3g"),
    "series": ("model", ""),
    "size": ("size", ""),
    "parameters": ("parameters", ","),
    "forward": ("forward FLOPs", ".3g"),
    "steps": ("steps", ""),
    "rate": ("rate", "g"),
    "loss": ("loss", "±.4f"),
    "causal_loss": ("token by token", "±.4f"),
    "agreement": ("alike", ".3f"),
    "difference": ("to the first", ""),
}
_OPTIMA: dict[str, Column] = {
    "budget": ("training FLOPs", ".3g"),
    "series": ("model", ""),
    "parameters": ("best parameters", ",.0f"),
    "forward": ("forward FLOPs", ".3g"),
    "loss": ("loss", ".4f"),
    "difference": ("to the first", ""),
}


def point_of(place: Place, rate: float, found: Mapping[int, Any]) -> dict[str, Any]:
    """Return the row of a model."""
    names = ("series", "size", "budget", "parameters", "forward", "steps", "spent")
    row = {name: getattr(place, name) for name in names}
    columns = {seed: result.columns() for seed, result in sorted(found.items())}
    row |= {"rate": rate, "seeds": columns}
    for name in ("loss", "causal_loss", "agreement"):
        values = [own[name] for own in columns.values() if name in own]
        if values:
            row |= {name: mean(values)} | ({f"{name}_std": spread(values)} if len(values) > 1 else {})
    return row


def curves_of(points: Sequence[Mapping[str, Any]], score: str, seed: int | None = None) -> dict[Group, Curve]:
    """Fit the curve of each budget and series that has three sizes or more.

    Args:
        points: The rows of models.
        score: The figure that is fitted.
        seed: The seed whose figures are taken; None takes the means.
    """
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


def optima(points: Sequence[Mapping[str, Any]], score: str) -> list[dict[str, Any]]:
    """Return where each curve is least, with the difference to the first series paired by seed.

    Differences are between the least losses of curves that are fitted to one seed each.

    Args:
        points: The rows of models.
        score: The figure that is fitted.
    """
    seeds = sorted(set.intersection(*(set(point["seeds"]) for point in points)))
    by_seed = {seed: curves_of(points, score, seed) for seed in seeds}
    first, rows = points[0]["series"], []
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


def table(points: Sequence[Mapping[str, Any]], score: str) -> str:
    """Return points and least losses as Markdown.

    A model is compared with that of the first series of its size and budget, paired by seed.

    Args:
        points: The rows of models.
        score: The figure that is compared.
    """
    firsts = {
        (point["budget"], point["size"]): point["seeds"] for point in points if point["series"] == points[0]["series"]
    }
    rows = []
    for point in points:
        first, gap = firsts[point["budget"], point["size"]], None
        if point["seeds"] is not first:
            own, other = ({seed: row[score] for seed, row in seeds.items()} for seeds in (point["seeds"], first))
            gap = difference(own, other)
        rows.append({**point, "difference": _in_nats(gap)})
    found = [{**row, "difference": _in_nats(row["difference"])} for row in optima(points, score)]
    told = "Least loss of each curve; where it has none among the sizes, the row says nothing."
    least = f"\n\n{told}\n\n{table_of(_OPTIMA, found)}" if found else ""
    return f"{table_of(_POINTS, rows)}{least}"


def draw(points: Sequence[Mapping[str, Any]], score: str) -> Figure:
    """Draw loss against parameters and against FLOPs of a forward pass, a curve for each budget and series.

    Args:
        points: The rows of models.
        score: The figure that is drawn.

    Returns:
        A figure with two panels; stars stand where curves are least.
    """
    figure = new_figure(11.2, 4.4)
    axes = figure.subplots(1, 2, sharey=True)
    for axis, key, title in zip(axes, ("parameters", "forward"), ("parameters", "FLOPs of a window's forward pass")):
        _draw_panel(axis, points, score, key)
        axis.set(xlabel=title, xscale="log")
        tidy(axis)
    axes[0].set_ylabel(f"{score.replace('_', ' ')} in nats a byte", color=INK)
    axes[1].legend(fontsize=8, frameon=False, labelcolor=INK)
    seeds = max(len(point["seeds"]) for point in points)
    note = f"mean and standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    figure.supxlabel(f"stars: least loss of a curve · {note}", fontsize=8, color=FAINT, x=0.99, ha="right")
    return figure


def _draw_panel(axis: Axes, points: Sequence[Mapping[str, Any]], score: str, key: str) -> None:
    budgets = sorted({point["budget"] for point in points})
    series = list(dict.fromkeys(point["series"] for point in points))
    curves = curves_of(points, score)
    for budget in budgets:
        colour = PALETTE[budgets.index(budget) % len(PALETTE)]
        for number, name in enumerate(series):
            rows = sorted(
                (point for point in points if (point["budget"], point["series"]) == (budget, name)),
                key=lambda row: row["parameters"],
            )
            if not rows:
                continue
            marker, line = MARKERS[number % len(MARKERS)], "-" if not number else "--"
            look: dict[str, Any] = {"color": colour, "markersize": 5, "capsize": 2, "linestyle": "none"}
            error = [row.get(f"{score}_std", 0.0) for row in rows]
            label = f"{name}, {budget:.3g} FLOPs"
            axis.errorbar(
                [row[key] for row in rows], [row[score] for row in rows], error, marker=marker, **look, label=label
            )
            curve = curves.get((budget, name))
            if curve is not None:
                _draw_curve(axis, curve, key, colour, line)


def _draw_curve(axis: Axes, curve: Curve, key: str, colour: str, line: str) -> None:
    sizes = np.geomspace(curve.sizes[0], curve.sizes[-1], 60)

    def place(size: float) -> float:
        return size if key == "parameters" else curve.forward(size)

    axis.plot([place(size) for size in sizes], [curve.loss(size) for size in sizes], line, color=colour, linewidth=1.2)
    best = curve.optimum
    if best is not None:
        axis.plot([place(best)], [curve.loss(best)], "*", color=colour, markersize=13, markeredgecolor=INK)


def _least(curves: Mapping[int, Mapping[Group, Curve]], group: Group) -> dict[int, float]:
    """Return the least loss of a group's curve by seed, of those that have one."""
    found = {}
    for seed, own in curves.items():
        best = own[group].optimum if group in own else None
        if best is not None:
            found[seed] = own[group].loss(best)
    return found


def _in_nats(gap: Any) -> str | None:
    if gap is None:
        return None
    return f"{gap:+.4f} ({gap.seeds} seeds)"
