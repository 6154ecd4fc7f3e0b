from __future__ import annotations

import math
from itertools import combinations
from statistics import mean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmod.analysis.statistics import difference
from mmod.studies.results import SeedScores


def test_the_interval_is_that_of_a_paired_t_test() -> None:
    # Textbook value: t(0.975, 4) = 2.776.
    scores, other = {s: 90.0 + s for s in range(5)}, {s: 88.0 + 1.5 * s for s in range(5)}
    gaps = [scores[s] - other[s] for s in range(5)]
    half = 2.776 * math.sqrt(sum((gap - mean(gaps)) ** 2 for gap in gaps) / 4) / math.sqrt(5)
    actual = difference(scores, other)
    assert actual.value == mean(gaps)
    assert (actual.low, actual.high) == pytest.approx((mean(gaps) - half, mean(gaps) + half), abs=1e-3)
    assert actual.seeds == 5


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    draws = torch.randn(2000, 4, generator=torch.Generator().manual_seed(0)).tolist()
    clear = sum(difference(dict(enumerate(row)), dict.fromkeys(range(4), 0.0)).is_clear for row in draws)
    assert 0.035 < clear / 2000 < 0.065


def test_what_all_seeds_share_does_not_count() -> None:
    scores = {0: 95.0, 1: 65.0, 2: 80.0}
    gap = difference(scores, {seed: value - 1 for seed, value in scores.items()})
    assert gap.value == gap.low == gap.high == 1
    assert difference({0: 1.0, 7: 5.0}, {0: 3.0, 9: 4.0}).value == -2
    with pytest.raises(ValueError, match="no shared seed"):
        difference({0: 1.0}, {1: 1.0})


def test_one_seed_claims_nothing() -> None:
    gap = difference({0: 95.0}, {0: 70.0})
    assert (gap.has_interval, gap.is_clear, str(gap)) == (False, False, "+25.0")
    assert (
        SeedScores({"a": {0: 95.0}, "b": {0: 70.0}}).verdict()
        == "One seed: differences are not tested. Add --seeds 5 for confidence intervals."
    )


def test_models_whose_interval_holds_zero_are_named_and_not_ranked() -> None:
    figures = {
        "dense": {0: 95.0, 1: 95.4, 2: 95.1},
        "close": {0: 95.2, 1: 94.9, 2: 95.3},
        "random": {0: 70.0, 1: 71.0, 2: 69.5},
    }
    assert SeedScores(figures).verdict().endswith("no significant difference between dense and close.")
    two = SeedScores({name: figures[name] for name in ("dense", "random")})
    assert two.verdict().endswith("all differences are significant.")


@given(st.lists(st.sampled_from([70.0, 75.0, 80.0, 85.0]), min_size=2, max_size=8))
def test_each_pair_that_is_not_told_apart_stands_in_one_group(means: list[float]) -> None:
    noise = [[0.0, 1.0, 3.0], [2.0, 0.0, 1.0], [0.0, 9.0, -9.0]]
    figures = {
        f"m{place}": {seed: mean + noise[place % 3][seed] for seed in range(3)} for place, mean in enumerate(means)
    }
    close = {
        frozenset(pair)
        for pair in combinations(figures, 2)
        if not difference(*(figures[name] for name in pair)).is_clear
    }
    groups = SeedScores(figures)._close_groups()
    assert {frozenset(pair) for group in groups for pair in combinations(group, 2)} == close


def test_models_without_a_partner_are_not_compared() -> None:
    figures = {"dense": {0: 3.0}, "a": {0: 2.0}, "late": {1: 2.0}}
    gaps = SeedScores(figures).gaps({"dense": "dense", "a": "dense", "late": "dense"})
    assert gaps["dense"] is None
    assert gaps["late"] is None
    assert gaps["a"] is not None
    assert gaps["a"].value == -1
    assert set(SeedScores(figures).gaps(dict.fromkeys(figures)).values()) == {None}
    # A partner that has not run yet.
    assert SeedScores({"a": {0: 2.0}}).gaps({"a": "dense"}) == {"a": None}
