"""One bootstrap for audits and studies: the same images in each draw, and figures that stay as they were."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmod.analysis.statistics import (
    Estimate,
    Resampling,
    as_cheap,
    change_of,
    difference,
    estimate_of,
    pareto_front,
    published,
    share_of,
    unbeaten,
)

# What both bootstraps gave before they became one: value, and the ends of both intervals.
FIGURES = [
    (5003, 901, 7, "0x1.4711a645596afp-8", "-0x1.5ce722ab64168p-6", "0x1.1d881917737bdp-5"),
    (17, 300, 1, "-0x1.7d872197d5513p-3", "-0x1.93dcb95b44333p-1", "0x1.8e4d0cad9bd85p-2"),
]


@pytest.mark.parametrize(("images", "draws", "seed", "value", "low", "high"), FIGURES)
def test_figures_of_a_seed_stay_in_studies_and_audits(
    images: int, draws: int, seed: int, value: str, low: str, high: str
) -> None:
    values = np.random.default_rng(3).normal(size=5003)[:images]
    resampling = Resampling(images, draws, seed)
    interval = resampling.of(lambda weight_SN: weight_SN @ values)
    expected = [float.fromhex(text) for text in (value, low, high)]
    # Products of matrices are summed in an order that depends on the processor.
    assert [interval.value, interval.low, interval.high] == pytest.approx(expected, rel=1e-9)
    # The weights of figures that are no means are in single precision.
    audit = estimate_of(values.mean(), resampling.means(values[:, None])[:, 0])
    assert (interval.low, interval.high) == pytest.approx((audit.low, audit.high), rel=1e-6)


@dataclass(frozen=True)
class _Row:
    accuracy: Estimate
    to_dense: Estimate
    one_seed: Estimate


def test_audits_and_studies_publish_one_type_under_their_names() -> None:
    gap = difference({0: 2.0, 1: 4.0}, {0: 1.0, 1: 1.0})
    row = _Row(Estimate(91.0, 90.0, 92.0), gap, difference({0: 2.0}, {0: 1.0}))
    assert published(row) == {
        "accuracy": {"value": 91.0, "low": 90.0, "high": 92.0},
        "to_dense": {"mean": 2.0, "low": gap.low, "high": gap.high, "seeds": 2},
        "one_seed": {"mean": 1.0, "low": None, "high": None, "seeds": 1},
    }


@pytest.mark.parametrize("images", [32, 256])
@pytest.mark.parametrize("lost", [0.0, 0.02, 0.1])
def test_intervals_of_counts_hold_the_truth_where_little_changes(images: int, lost: float) -> None:
    rng = np.random.default_rng(0)
    held = {share_of: 0, change_of: 0}
    for _ in range(1000):
        # A quarter as many images become right as become wrong.
        drawn = rng.random(images)
        is_lost, is_gained = drawn < lost, drawn > 1 - lost / 4
        for of, values, truth in (
            (share_of, 1.0 - is_lost, 1 - lost),
            (change_of, is_gained - 1.0 * is_lost, -0.75 * lost),
        ):
            estimate = of(values)
            assert estimate.low <= estimate.value <= estimate.high
            held[of] += estimate.low <= truth <= estimate.high
    assert min(held.values()) >= 930


@given(st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1))
def test_a_pareto_front_holds_what_nothing_as_cheap_beats(models: dict[str, tuple[int, int]]) -> None:
    costs = {name: float(cost) for name, (cost, _) in models.items()}
    scores = {name: float(score) for name, (_, score) in models.items()}
    undecided = unbeaten(costs, lambda one, other: scores[one] > scores[other], tolerance=1.0)
    front = pareto_front(costs, scores)
    for name, (cost, score) in models.items():
        beaten = any(other <= cost and high > score for other, high in models.values())
        cheaper = any(other < cost and high == score for other, high in models.values())
        assert (name in undecided) == (not beaten)
        assert (name in front) == (not beaten and not cheaper)
    assert front


def test_costs_within_two_percent_are_as_cheap() -> None:
    costs = {"a": 1.0, "near": 1.02, "slow": 1.03}
    assert as_cheap(costs, "a") == ["near"]
    assert as_cheap(costs, "a", tolerance=1.0) == []
    assert as_cheap(costs, "slow") == ["a", "near"]
