"""Figures of kept patches and of score against cost; functions return matplotlib figures and write nothing."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmod.analysis.style import FAINT, INK, PAPER, add_hint, add_legend, looks, new_figure, place_labels, tidy
from mmod.analysis.trace import Trace, trace
from mmod.lazy import name_missing_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A veil that is neither black nor white, so that dark and bright patches alike show whether they were kept.
VEIL_COLOUR, VEIL_OPACITY = (0.60, 0.68, 0.80), 0.82
# With more points than these, a legend names the series, and points show their names where one points at them.
_NAMED = 16


@name_missing_extra()
def draw_routing_maps(
    images: Tensor,
    trace: Trace,
    prefix: int | None = None,
    grid: tuple[int, int] | None = None,
    labels: Sequence[str] | None = None,
    image_BN: Tensor | None = None,
) -> Figure:
    """Draw which patches each routed block kept: kept ones as they are, skipped ones under a veil.

    Adjoining blocks that kept the same patches, as those of one decision do, share a map.

    Args:
        images: What the traced pass saw, as it should be shown: in [0, 1], one or three channels (B, C, height, width).
        prefix: Leading tokens that are not patches; None takes the model's.
        grid: Rows and columns of patches; None takes those of the traced pass.
        image_BN: True where a token is a patch, in sequences of text and images, see `Trace.maps`.

    Raises:
        ValueError: Images outside [0, 1] or of another number of channels, or decisions or labels for another number
            of images.

    Example:
        >>> import timm, mmod
        >>> model, images = mmod.route_(timm.create_model("test_vit").eval()), torch.rand(2, 3, 160, 160)
        >>> with mmod.trace(model) as decisions:
        ...     _ = model(images)
        >>> len(draw_routing_maps(images, decisions).axes)
        8
    """
    maps = trace.maps(prefix, grid, image_BN).cpu()
    names = list(trace)
    pictures = _pictures(images)
    if maps.shape[1] != len(images):
        raise ValueError(f"the trace holds decisions for {maps.shape[1]} images, got {len(images)} images")
    if labels is not None and len(labels) != len(images):
        raise ValueError(f"{len(images)} images need as many labels, got {len(labels)}")
    pairs = zip(itertools.pairwise(names), itertools.pairwise(maps))
    firsts = [0, *(i for i, (near, both) in enumerate(pairs, 1) if not (_adjoin(*near) and torch.equal(*both)))]
    titles = ["image"]
    for first, end in zip(firsts, [*firsts[1:], len(maps)]):
        titles.append(f"{_short(names[first:end])}\n{maps[first].float().mean():.0%} kept")
    rows, columns = len(pictures), len(titles)
    side = 1.35
    shape = pictures.shape[1:3]
    figure = new_figure(side * columns, side * rows * shape[0] / shape[1] + 0.45)
    axes = figure.subplots(rows, columns, squeeze=False)
    for row, picture in enumerate(pictures):
        for column, content in enumerate([picture, *(_veiled(picture, maps[first][row]) for first in firsts)]):
            axis = axes[row, column]
            axis.imshow(content.numpy(), interpolation="nearest", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
            if row == 0:
                axis.set_title(titles[column], fontsize=9, color=INK)
        if labels is not None:
            axes[row, 0].set_ylabel(labels[row], fontsize=9, color=INK)
    return figure


def draw_sample_maps(model: nn.Module, images: Tensor) -> Figure:
    """Draw which patches the routed blocks of an image model keep of normalised images (B, C, height, width)."""
    with torch.inference_mode(), trace(model) as decisions:
        model(images.to(next(model.parameters()).device))
    return draw_routing_maps(in_range(images), decisions)


def in_range(images: Tensor) -> Tensor:
    """Return images with the lowest value at 0 and the highest at 1."""
    low, high = images.amin(), images.amax()
    return (images - low) / (high - low)


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
    first = names[0].rpartition(".")[2]
    last = names[-1].rpartition(".")[2]
    if len(names) > 1:
        return f"blocks {first} to {last}"
    return f"block {first}" if "." in names[0] else names[0]


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
