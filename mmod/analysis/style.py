"""The style of figures: one colour and marker for each name, labels without overlaps, and SVG for pages and papers."""

from __future__ import annotations

import functools
import io
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict
from zlib import crc32

import numpy as np

from mmod.io.files import check_free, make_folder, replacing, write_atomically
from mmod.lazy import name_missing_extra

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

INK = "#1c1e21"
FAINT = "#6b727b"
LINE = "#d5d9de"
PAPER = "#ffffff"
PALETTE = ("#2080c4", "#d55e00", "#00876a", "#b8559b", "#a87400", "#7a68c8", "#dd3355", "#a5603f", "#6f8a1f")
"""Colours with a contrast of 3 and more on white and on the dark page, that differ in lightness and hue."""
MARKERS = ("o", "s", "D", "v", "P", "X", "p", "h", "8", "H")
# Series of most studies; any other name asks for the colour of its checksum.
_FIXED = {
    "a-mod": 0,
    "attention": 0,
    "mod": 1,
    "linear": 1,
    "distilled": 2,
    "p-mod": 3,
    "merge": 3,
    "merge-late": 4,
    "pixelprune": 1,
    "gamma-mod": 4,
    "exit": 4,
    "prune": 5,
    "experts": 6,
    "resolution": 7,
    "narrow": 8,
    "gradual": 2,
    "tome": 3,
    "smaller-image": 7,
    "shallow": 6,
}
_CONTROLS = {"random": "^", "stride": "<", "norm": ">"}
# Pixels from which on a label needs a line to its point.
_NEAR = 16
# Prefix of the id of an artist with a hint, see `add_hint`.
_HINT = "hint "
# Colours of inline figures are variables of the page, which has a light and a dark form.
_THEME = {INK: "var(--ink)", FAINT: "var(--faint)", LINE: "var(--line)", PAPER: "var(--paper)"}


Line = Literal["-", "--", ":", ""]
"""How matplotlib draws a line."""


class Style(TypedDict, total=False):
    """Keywords of matplotlib for a line with markers; marker 7 is a triangle whose tip points down, at the point."""

    color: str
    marker: str | Literal[7]
    markersize: float
    linestyle: Line
    linewidth: float
    alpha: float


def looks(names: Iterable[str]) -> dict[str, Style]:
    """Return the style of each series.

    Colours and markers follow from names, so a series has one look in all figures. Where another series of the figure
    has its colour, it has the next free one, while there is one. Series of most studies choose first. The dense model
    is a star in ink; controls, such as "random", are grey and dashed.
    """
    styles: dict[str, Style] = {}
    taken: set[tuple[str, str]] = set()
    free = list(range(len(PALETTE)))
    for name in sorted(names, key=lambda name: (name not in _FIXED, name)):
        control = _CONTROLS.get(name.partition(",")[0].partition("-")[0])
        # A checksum, because Python's own hash differs from process to process.
        number = _FIXED.get(name, crc32(name.encode()))
        colour_number = number % len(PALETTE)
        if free and not control and name != "dense":
            if colour_number not in free:
                colour_number = free[0]
            free.remove(colour_number)
        colour = PALETTE[colour_number]
        marker = MARKERS[number % len(MARKERS)]
        line: Line = "-"
        size = 7
        if control:
            colour = FAINT
            marker = control
            line = "--"
        if name == "dense":
            colour = INK
            marker = "*"
            line = ""
            # A star looks smaller than other markers of its size.
            size = 12
        # The next free marker: two series of a figure never look alike.
        if (colour, marker) in taken:
            marker = next((other for other in MARKERS if (colour, other) not in taken), marker)
        taken.add((colour, marker))
        styles[name] = {"color": colour, "marker": marker, "markersize": size, "linestyle": line, "linewidth": 1.5}
    return styles


