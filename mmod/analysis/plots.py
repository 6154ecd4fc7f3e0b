"""Figures of kept patches and of score against cost; functions return matplotlib figures and write nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmod.analysis.style import FAINT, INK, PAPER, add_hint, add_legend, looks, new_figure, place_labels, tidy
from mmod.analysis.trace import trace
from mmod.lazy import name_missing_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# With more points than these, a legend names the series, and points show their names where one points at them.
_NAMED = 16


def draw_sample_maps(model: nn.Module, images: Tensor) -> Figure:
    """Draw which patches the routed blocks of an image model keep of images (B, C, height, width)."""
    with torch.inference_mode(), trace(model) as decisions:
        model(images.to(next(model.parameters()).device))
    return decisions.plot(images)


@name_missing_extra()
def draw_tradeoff(
    rows: Sequence[Mapping[str, Any]],
    score: str = "top1",
    measure: str = "top-1 accuracy",
    costs: Mapping[str, str] | None = None,
) -> Figure:
    """Draw the score of models against each cost that was measured, a panel for each cost.

    Models of one series are joined. Up to 16 models are named at their points; more are named where one points at
    them in a browser. Controls are grey; the dense model is a star with a dotted line at its score.

    Args:
        rows: One mapping for each model with "name", "series" ("dense", "shallow" for a dense model of fewer blocks,
            or a name of its own), the score in percent, and costs. `SCORE_std`, where there is one, is its standard
            deviation over "seeds" runs; "note" is added to what a browser shows of the point.
        score: Key of the score, and `measure` its name.
        costs: Key of each cost to the title of its axis; None for FLOPs alone. One that a row lacks is not drawn.

    Raises:
        ValueError: No rows, a key is missing, or no row has a cost.

    Example:
        >>> rows = [dict(name="dense", series="dense", gflops=2.5, top1=91.0)]
        >>> draw_tradeoff(rows).axes[0].get_xlabel()
        'GFLOPs per image'
    """
    if not rows:
        raise ValueError("a trade-off needs at least one row")
    for row in rows:
        missing = [key for key in ("name", "series", score) if key not in row]
        if missing:
            raise ValueError(f"row {row.get('name', row)!r} lacks {', '.join(missing)}")
    titles = {"gflops": "GFLOPs per image"} if costs is None else costs
    panels = {key: title for key, title in titles.items() if all(row.get(key) is not None for row in rows)}
    if not panels:
        raise ValueError(f"no cost that all rows have: {', '.join(titles)}")
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    styles = looks({row["series"] for row in rows})
    figure = new_figure(5.0 * columns + 0.6, 3.7 * lines + 0.25 * -(-len(styles) // (3 * columns)))
    axes = figure.subplots(lines, columns, sharey=True, squeeze=False).flatten()
    for axis, (key, title) in zip(axes, panels.items()):
        _draw_panel(axis, rows, key, score, styles)
        axis.set_xlabel(title)
        tidy(axis)
    for axis in axes[len(panels) :]:
        axis.remove()
    for axis in axes[::columns]:
        axis.set_ylabel(f"{measure} in %", color=INK)
    handles = dict(zip(*reversed(axes[0].get_legend_handles_labels())))
    shown = {name: handles[name] for name in dict.fromkeys(row["series"] for row in rows)}
    add_legend(figure, shown, 3 * columns)
    seeds = max(int(row.get("seeds") or 1) for row in rows)
    note = f"bars: standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    figure.suptitle(note, fontsize=9, color=FAINT, x=0.99, ha="right")
    if len(rows) <= _NAMED:
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        for axis, key in zip(axes, panels):
            _name_points(axis, rows, key, score, styles)
    return figure


def _draw_panel(
    axis: Axes, rows: Sequence[Mapping[str, Any]], key: str, score: str, styles: Mapping[str, dict[str, Any]]
) -> None:
    for name, style in styles.items():
        points = sorted((row for row in rows if row["series"] == name), key=lambda row: row[key])
        x, y = [row[key] for row in points], [row[score] for row in points]
        error = [row.get(f"{score}_std") or 0.0 for row in points]
        axis.errorbar(x, y, yerr=error, elinewidth=1, **{**style, "marker": ""})
        for row in points:
            (mark,) = axis.plot(row[key], row[score], **style, label=name if row is points[0] else None)
            std = f" ± {row[f'{score}_std']:.2f}" if row.get(f"{score}_std") else ""
            note = f"\n{row['note']}" if row.get("note") else ""
            add_hint(mark, f"{row['name']}: {row[score]:.2f}{std} at {row[key]:.4g}{note}")
        if name == "dense":
            axis.axhline(y[-1], color=FAINT, linewidth=0.8, linestyle=":", zorder=0)
    axis.margins(x=0.2, y=0.15)


def _name_points(
    axis: Axes, rows: Sequence[Mapping[str, Any]], key: str, score: str, styles: Mapping[str, dict[str, Any]]
) -> None:
    from matplotlib.transforms import Bbox

    texts = []
    marks = []
    for name in sorted(styles, key=lambda name: name != "dense"):
        points = sorted((row for row in rows if row["series"] == name), key=lambda row: row[key])
        places = axis.transData.transform([(row[key], row[score]) for row in points])
        half = styles[name]["markersize"] / 144 * axis.figure.dpi
        for row, (x, y) in zip(points, places):
            look = {"color": styles[name]["color"], "fontsize": 9, "fontweight": "bold"}
            look["bbox"] = {"facecolor": PAPER, "edgecolor": "none", "alpha": 0.8, "pad": 0.5}
            texts.append(axis.text(row[key], row[score], row["name"], ha="center", va="center", **look))
            bar = axis.transData.transform((row[key], row[score] + (row.get(f"{score}_std") or 0.0)))[1] - y
            marks += [Bbox.from_extents(x - half, y - half, x + half, y + half)]
            marks += [Bbox.from_extents(x - 1, y - bar, x + 1, y + bar)]
    place_labels(axis, texts, marks)
