"""Curves find the least loss that is there, and say where there is none."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmod.analysis.style import looks
from mmod.studies.isoflop import curves_of, draw, fit_curve, optima, told

SIZES = [1e4, 3e4, 1e5, 4e5, 1e6]


@given(best=st.floats(1.1e4, 9e5), least=st.floats(0.5, 5), bend=st.floats(0.01, 1), count=st.integers(3, 5))
def test_the_least_of_a_parabola_is_found(best: float, least: float, bend: float, count: int) -> None:
    sizes = [*SIZES[: count - 1], SIZES[-1]]
    losses = [least + bend * math.log(size / best) ** 2 for size in sizes]
    curve = fit_curve(sizes[::-1], [3 * size for size in sizes[::-1]], losses[::-1])
    assert curve.minimum["parameters"] == pytest.approx(best, rel=1e-4)
    assert curve.minimum == {
        "parameters": curve.minimum["parameters"],
        "forward": curve.forward(curve.minimum["parameters"]),
        "loss": curve.loss(curve.minimum["parameters"]),
    }
    assert curve.loss(best) == pytest.approx(least, rel=1e-6)
    assert curve.forward(best) == pytest.approx(3 * best, rel=1e-6)


@pytest.mark.parametrize(("best", "bend"), [(1e3, 0.1), (1e8, 0.1), (1e5, -0.1)])
def test_no_least_is_made_up(best: float, bend: float) -> None:
    losses = [bend * math.log(size / best) ** 2 for size in SIZES]
    assert fit_curve(SIZES, SIZES, losses).minimum == {}


def point(series: str, size: float, budget: float, shift: float) -> dict[str, object]:
    best = 1e5 * budget / 1e9
    losses = {seed: {"loss": shift + 0.1 * seed + 0.1 * math.log(size / best) ** 2} for seed in range(3)}
    mean = sum(figures["loss"] for figures in losses.values()) / 3
    common = {"steps": 10, "spent": budget, "rate": 0.1}
    row = {"series": series, "size": f"s{size:g}", "budget": budget, "parameters": size, "forward": 2 * size}
    return {**row, **common, "seeds": losses, "loss": mean, "loss_std": 0.1}


def test_differences_are_those_of_the_least_losses_of_each_seed() -> None:
    shifts = {"dense": 2.0, "mod": 1.9}
    points = [point(name, size, budget, shifts[name]) for budget in (1e9, 2e9) for name in shifts for size in SIZES]
    rows = optima(points)
    assert [(row["budget"], row["series"]) for row in rows] == [
        (1e9, "dense"),
        (1e9, "mod"),
        (2e9, "dense"),
        (2e9, "mod"),
    ]
    assert [round(row["parameters"], -2) for row in rows] == [1e5, 1e5, 2e5, 2e5]
    for row in rows:
        if row["series"] == "mod":
            assert (row["difference"].value, row["difference"].seeds) == (pytest.approx(-0.1), 3)
        else:
            assert row["difference"] is None
    assert len(curves_of(points, seed=2)) == 4
    figure = draw(points)
    assert len(figure.axes) == 2
    stars = [line for axis in figure.axes for line in axis.get_lines() if line.get_marker() == "*"]
    assert len(stars) == 8
    # A series has the colour that it has in every other figure.
    assert {star.get_color() for star in stars} == {look["color"] for look in looks(shifts).values()}
    *tables, verdict = map(str, told(points, rows))
    assert ["-0.1000" in text for text in tables] == [True, True]
    assert verdict.count("-0.1000") == 2


def test_a_grid_of_two_sizes_has_points_and_no_curve() -> None:
    points = [point("dense", size, 1e9, 2.0) for size in SIZES[:2]]
    assert optima(points) == []
    table, verdict = map(str, told(points, []))
    assert table.startswith("| training FLOPs")
    assert verdict.startswith("No curve")
    assert len(draw(points).axes) == 2