@name_missing_extra()
def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure with a constrained layout, which a notebook shows as a picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = _figure_class()(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


@functools.cache
def _figure_class() -> type[Figure]:
    # Figures of their own rather than pyplot's, which would keep every figure alive and choose a window system.
    # Notebooks draw those of pyplot alone, unless a figure says how.
    from matplotlib.figure import Figure

    class ShownFigure(Figure):
        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png", dpi=100)
            return file.getvalue()

    return ShownFigure


def tidy(axis: Axes, grid: Literal["x", "y", "both"] = "y") -> None:
    """Give axes the colours of all figures, with thin lines at ticks."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(FAINT)
    axis.tick_params(colors=FAINT, labelcolor=INK, length=3, labelsize=9)
    axis.grid(axis=grid, color=LINE, linewidth=0.7)
    axis.set_axisbelow(True)
    for label in (axis.xaxis.label, axis.yaxis.label, axis.title):
        label.set(color=INK, fontsize=10)


def add_legend(figure: Figure, handles: Mapping[str, Any], columns: int) -> None:
    """Name colours and markers below the panels of a figure."""
    figure.legend(
        [*handles.values()],
        [*handles],
        loc="outside lower center",
        ncols=min(columns, len(handles)),
        fontsize=9,
        frameon=False,
        labelcolor=INK,
    )


def add_hint(artist: Artist, text: str) -> None:
    """Give an artist a text that a browser shows on hover."""
    artist.set_gid(f"{_HINT}{text}")


def place_labels(axis: Axes, texts: Sequence[Text], marks: Sequence[Bbox]) -> None:
    """Move each label to where none overlaps another, a mark or the border; a label without room is removed."""
    taken = list(marks)
    for text in texts:
        point = text.get_position()
        x, y = axis.transData.transform(point)
        box = _free_box(axis, text, (x, y), taken)
        if box is None:
            text.remove()
            continue
        taken.append(box)
        # Far from its point, a label needs a line to it.
        if not box.padded(_NEAR).contains(x, y):
            # A line of the mark's colour would be read as its interval.
            lead = {"arrowstyle": "-", "color": FAINT, "linewidth": 0.6, "linestyle": ":", "shrinkA": 0, "shrinkB": 4}
            end = axis.transData.inverted().transform(_nearest(box, x, y))
            axis.annotate("", point, tuple(end), arrowprops=lead, zorder=1)


def _free_box(axis: Axes, text: Text, point: tuple[float, float], taken: Sequence[Bbox]) -> Bbox | None:
    """Place a text near its point where it overlaps nothing, and return its box; None without room."""
    room = axis.get_window_extent()
    size = text.get_window_extent()
    # From near to far, and at each distance to the right and above first.
    sides = itertools.product((1, -1, 0), (0, 1, -1))
    for far, (x, y) in itertools.product((9, 18, 30, 44, 64, 90), sides):
        across = point[0] + x * (size.width / 2 + far)
        upwards = point[1] + y * (size.height / 2 + far)
        position = axis.transData.inverted().transform((across, upwards))
        text.set_position(tuple(position))
        box = text.get_window_extent()
        fits_across = room.x0 <= box.x0 and box.x1 <= room.x1
        fits_upwards = room.y0 <= box.y0 and box.y1 <= room.y1
        if not fits_across or not fits_upwards:
            continue
        if not any(box.overlaps(other) or _leads_through(other, box, point) for other in taken):
            return box
    return None


def _leads_through(other: Bbox, box: Bbox, point: tuple[float, float]) -> bool:
    """Return whether the line from a label's box to its point passes another box, as if it led there."""
    if box.padded(_NEAR).contains(*point) or other.contains(*point):
        return False
    x, y = _nearest(box, *point)
    length = np.hypot(x - point[0], y - point[1])
    # Every few pixels: a box that is passed is larger.
    line = np.linspace((x, y), point, 2 + int(length // 4))
    return any(other.contains(*place) for place in line)


def _nearest(box: Bbox, x: float, y: float) -> tuple[float, float]:
    """Return the place in a box that is nearest to a point."""
    return min(max(x, box.x0), box.x1), min(max(y, box.y0), box.y1)


def save_figure(figure: Figure, path: str | Path, overwrite: bool = True, **options: Any) -> None:
    """Write a figure completely or not at all, in the format of the path's suffix; see `mmod.io.files.replacing`."""
    check_free(path, overwrite)
    with replacing(path) as partial:
        figure.savefig(partial, format=Path(path).suffix[1:] or None, **options)


@name_missing_extra()
def svg_of(figure: Figure) -> str:
    """Return a figure as SVG: texts stay texts, and hints are titles that browsers show."""
    import matplotlib

    file = io.StringIO()
    # The same figure gives the same file: no dates, and identifiers by a fixed salt.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "mmod"}):
        figure.savefig(file, format="svg", dpi=120, transparent=True, metadata={"Date": None})
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", file.getvalue(), flags=re.DOTALL)
    # A hint may have several lines.
    return re.sub(rf"""<g id=(["']){_HINT}(.*?)\1>""", r"<g><title>\2</title>", svg, flags=re.DOTALL)


def save_picture(folder: str | Path, name: str, figure: Figure) -> None:
    """Write a figure as PNG and, for pages, as SVG."""
    folder = make_folder(folder)
    save_figure(figure, folder / f"{name}.png", dpi=150, bbox_inches="tight")
    write_atomically(folder / f"{name}.svg", svg_of(figure))


def inline_svg(svg: str, name: str, text: str) -> str:
    """Return SVG as a part of a page, in the page's colours and with ids that no other figure has."""
    slug = re.sub(r"[^\w-]+", "-", name)
    svg = svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{escape(text)}"', 1)
    # On a narrow screen a wide figure scrolls before its labels are too small to read.
    svg = re.sub(
        r' width="([\d.]+)pt"',
        lambda width: f'{width[0]} style="min-width: {0.75 * float(width[1]):.0f}pt"',
        svg,
        count=1,
    )
    # A colour stands in `style` attributes, always behind a colon and a space.
    for colour, variable in _THEME.items():
        svg = svg.replace(f": {colour}", f": {variable}")
    return re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{slug}-", svg)
