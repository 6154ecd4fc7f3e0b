from __future__ import annotations

import itertools
import math
import re

import pytest

import mmod
from mmod.planning import drop_once, falling, ratio_decay
from tests.kit.scripts import ROOT


def test_the_published_decay() -> None:
    plan = ratio_decay(32)
    assert plan.blocks == tuple(range(8, 32))
    published = [0.844, 0.806, 0.764, 0.720, 0.674, 0.625, 0.576, 0.525]
    published += [0.475, 0.424, 0.375, 0.326, 0.280, 0.236, 0.194, 0.156]
    assert plan.capacity == pytest.approx(published + [0.15] * 8, abs=6e-4)
    assert plan.mean_capacity == pytest.approx(0.5375, abs=1e-4)


@pytest.mark.parametrize("shape", ["cosine", "linear"])
@pytest.mark.parametrize("depth", [2, 6, 12, 24])
def test_capacity_never_rises_with_depth(shape: str, depth: int) -> None:
    plan = ratio_decay(depth, shape=shape)
    assert all(a >= b for a, b in zip(plan.capacity, plan.capacity[1:]))
    assert all(0.15 <= c <= 0.85 for c in plan.capacity)


def test_settings_of_papers_keep_as_many_tokens_as_their_columns() -> None:
    page = (ROOT / "docs/planning.md").read_text()
    rows = re.findall(r"^\| .*?([\d.]+) % \| `drop_once\((\d+), keep=([\d.]+)\)` \|(.*)\|$", page, re.MULTILINE)
    assert len(rows) == 6
    for share, depth, keep, smaller in rows:
        plan = drop_once(int(depth), keep=float(keep))
        mean = (int(depth) - len(plan.blocks) + sum(plan.capacity)) / int(depth)
        assert mean == pytest.approx(float(share) / 100, abs=1e-3)
        for side, tokens in re.findall(r"image_size: (\d+)` \((\d+) tokens", smaller):
            assert (int(side) // 14) ** 2 == int(tokens)
            assert int(tokens) / 576 == pytest.approx(mean, abs=0.02)


def test_the_shift_is_the_mean_before_clipping() -> None:
    plan = ratio_decay(9, shift=0.4, ceiling=1.0, floor=1e-6)
    assert plan.capacity[4] == pytest.approx(0.5 * math.cos(math.pi / 2) + 0.4)


@pytest.mark.parametrize("steps", [1, 3, 5])
@pytest.mark.parametrize(("depth", "start"), [(6, 0), (6, 1), (12, 1), (12, 4), (25, 1)])
@pytest.mark.parametrize("mean", [0.5, 0.72, 1.0])
def test_falling_capacity_has_equal_steps_and_its_mean(depth: int, start: int, steps: int, mean: float) -> None:
    plan = falling(depth, mean, steps=steps, start=start)
    assert plan.blocks == tuple(range(start, depth))
    heights = sorted({1.0, *plan.capacity}, reverse=True)
    if mean < 1:
        assert len(heights) == steps + 1
        falls = [a - b for a, b in itertools.pairwise(heights)]
        assert falls == pytest.approx([falls[0]] * steps, abs=1e-5)
        assert sum(heights[1:]) / steps == pytest.approx(mean, abs=1e-5)
    assert abs(sum(plan.capacity) / len(plan.blocks) - mean) < 0.15


@pytest.mark.parametrize("depth", [2, 4, 12])
def test_gradual_merging_fits_every_depth(depth: int) -> None:
    config = mmod.preset("gradual", depth=depth)
    assert config.blocks == tuple(range(1, depth))
    assert config.skipped == mmod.Merged(before="mlp")
    assert config == mmod.RoutingConfig.from_dict(config.to_dict())
