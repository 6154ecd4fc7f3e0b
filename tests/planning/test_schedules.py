from __future__ import annotations

import math

import pytest

from mmod.planning import ratio_decay


def test_the_published_decay() -> None:
    plan = ratio_decay(32)
    assert plan.blocks == tuple(range(8, 32))
    published = [0.844, 0.806, 0.764, 0.720, 0.674, 0.625, 0.576, 0.525]
    published += [0.475, 0.424, 0.375, 0.326, 0.280, 0.236, 0.194, 0.156]
    assert plan.capacities == pytest.approx(published + [0.15] * 8, abs=6e-4)
    assert plan.mean_capacity == pytest.approx(0.5375, abs=1e-4)


@pytest.mark.parametrize("shape", ["cosine", "linear"])
@pytest.mark.parametrize("depth", [2, 6, 12, 24])
def test_capacity_never_rises_with_depth(shape: str, depth: int) -> None:
    plan = ratio_decay(depth, shape=shape)
    assert all(a >= b for a, b in zip(plan.capacities, plan.capacities[1:]))
    assert all(0.15 <= c <= 0.85 for c in plan.capacities)


def test_the_shift_is_the_mean_before_clipping() -> None:
    plan = ratio_decay(9, shift=0.4, ceiling=1.0, floor=1e-6)
    assert plan.capacities[4] == pytest.approx(0.5 * math.cos(math.pi / 2) + 0.4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 1}, "at least 2 blocks, got depth 1"),
        ({"depth": 4, "floor": 0.0}, "0 < floor <= ceiling <= 1, got 0.0"),
        ({"depth": 4, "shape": "sine"}, "shape must be one of 'cosine', 'linear', got 'sine'"),
    ],
)
def test_wrong_decays(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ratio_decay(**options)
