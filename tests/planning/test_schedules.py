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


@pytest.mark.parametrize(("share", "tokens"), [(0.333, 192), (0.222, 128), (0.111, 64)])
@pytest.mark.parametrize("depth", [28, 32])
def test_plans_for_columns_of_papers_keep_their_share(share: float, tokens: int, depth: int) -> None:
    page = (ROOT / "docs/planning.md").read_text()
    (formula,) = re.findall(r"`(\(share \* depth.*)`", page)
    keep = eval(formula, {"share": share, "depth": depth})
    plan = drop_once(depth, keep=keep)
    assert (depth - len(plan.blocks) + sum(plan.capacity)) / depth == pytest.approx(share)
    if (share, depth) == (0.222, 32):
        assert f"drop_once(32, keep={keep:.3f})" in page
    assert f"{100 * share:.1f}" in page
    assert share * 576 == pytest.approx(tokens, rel=0.01)


def test_smaller_images_for_columns_of_papers_have_about_their_tokens() -> None:
    page = (ROOT / "docs/planning.md").read_text()
    (sides,) = re.findall(r"`model.image_size` (\d+), (\d+) and (\d+)", page)
    patches = [(int(side) // 14) ** 2 for side in sides]
    assert patches == pytest.approx([192, 128, 64], rel=0.06)


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
