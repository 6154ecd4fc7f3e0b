"""Figures of scores against costs show their front, name it, and are not flattened by models that lost."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from mmod.analysis.fronts import Mark, draw_tradeoff, floor_of, front_of
from mmod.analysis.statistics import Estimate

TIMES = {"gflops": "GFLOPs per image", "latency_ms": "ms per image, batch 1", "latency_ms_b8": "ms per image, batch 8"}


def rows(seeds: int = 3, **times: float) -> list[dict[str, Any]]:
    """Return nine models, one of which lost; times are milliseconds for each GFLOP by column."""
    return [
        {
            "name": series if series == "dense" else f"{series}-{capacity}",
            "series": series,
            "capacity": capacity,
            "gflops": 0.5 + capacity / 2,
            "top1": score,
            "top1_std": 0.5 if seeds > 1 else None,
            "seeds": seeds,
            **{column: (0.5 + capacity / 2) * factor for column, factor in times.items()},
        }
        for series, capacity, score in [
            ("dense", 1.0, 93.0),
            ("a-mod", 0.25, 91.0),
            ("a-mod", 0.5, 92.0),
            ("mod", 0.25, 90.0),
            ("mod", 0.5, 92.0),
            ("random", 0.25, 80.0),
            ("random", 0.5, 88.0),
            ("shallow", 0.55, 87.0),
            ("untrained", 0.5, 12.0),
        ]
    ]


# Of two as cheap with one score, the first of the rows; all others are beaten by one that costs no more.
FRONT = {"a-mod-0.25", "a-mod-0.5", "mod-0.5", "dense"}
LOST = "untrained-0.5: 12"


def masks_of(axis: Any) -> list[Any]:
    return [line for line in axis.lines if (line.get_gid() or "").startswith("hint ")]


def names_of(axis: Any) -> set[str]:
    return {text.get_text() for text in axis.texts if text.get_text()}


@pytest.mark.parametrize("faster", [False, True])
def test_a_front_holds_what_nothing_as_cheap_beats(faster: bool) -> None:
    rng = np.random.default_rng(0)
    costs = rng.uniform(1, 4, 40)
    marks = [Mark(str(n), "a", cost, float(rng.integers(60, 90)), 0, 0) for n, cost in enumerate(costs.tolist())]
    front = front_of(marks, faster)

    def is_as_cheap(other: Mark, mark: Mark) -> bool:
        return other.cost >= mark.cost if faster else other.cost <= mark.cost

    for mark in marks:
        is_beaten = any(other.score > mark.score and is_as_cheap(other, mark) for other in marks)
        assert not (mark in front and is_beaten)
        # One that is off the front has a better one, or one as good that costs less.
        same = any(other.score == mark.score and is_as_cheap(other, mark) and other is not mark for other in marks)
        assert mark in front or is_beaten or same
    assert [mark.cost for mark in front] == sorted((mark.cost for mark in front), reverse=faster)
    # What costs more than the dense model is on none, however good it is.
    cost = sorted(costs)[20]
    dense = Mark("dense", "dense", cost, 60.0, 0, 0)
    for mark in front_of([*marks, dense], faster):
        assert mark.cost >= cost if faster else mark.cost <= cost


def test_a_lost_model_stretches_no_axis_and_is_stated() -> None:
    figure = draw_tradeoff(rows(latency_ms=10), costs=TIMES)
    for axis in figure.axes:
        bottom, top = axis.get_ylim()
        assert 70 < bottom < 80
        assert 93 < top < 100
        (arrow,) = (mark for mark in masks_of(axis) if mark.get_gid().startswith("hint untrained"))
        assert arrow.get_ydata()[0] == bottom
        (name,) = (text for text in axis.texts if text.get_text() == LOST)
        # At the edge of its own panel.
        assert bottom <= name.get_position()[1] < bottom + 0.35 * (top - bottom)
    assert figure.get_suptitle().endswith("below the axis: untrained-0.5 12.0")
    # A legend shows the marks that the panels have.
    (legend,) = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    markers = [handle.get_marker() for handle in legend.legend_handles]
    assert [label for label, marker in zip(labels, markers) if marker == 7] == ["untrained"]
    # A bar that stretches the axis brings back what lies on it then.
    stretched = [row | {"seeds": 1} for row in rows(latency_ms=10)]
    for row in stretched:
        row["to_dense"] = Estimate(0.0, -85.0, 1.0, seeds=1)
    figure = draw_tradeoff(stretched, costs=TIMES)
    assert "below the axis" not in figure.get_suptitle()
    # So does one that just reaches such a mark, which the frame does not cut: 12 is 81 below the dense model.
    for row in stretched:
        row["to_dense"] = Estimate(0.0, -75.6, 0.0, seeds=1)
    for axis in draw_tradeoff(stretched, costs=TIMES).axes:
        bottom, top = axis.get_ylim()
        assert 12 - bottom > 0.05 * (top - bottom)
    # One that is on the front of one panel is shown in all of them, on one scale.
    cheap = [{**row, "latency_ms": 1.0} for row in rows()]
    cheap[5] |= {"latency_ms": 0.1, "top1": 60.0}
    figure = draw_tradeoff(cheap, costs=TIMES)
    assert len({axis.get_ylim() for axis in figure.axes}) == 1
    assert {len([mark for mark in masks_of(axis) if mark.get_marker() == 7]) for axis in figure.axes} == {1}
    # One that costs least is on the front, however low it scores.
    lowest = [Mark(str(score), "a", score, score, score, score) for score in (10.0, 90.0, 91.0, 92.0, 93.0)]
    assert floor_of(lowest, [front_of(lowest)]) == 10
    assert floor_of(lowest, [front_of(lowest, faster=True)]) == 90


def test_tradeoff_has_a_panel_for_each_cost_that_was_measured_side_by_side() -> None:
    figure = draw_tradeoff(rows(latency_ms=10, latency_ms_b8=4), costs=TIMES)
    assert [axis.get_xlabel() for axis in figure.axes] == list(TIMES.values())
    assert len({axis.get_position().y0 for axis in figure.axes}) == 1
    assert figure.get_figwidth() <= 10.5
    assert figure.axes[0].get_ylabel() == "top-1 accuracy in %"
    assert "3 seeds" in figure.get_suptitle()
    assert "one seed" in draw_tradeoff(rows(seeds=1)).get_suptitle()
    fewer = draw_tradeoff(rows(latency_ms=10), costs=TIMES)
    assert [axis.get_xlabel() for axis in fewer.axes] == list(TIMES.values())[:2]


def test_one_seed_has_bars_of_its_intervals_over_samples() -> None:
    gap = Estimate(-1.0, -4.0, 0.5, seeds=1)
    figure = draw_tradeoff([{**row, "to_dense": None if row["series"] == "dense" else gap} for row in rows(seeds=1)])
    (axis,) = figure.axes
    (bar,) = (bar for bar in axis.collections if bar.get_segments()[0][0][0] == 0.625)
    assert [y for _, y in bar.get_segments()[0]] == [88.0, 92.5]
    assert "bars: 95 % intervals of the difference to dense" in figure.get_suptitle()


def test_the_front_is_named_and_a_legend_names_all_series() -> None:
    figure = draw_tradeoff(rows(latency_ms=10), costs=TIMES)
    named = set()
    for axis in figure.axes:
        named |= names_of(axis)
    # What is below the axis is named with its score, which its place does not tell.
    assert {"dense", LOST} <= named <= {*FRONT, LOST}
    # What is recommended need not be on the front, as its interval may be narrower, and is never below the axis.
    recommended = [{**row, "recommended": row["name"] in ("random-0.5", "untrained-0.5")} for row in rows()]
    named = names_of(draw_tradeoff(recommended).axes[0])
    assert {"dense", "random-0.5", "untrained-0.5"} <= named <= {*FRONT, "random-0.5", "untrained-0.5"}
    (legend,) = figure.legends
    expected = {"Pareto front", "dense", "a-mod", "mod", "random", "shallow", "untrained"}
    assert {text.get_text() for text in legend.get_texts()} == expected


def test_no_name_lies_on_another_or_on_a_point() -> None:
    figure = draw_tradeoff(rows(latency_ms=10, latency_ms_b8=4), costs=TIMES)
    figure.draw_without_rendering()
    for axis in figure.axes:
        names = [text.get_window_extent() for text in axis.texts if text.get_text()]
        points = [mark.get_window_extent() for mark in masks_of(axis)]
        assert len(points) == 9
        assert not any(one.overlaps(two) for one, two in itertools.combinations(names, 2))
        assert not any(name.overlaps(point) for name in names for point in points)
        room = axis.get_window_extent()
        assert all(room.x0 <= name.x0 and name.x1 <= room.x1 for name in names)


def test_series_have_one_colour_and_marker_in_all_panels_and_figures() -> None:
    figures = [draw_tradeoff(rows(latency_ms=10), costs=TIMES), draw_tradeoff(rows()[:3])]
    styles_of: dict[str, set[tuple[str, str]]] = {}
    for figure in figures:
        for axis in figure.axes:
            for mark in masks_of(axis):
                name = mark.get_gid().removeprefix("hint ").partition(":")[0].rpartition("-")[0] or "dense"
                styles_of.setdefault(name, set()).add((mark.get_color(), mark.get_marker()))
    assert set(styles_of) == {"dense", "a-mod", "mod", "random", "shallow", "untrained"}
    assert all(len(styles) == 1 for styles in styles_of.values())
