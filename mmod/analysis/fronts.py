"""Figures of scores against costs, with the Pareto front as a line; functions write nothing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from mmod.analysis.statistics import pareto_front
from mmod.analysis.style import FAINT, INK, PAPER, Style, add_hint, add_legend, looks, new_figure, place_labels, tidy
from mmod.lazy import name_missing_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox
    from typing_extensions import Unpack

# Width in inches of all panels of a figure together, which a page shows without shrinking them, and of one panel.
_WIDTH = 10.4
_PANEL = 4.8
_FRONT = "Pareto front"
# A triangle of matplotlib with its tip, which points down, at the point.
_ARROW: Literal[7] = 7


class Mark(NamedTuple):
    """A model in a panel.

    Attributes:
        low: Lower end of the bar at its score, `high` the upper one.
        note: What a browser shows of it besides name and figures.
        is_named: It gets its name and its bar off the front too.
        may_lead: It may be on the front. Controls may not, nor may models that were evaluated on few samples alone.
    """

    name: str
    series: str
    cost: float
    score: float
    low: float
    high: float
    note: str = ""
    is_named: bool = False
    may_lead: bool = True


def front_of(marks: Sequence[Mark], faster: bool = False) -> list[Mark]:
    """Return the marks of the Pareto front, the cheapest first; none that costs more than the dense model.

    Args:
        faster: The cost is a speed, of which more is better.

    Example:
        >>> costs = {"a": (1.0, 5), "b": (2.0, 4), "c": (0.99, 3)}
        >>> marks = [Mark(name, name, cost, score, score, score) for name, (cost, score) in costs.items()]
        >>> [mark.name for mark in front_of(marks)], [mark.name for mark in front_of(marks, faster=True)]
        (['c', 'a'], ['b', 'a'])
    """
    # By number: marks may share a name.
    costs = {}
    for number, mark in enumerate(marks):
        if mark.may_lead:
            costs[number] = 1 / mark.cost if faster else mark.cost
    dense_costs = [cost for number, cost in costs.items() if marks[number].series == "dense"]
    most = max(dense_costs, default=math.inf)
    costs = {number: cost for number, cost in costs.items() if cost <= most}
    front = pareto_front(costs, {number: marks[number].score for number in costs})
    return [marks[number] for number in sorted(front, key=costs.__getitem__)]


def floor_of(marks: Sequence[Mark], fronts: Iterable[Sequence[Mark]]) -> float:
    """Return the lowest score that a picture shows at its place; outliers below it would flatten all others.

    An outlier lies more than 1.5 interquartile ranges below the first quartile, and is on no front.

    Args:
        fronts: Those of the same models at several costs.

    Source: Tukey, Exploratory Data Analysis (1977): the inner fence.

    Example:
        >>> marks = [Mark(str(score), "a", score, score, score, score) for score in (90, 89, 88, 86, 36)]
        >>> floor_of(marks, [front_of(marks, faster=True)])
        86
    """
    scores = [mark.score for mark in marks]
    first, third = np.percentile(scores, (25, 75))
    # Tukey's fence: what lies lower is an outlier.
    fence = first - 1.5 * (third - first)
    on_fronts = (mark.score for mark in itertools.chain.from_iterable(fronts))
    return min(*on_fronts, *(score for score in scores if score >= fence))


class Fronts:
    """The same models in panels, each at another cost: drawn in their axes when it is made, and then named.

    Fronts are lines with bars, and lost models arrows at the lower edge; see `floor_of`.

    Attributes:
        lost: The models below the axis with their scores, the best first; empty where there are none.
    """

    def __init__(self, axes: Sequence[Axes], panels: Sequence[Sequence[Mark]], *, faster: bool = False) -> None:
        self.axes = axes
        self.panels = panels
        self.styles = looks({mark.series for mark in panels[0]})
        self.fronts = [front_of(marks, faster) for marks in panels]
        marks = panels[0]
        barred = list(itertools.chain.from_iterable(self.fronts))
        barred += [mark for mark in marks if mark.is_named]
        bottom = min(floor_of(marks, self.fronts), *(mark.low for mark in barred))
        top = max(mark.score for mark in marks)
        top = max(top, *(mark.high for mark in barred))
        margin = 0.08 * (top - bottom) or 1.0
        # Bars may stretch the axis down to marks that were lost without them, of which the frame cuts none.
        for score in sorted((mark.score for mark in marks), reverse=True):
            if score >= bottom - margin:
                bottom = min(bottom, score)
        self.floor = bottom
        lost = [mark for mark in marks if mark.score < self.floor]
        lost.sort(key=lambda mark: -mark.score)
        self.lost = ", ".join(f"{mark.name} {mark.score:.1f}" for mark in lost)
        for axis, marks, front in zip(axes, panels, self.fronts):
            self._draw(axis, marks, front, bottom - margin)
            axis.margins(x=0.12)
            # One scale in all panels, as what is below it must be in each.
            axis.set_ylim(bottom - margin, top + 2 * margin)

    def _draw(self, axis: Axes, marks: Sequence[Mark], front: Sequence[Mark], edge: float) -> None:
        shown = [mark for mark in marks if mark.score >= self.floor]
        _draw_line(axis, front, color=INK, linewidth=2.2, alpha=0.35)
        for name, style in self.styles.items():
            points = [mark for mark in shown if mark.series == name]
            points.sort(key=lambda mark: mark.cost)
            line: Style = {**style, "marker": "", "linewidth": 0.8, "alpha": 0.6}
            _draw_line(axis, points, **line)
        for mark in marks:
            style = {**self.styles[mark.series], "linestyle": ""}
            if mark in front or mark.is_named:
                axis.vlines(mark.cost, mark.low, mark.high, color=style["color"], linewidth=0.8)
            elif mark in shown and mark.series != "dense":
                style |= {"markersize": 0.75 * style["markersize"], "alpha": 0.7}
            if mark not in shown:
                style |= {"marker": _ARROW}
            height = mark.score if mark in shown else edge
            (drawn,) = axis.plot(mark.cost, height, **style)
            hint = f"{mark.name}: {mark.score:.2f} at {mark.cost:.4g}"
            if mark.note:
                hint += f"\n{mark.note}"
            add_hint(drawn, hint)

    def name(self, figure: Figure, note: str) -> None:
        """Name the front of each panel, and all series in a legend below them, as wide as the figure.

        Args:
            note: Stands above the panels, with the models below the axis.
        """
        from matplotlib.lines import Line2D

        if self.lost:
            note += f"; below the axis: {self.lost}"
        figure.suptitle(note, fontsize=9, color=FAINT, x=0.99, ha="right")
        handles = {_FRONT: Line2D([], [], color=INK, linewidth=2.2, alpha=0.35)}
        shown = {mark.series for mark in self.panels[0] if mark.score >= self.floor}
        for series in dict.fromkeys(mark.series for mark in self.panels[0]):
            style = self.styles[series]
            if series not in shown:
                # The only marks that it has are arrows.
                style = {**style, "marker": _ARROW, "linestyle": ""}
            handles[series] = Line2D([], [], **style)
        columns = max(1, math.floor(figure.get_figwidth() / 1.5))
        add_legend(figure, handles, columns)
        figure.draw_without_rendering()
        # Laid out once, then frozen: names are placed by pixels, and must not move the panels.
        figure.set_layout_engine("none")
        for axis, marks, front in zip(self.axes, self.panels, self.fronts):
            self._name(axis, marks, front)

    def _name(self, axis: Axes, marks: Sequence[Mark], front: Sequence[Mark]) -> None:
        """Name the dense model, those on the front and, with their scores, those below the axis next to their marks."""
        from matplotlib.transforms import Bbox

        bottom = axis.get_ylim()[0]
        points = axis.transData.transform([(mark.cost, max(bottom, mark.score)) for mark in marks])
        boxes: list[Bbox] = []
        for mark, (x, y) in zip(marks, points):
            half = self.styles[mark.series]["markersize"] / 144 * axis.figure.dpi
            boxes.append(Bbox.from_extents(x - half, y - half, x + half, y + half))
        line = axis.transData.transform([(mark.cost, mark.score) for mark in front])
        for start, end in itertools.pairwise(line):
            # Small boxes along the front, so that labels keep off the line as well.
            length = np.hypot(*(end - start))
            for share in np.linspace(0, 1, 2 + int(length // 8)):
                x, y = start + share * (end - start)
                boxes.append(Bbox.from_extents(x - 1, y - 1, x + 1, y + 1))
        texts = []
        lost = [mark for mark in marks if mark.score < self.floor]
        named = [mark for mark in marks if mark.series == "dense" or mark.is_named]
        further = [mark for mark in named if mark not in front and mark not in lost]
        for mark in marks:
            if mark in front or mark.is_named:
                bar = [(mark.cost, mark.low), (mark.cost, mark.high)]
                (left, below), (right, above) = axis.transData.transform(bar)
                boxes.append(Bbox.from_extents(left - 1, below, right + 1, above))
        look = {"fontsize": 9, "fontweight": "bold", "ha": "center", "va": "center"}
        paper = {"facecolor": PAPER, "edgecolor": "none", "alpha": 0.8, "pad": 0.5}
        for mark in [*front, *further, *lost]:
            colour = self.styles[mark.series]["color"]
            name = mark.name
            if mark in lost:
                name += f": {mark.score:.3g}"
            height = max(bottom, mark.score)
            texts.append(axis.text(mark.cost, height, name, look, color=colour, bbox=paper))
        place_labels(axis, texts, boxes)


def _draw_line(axis: Axes, marks: Sequence[Mark], **style: Unpack[Style]) -> None:
    costs = [mark.cost for mark in marks]
    axis.plot(costs, [mark.score for mark in marks], **style)


@name_missing_extra()
def draw_tradeoff(
    rows: Sequence[Mapping[str, Any]],
    score: str = "top1",
    measure: str = "top-1 accuracy",
    costs: Mapping[str, str] | None = None,
) -> Figure:
    """Draw the score of models against each cost that was measured, in panels side by side.

    A line joins the models of the Pareto front, which are named; a legend names all series, and a browser the model
    that one points at. Models that lost so much that they would flatten the picture are arrows at its lower edge,
    beside their names and scores. Controls are grey; the dense model is a star.

    Args:
        rows: One mapping for each model with "name", "series" ("dense", "shallow" for a dense model of fewer blocks,
            or a name of its own), the score in percent, and costs. `SCORE_std`, where there is one, is its standard
            deviation over "seeds" runs, and "to_dense" an `Estimate` over the samples of one; "note" is added to what a
            browser shows of the point.
        score: Key of the score, and `measure` its name.
        costs: Key of each cost to the title of its axis; None for FLOPs alone. One that a row lacks is not drawn.

    Example:
        >>> rows = [dict(name="dense", series="dense", gflops=2.5, top1=91.0)]
        >>> draw_tradeoff(rows).axes[0].get_xlabel()
        'GFLOPs per image'
    """
    titles = {"gflops": "GFLOPs per image"} if costs is None else costs
    panels = {}
    for key, title in titles.items():
        if all(row.get(key) is not None for row in rows):
            panels[key] = title
    width = len(panels) * min(_PANEL, _WIDTH / len(panels))
    figure = new_figure(max(_PANEL, width), 4.2)
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    axes = list(grid.flatten())
    fronts = Fronts(axes, [[_mark(row, key, score) for row in rows] for key in panels])
    for axis, title in zip(axes, panels.values()):
        axis.set_xlabel(title)
        tidy(axis)
    axes[0].set_ylabel(f"{measure} in %", color=INK)
    seeds = max(int(row.get("seeds") or 1) for row in rows)
    note = "one seed"
    if seeds > 1:
        note = f"bars: standard deviation over {seeds} seeds"
    if any(map(_has_interval, rows)):
        note += "; bars: 95 % intervals of the difference to dense"
    fronts.name(figure, note)
    return figure


def _mark(row: Mapping[str, Any], cost: str, score: str) -> Mark:
    std = row.get(f"{score}_std") or 0.0
    below = above = std
    if _has_interval(row):
        below = row["to_dense"].value - row["to_dense"].low
        above = row["to_dense"].high - row["to_dense"].value
    spread = f"± {std:.2f}" if std else ""
    note = "\n".join(filter(None, [spread, row.get("note")]))
    value = row[score]
    is_named = bool(row.get("recommended"))
    return Mark(row["name"], row["series"], row[cost], value, value - below, value + above, note, is_named)


def _has_interval(row: Mapping[str, Any]) -> bool:
    """Whether one seed has an interval, over samples."""
    gap = row.get("to_dense")
    return int(row.get("seeds") or 1) == 1 and gap is not None and gap.has_interval
