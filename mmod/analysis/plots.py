"""Plots of kept patches and of accuracy against cost; functions return matplotlib figures and write nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmod.analysis.trace import Trace
from mmod.extras import name_missing_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT = "#222222", "#8a8f98"
# A veil that is neither black nor white, so that dark and bright patches alike show whether they were kept.
VEIL_COLOUR, VEIL_OPACITY = (0.60, 0.68, 0.80), 0.82
# Okabe and Ito's palette, which stays apart for all common kinds of colour vision, and a part of Tol's muted one.
COLOURS = {"attention": "#0072B2", "linear": "#D55E00"}
MORE_COLOURS = ("#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#999933", "#332288")
MARKERS = {"attention": "o", "linear": "s"}
# One fewer than colours, so that no two of many series look alike.
MORE_MARKERS = ("D", "v", "P", "X", "p", "h")
# More series than these are named in a legend: beside the points, names would hide them.
NAMED_IN_PLACE = 7
CONTROLS = {"random": "^", "stride": "<", "norm": ">", "shallow": "d"}
ROW_KEYS = ("name", "router", "capacity", "gflops", "latency_ms", "accuracy_mean", "accuracy_std", "seeds")


@name_missing_extra()
def draw_routing_maps(
    images: Tensor,
    trace: Trace,
    prefix: int,
    grid: tuple[int, int],
    labels: Sequence[str] | None = None,
    image_BN: Tensor | None = None,
) -> Figure:
    """Draw which patches each routed block kept: kept ones as they are, skipped ones under a veil.

    Adjoining blocks that kept the same patches, as those of one decision do, share a map.

    Args:
        images: What the traced pass saw, as it should be shown: in [0, 1], one or three channels (B, C, height, width).
        trace: The decisions for these images.
        prefix: Leading tokens that are not patches.
        grid: Rows and columns of patches.
        labels: A text for each image, or None.
        image_BN: True where a token is a patch, in sequences of text and images, see `Trace.maps`.

    Returns:
        A figure with a row for each image: the image, then one map for each routed block or run of such blocks.

    Raises:
        ValueError: Images outside [0, 1] or of another number of channels, or decisions or labels for another number
            of images.

    Example:
        >>> import timm, mmod
        >>> model, images = mmod.route_(timm.create_model("test_vit").eval()), torch.rand(2, 3, 160, 160)
        >>> with mmod.trace(model) as decisions:
        ...     _ = model(images)
        >>> len(draw_routing_maps(images, decisions, prefix=1, grid=(10, 10)).axes)
        8
    """
    # A figure of its own rather than pyplot's, which would keep every figure alive and choose a window system.
    from matplotlib.figure import Figure

    maps = trace.maps(prefix, grid, image_BN).cpu()
    names = list(trace)
    pairs = zip(names, names[1:], maps, maps[1:])
    firsts = [0, *(i for i, (*near, a, b) in enumerate(pairs, 1) if not (_adjoin(*near) and torch.equal(a, b)))]
    kept = maps[firsts]
    pictures = _pictures(images)
    if kept.shape[1] != len(pictures):
        raise ValueError(f"the trace holds decisions for {kept.shape[1]} images, got {len(pictures)} images")
    if labels is not None and len(labels) != len(pictures):
        raise ValueError(f"{len(pictures)} images need as many labels, got {len(labels)}")
    rows, columns = len(pictures), 1 + len(kept)
    height, width = pictures.shape[1:3]
    side = 1.35
    figure = Figure(figsize=(side * columns, side * rows * height / width + 0.45))
    axes = figure.subplots(rows, columns, squeeze=False, gridspec_kw={"wspace": 0.06, "hspace": 0.06})
    shares = list(trace.kept_shares().values()) if image_BN is None else maps.float().mean(dim=(1, 2, 3)).tolist()
    titles = ["image"]
    for first, end in zip(firsts, [*firsts[1:], len(maps)]):
        titles.append(f"{_short(names[first:end])}\n{shares[first]:.0%} kept")
    for row, picture in enumerate(pictures):
        shown = [picture, *(_veiled(picture, block[row]) for block in kept)]
        for column, content in enumerate(shown):
            axis = axes[row, column]
            axis.imshow(content.numpy(), interpolation="nearest", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
            if row == 0:
                axis.set_title(titles[column], fontsize=8, color=INK)
        if labels is not None:
            axes[row, 0].set_ylabel(labels[row], fontsize=8, color=INK)
    return figure


def _pictures(images: Tensor) -> Tensor:
    """Return images as (B, height, width, 3) on the CPU."""
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(f"images must be (B, 1 or 3, height, width), got {tuple(images.shape)}")
    images = images.detach().float().cpu()
    if images.min() < -1e-3 or images.max() > 1 + 1e-3:
        raise ValueError(
            f"images must lie in [0, 1] to be shown, got {images.min():.2f} to {images.max():.2f}: "
            "undo the normalisation"
        )
    return images.clamp(0, 1).expand(-1, 3, -1, -1).permute(0, 2, 3, 1)


def _veiled(picture: Tensor, kept: Tensor) -> Tensor:
    """Veil the patches of a picture (height, width, 3) that are not kept (rows, columns)."""
    mask = F.interpolate(kept[None, None].float(), size=picture.shape[:2], mode="nearest-exact")[0, 0, :, :, None]
    opacity = VEIL_OPACITY * (1 - mask)
    return picture * (1 - opacity) + torch.tensor(VEIL_COLOUR) * opacity


def _adjoin(name: str, following: str) -> bool:
    """Return whether one block comes right after another."""
    (stem, _, index), (other, _, next_index) = name.rpartition("."), following.rpartition(".")
    return stem == other and index.isdecimal() and next_index == str(int(index) + 1)


def _short(names: Sequence[str]) -> str:
    first, last = (name.rpartition(".")[2] for name in (names[0], names[-1]))
    if len(names) > 1:
        return f"blocks {first} to {last}"
    return f"block {first}" if "." in names[0] else names[0]


@name_missing_extra()
def draw_tradeoff(rows: Sequence[Mapping[str, Any]], measure: str = "top-1 accuracy") -> Figure:
    """Draw accuracy against FLOPs and, where it was measured, against latency.

    Rows of one router are joined into a series over its capacities, named where it ends or, of many, in a legend.
    Controls are grey; the dense model is a star with a dotted line, so that what is lost against it can be read off.

    Args:
        rows: One mapping for each model with "name", "router" ("dense", "shallow" for a dense model of fewer blocks,
            or a router), "capacity", "gflops", "latency_ms" (may be None), "accuracy_mean" and "accuracy_std" in
            percent, and "seeds", the number of runs behind them; with one seed no error bar is drawn.
        measure: What the percentages are.

    Returns:
        A figure with one or two panels.

    Raises:
        ValueError: No rows, or a key is missing.

    Example:
        >>> row = dict(name="dense", router="dense", capacity=1.0, gflops=2.5, latency_ms=None)
        >>> len(draw_tradeoff([{**row, "accuracy_mean": 91.0, "accuracy_std": 0.2, "seeds": 3}]).axes)
        1
    """
    # A figure of its own rather than pyplot's, which would keep every figure alive and choose a window system.
    from matplotlib.figure import Figure

    if not rows:
        raise ValueError("a trade-off needs at least one row")
    for row in rows:
        missing = [key for key in ROW_KEYS if key not in row]
        if missing:
            raise ValueError(f"row {row.get('name', row)!r} lacks {', '.join(missing)}")
    panels = [("gflops", "GFLOPs per image")]
    if all(row["latency_ms"] is not None for row in rows):
        panels.append(("latency_ms", "latency in ms"))
    figure = Figure(figsize=(5.6 * len(panels), 4.2), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    for axis, (key, title) in zip(axes[0], panels):
        _draw_panel(axis, rows, key)
        axis.set_xlabel(title, color=INK)
    axes[0, 0].set_ylabel(f"{measure} in %", color=INK)
    if len({row["router"] for row in rows}) > NAMED_IN_PLACE:
        lines, names = axes[0, 0].get_legend_handles_labels()
        figure.legend(lines, names, loc="outside upper center", ncols=5, fontsize=9, frameon=False, labelcolor=INK)
    seeds = max(row["seeds"] for row in rows)
    note = f"mean and standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    figure.supxlabel(f"numbers at points: capacity · {note}", fontsize=8, color=FAINT, x=0.99, ha="right")
    return figure


def _draw_panel(axis: Axes, rows: Sequence[Mapping[str, Any]], key: str) -> None:
    series: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row[key]):
        series.setdefault(row["router"], []).append(row)
    # The series on top carries the capacities; they are the same for the others, right below.
    routed = [name for name in series if name not in ("dense", "shallow")]
    numbered = max(routed, key=lambda name: series[name][0]["accuracy_mean"], default=None)
    styles = _styles(series)
    labels = []
    for name, points in series.items():
        x, y = [row[key] for row in points], [row["accuracy_mean"] for row in points]
        error = [row["accuracy_std"] for row in points] if max(row["seeds"] for row in points) > 1 else None
        style = styles[name]
        axis.errorbar(x, y, yerr=error, capsize=2.5, elinewidth=1, linewidth=1.6, label=name, **style)
        if name == "dense":
            axis.axhline(y[-1], color=INK, linewidth=0.8, linestyle=":", zorder=0)
        labels.append((x[0], y[0], name, style["color"]))
        if name == numbered:
            for row in (point for point in points if point["capacity"] is not None):
                axis.annotate(
                    f"{row['capacity']:g}",
                    (row[key], row["accuracy_mean"] + (row["accuracy_std"] if error else 0)),
                    xytext=(0, 6),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8,
                    color=FAINT,
                )
    axis.margins(x=0.08, y=0.12)
    if len(series) <= NAMED_IN_PLACE:
        low, high = axis.get_xlim()
        axis.set_xlim(low - 0.22 * (high - low), high + 0.03 * (high - low))
        _label(axis, labels)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(FAINT)
    axis.tick_params(colors=INK, labelcolor=INK, length=3)
    axis.grid(axis="y", color="#e8eaed", linewidth=0.8)
    axis.set_axisbelow(True)


def _styles(names: Sequence[str] | Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    styles: dict[str, dict[str, Any]] = {}
    more = iter(zip(MORE_COLOURS * 8, MORE_MARKERS * 8))
    for name in sorted(names):
        if name == "dense":
            styles[name] = {"color": INK, "marker": "*", "markersize": 13, "linestyle": "none"}
        elif name in CONTROLS:
            face = "white" if name == "shallow" else FAINT
            styles[name] = {"color": FAINT, "marker": CONTROLS[name], "linestyle": "--", "markerfacecolor": face}
        elif name in COLOURS:
            styles[name] = {"color": COLOURS[name], "marker": MARKERS[name], "linestyle": "-"}
        else:
            colour, marker = next(more)
            styles[name] = {"color": colour, "marker": marker, "linestyle": "-"}
        styles[name] = {"markersize": 6, **styles[name]}
    return styles


def _label(axis: Axes, labels: list[tuple[float, float, str, str]]) -> None:
    """Write each series' name left of its first point, moved apart where names would touch."""
    low, high = axis.get_ylim()
    gap = 0.055 * (high - low)
    height = -float("inf")
    for x, y, name, colour in sorted(labels, key=lambda label: label[1]):
        if name == "dense":
            place, align, anchor = (0, 9), "center", "bottom"
        else:
            place, align, anchor = (-8, 0), "right", "center"
            y = height = max(y, height + gap)
        look: dict[str, Any] = {"color": colour, "fontsize": 9, "fontweight": "bold", "annotation_clip": False}
        axis.annotate(name, (x, y), xytext=place, textcoords="offset points", ha=align, va=anchor, **look)
