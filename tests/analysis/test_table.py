"""The table of a comparison: what is paired, by seed or by sample, and who is best, close or on the front."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmod.analysis.statistics import FEWEST, difference
from mmod.analysis.table import (
    Look,
    Measured,
    Table,
    best,
    close_groups,
    compare,
    gap,
    gaps,
    interval_of,
    mean_of,
    means_over_seeds,
    rows_once,
)
from mmod.io.jobs import Callback, Runner
from mmod.io.store import Store
from mmod.studies.report import significance


def by_seed(figures: Mapping[str, Mapping[int, float]]) -> Table:
    """Return a table of a figure "top1" by candidate and seed."""
    table = Table()
    for name, values in figures.items():
        for seed, value in values.items():
            table.add(name, seed, Measured({"top1": value}))
    return table


def proportion(right: int, samples: int) -> tuple[float, float]:
    """Return Wilson's interval: the shares from which what is seen is 1.96 standard errors."""
    share = right / samples
    squared = 1.959964**2
    # Both roots of (share - p)^2 = z^2 p (1 - p) / n.
    low, high = np.sort(np.roots([1 + squared / samples, -2 * share - squared / samples, share**2]).real)
    return float(low), float(high)


def by_sample(outcomes: Mapping[str, list[float]]) -> Table:
    """Return a table of an outcome "right" by candidate and sample."""
    table = Table()
    for name, values in outcomes.items():
        table.add(name, 0, Measured({}, samples=len(values), outcomes={"right": np.array(values)}))
    return table


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


def test_one_seed_claims_nothing() -> None:
    table = by_seed({"a": {0: 95.0}, "b": {0: 70.0}})
    value = gap(table, "top1", "a", "b")
    assert value is not None
    assert (value.has_interval, value.is_clear, str(value)) == (False, False, "+25.0")
    assert (
        significance(table, "top1", ["a", "b"])
        == "One seed: differences are not tested. Add --seeds 5 for confidence intervals."
    )


def test_models_whose_interval_holds_zero_are_named_and_not_ranked() -> None:
    table = by_seed(
        {
            "dense": {0: 95.0, 1: 95.4, 2: 95.1},
            "close": {0: 95.2, 1: 94.9, 2: 95.3},
            "random": {0: 70.0, 1: 71.0, 2: 69.5},
        }
    )
    test = "(paired over 3 seeds, 95 % intervals)."
    assert significance(table, "top1", [*table.runs]) == f"No significant difference between dense and close {test}"
    assert significance(table, "top1", ["dense", "random"]) == f"All differences are significant {test}"


def test_each_group_of_close_models_has_a_sentence() -> None:
    means = {"dense": 95, "a": 95, "b": 95, **{f"{group}{side}": group for group in (20, 30, 40, 50) for side in "xy"}}
    table = by_seed({name: {0: mean + 0.1, 1: mean - 0.1, 2: mean} for name, mean in means.items()})
    for number, name in enumerate(table.runs):
        # Of equal models there is no interval.
        table.runs[name][0].figures["top1"] += 0.01 * number
    assert significance(table, "top1", [*table.runs]) == (
        "No significant difference between any two of dense, a and b (paired over 3 seeds, 95 % intervals). Nor "
        "between 20x and 20y. Nor between 30x and 30y. Nor within 2 more groups."
    )


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
    groups = close_groups(by_seed(figures), "top1", [*figures])
    assert {frozenset(pair) for group in groups for pair in combinations(group, 2)} == close


def test_models_without_a_partner_are_not_compared() -> None:
    table = by_seed({"dense": {0: 3.0}, "a": {0: 2.0}, "late": {1: 2.0}})
    differences = gaps(table, "top1", {"dense": "dense", "a": "dense", "late": "dense"})
    assert differences["dense"] is None
    assert differences["late"] is None
    assert differences["a"] is not None
    assert differences["a"].value == -1
    assert set(gaps(table, "top1", dict.fromkeys(table.runs)).values()) == {None}
    # While a study runs: samples of different seeds are those of different models.
    for name, seed in (("one", 0), ("two", 1)):
        table.add(name, seed, Measured({"top1": 50.0}, outcomes={"top1": np.eye(2)[0]}))
    assert gap(table, "top1", "one", "two") is None
    # A partner that has not run yet.
    assert gaps(table, "top1", {"a": "another"}) == {"a": None}


@given(st.lists(st.floats(0, 1), min_size=2, max_size=20), st.data())
def test_samples_are_paired_as_far_as_both_are_evaluated(scores: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(scores)))
    changed = data.draw(st.lists(st.floats(0, 1), min_size=count, max_size=count))
    table = by_sample({"dense": scores, "a": changed, "none": []})
    value = gap(table, "right", "a", "dense")
    assert value is not None
    assert value.value == pytest.approx(sum(changed) / count - sum(scores[:count]) / count, abs=1e-9)
    # The interval of few samples is not known, unless changes are by 0 or 1.
    if value.has_interval:
        assert value.low - 1e-9 <= value.value <= value.high + 1e-9
    else:
        assert count < FEWEST
    assert gap(table, "right", "none", "dense") is None
    assert best(table, "right", ["dense", "a"]) == max(["dense", "a"], key=lambda name: mean_of(table, "right", name))
    interval = interval_of(table, "right", "dense")
    assert interval.value == pytest.approx(math.fsum(scores) / len(scores))
    assert not interval.has_interval or interval.low <= interval.value + 1e-9 <= interval.high + 2e-9


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_outcomes_of_any_shape_join_those_of_samples_before(shape: tuple[int, ...]) -> None:
    table = Table()
    outcome = np.arange(5 * math.prod(shape)).reshape(5, *shape)
    for part in (outcome[:2], outcome[2:]):
        table.add("dense", 0, Measured({}, samples=len(part), outcomes={"right": part}))
    joined = table.runs["dense"][0]
    assert joined.samples == 5
    assert np.array_equal(joined.outcomes["right"], outcome)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=30))
def test_figures_in_percent_are_paired_by_sample_unless_seeds_repeat_them(right: list[tuple[bool, bool]]) -> None:
    table = Table()
    for place, name in enumerate(("a", "dense")):
        outcomes = {"top1": np.array([pair[place] for pair in right], np.float32)}
        figures = {"top1": 100 * float(outcomes["top1"].mean())}
        table.add(name, 0, Measured(figures, samples=len(right), outcomes=outcomes))
    # Bonett and Price, by hand: one more change each way. No model is right on more than all.
    changes = [int(one) - int(other) for one, other in right] + [1, -1]
    middle = mean(changes)
    half = 1.959964 * math.sqrt(mean((change - middle) ** 2 for change in changes) / len(changes))
    actual = gap(table, "top1", "a", "dense")
    assert actual is not None
    # Where dense is right on some, on as few or as many as its own interval holds.
    is_dense_right = [other for _, other in right]
    least, most = mean(is_dense_right), mean(is_dense_right)
    if len(set(is_dense_right)) == 2:
        least, most = proportion(sum(is_dense_right), len(right))
    low, high = max(middle - half, -most), min(middle + half, 1 - least)
    ends = (100 * sum(changes) / len(right), 100 * low, 100 * high)
    assert (actual.value, actual.low, actual.high) == pytest.approx(ends, abs=1e-4)
    assert str(actual)[0] in "+-"
    assert significance(table, "top1", ["dense", "a"]).endswith(f"(paired over {len(right)} samples, 95 % intervals).")
    for name in ("a", "dense"):
        table.add(name, 1, Measured({"top1": 50.0}))
    repeated = gap(table, "top1", "a", "dense")
    assert repeated is not None
    assert repeated.seeds == 2


@pytest.mark.parametrize("right", [129, 135, 9, 231])
@pytest.mark.parametrize("dtype", [bool, np.float32, np.float64])
def test_figures_in_percent_and_shares_of_any_precision_are_rounded_alike(dtype: type, right: int) -> None:
    # A multiple of 1.25 points is often a tie.
    table = Table()
    for name, number in (("dense", 132), ("a", right)):
        outcome_N = (np.arange(240) < number).astype(dtype)
        outcomes = {"top1": outcome_N, "right": outcome_N}
        table.add(name, 0, Measured({"top1": number / 2.4}, samples=240, outcomes=outcomes))
    in_percent = gap(table, "top1", "a", "dense")
    share = gap(table, "right", "a", "dense")
    assert in_percent is not None
    assert share is not None
    assert f"{in_percent:+.1f}" == f"{100 * share:+.1f}"
    assert f"{in_percent:+.1f}".startswith(f"{100 * (right - 132) / 240:+.1f} [")


@pytest.mark.parametrize("samples", [2, 64])
@pytest.mark.parametrize("dense_share", [0.0, 0.5, 2 / 3, 1.0])
@pytest.mark.parametrize("share", [0.0, 1 / 3, 2 / 3, 1.0])
def test_an_interval_leaves_room_for_chance_where_all_samples_agree(
    samples: int, dense_share: float, share: float
) -> None:
    right = {"a": np.full(samples, share), "dense": np.full(samples, dense_share)}
    if dense_share == 0.5:
        right["dense"] = np.arange(samples) % 2.0
    table = by_sample({name: values.tolist() for name, values in right.items()})
    interval = interval_of(table, "right", "a")
    change = gap(table, "right", "a", "dense")
    assert change is not None
    for value, ends in ((interval, (0, 1)), (change, (-dense_share, 1 - dense_share))):
        if not value.has_interval:
            # Changes of several sizes, of too few samples.
            assert samples < FEWEST
            continue
        assert value.high - value.low > 0.5 / samples
        # At an end alone where samples cannot be further.
        least, most = ends
        assert value.low < value.value or value.value == least
        assert value.high > value.value or value.value == most
    # Losing all that dense is right on is not the most that may be lost on other samples.
    if dense_share == 0.5 and share == 0:
        assert change.low < change.value == -0.5 < change.high


@given(st.integers(2, 12), st.integers(0, 3), st.integers(0, 99))
def test_a_figure_of_weighted_samples_is_bootstrapped_over_the_same_draws(samples: int, more: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    outcomes = {"dense": draw.random(samples + more), "a": draw.random(samples)}

    def root_mean_square(rows: Mapping[str, np.ndarray], weight_SN: np.ndarray) -> np.ndarray:
        return np.sqrt(weight_SN @ rows["x"] ** 2)

    table = Table(weigh={"rms": root_mean_square})
    for name, values in outcomes.items():
        table.add(name, 0, Measured({}, samples=len(values), outcomes={"x": values}))
    value = gap(table, "rms", "a", "dense")
    assert value is not None
    # Those that both have.
    outcomes["dense"] = outcomes["dense"][:samples]
    assert value.value == pytest.approx(
        math.sqrt(mean(outcomes["a"] ** 2)) - math.sqrt(mean(outcomes["dense"] ** 2)), abs=1e-9
    )
    # The slow definition: the figure of images that are drawn one by one.
    drawn = np.random.default_rng(0).multinomial(samples, np.full(samples, 1 / samples), size=2000)
    places = [np.repeat(np.arange(samples), counts) for counts in drawn]
    differences = [
        math.sqrt(mean(outcomes["a"][place] ** 2)) - math.sqrt(mean(outcomes["dense"][place] ** 2)) for place in places
    ]
    assert (value.low, value.high) == pytest.approx(tuple(np.percentile(differences, (2.5, 97.5))), abs=1e-6)


def test_a_figure_that_some_seeds_lack_has_the_mean_of_the_others() -> None:
    columns = means_over_seeds({1: {"top1": 3.0}, 0: {"top1": 1.0, "before": 2.0}})
    assert columns == {"top1": 2.0, "top1_std": pytest.approx(math.sqrt(2)), "before": 2.0, "before_std": None}


def test_a_stopped_comparison_measures_nothing_again(tmp_path: Path) -> None:
    done = []

    def measure(job: Look, callback: Callback) -> Measured:
        def compute() -> Measured:
            if len(done) == 2:
                raise KeyboardInterrupt
            done.append(job.name)
            right_N = np.arange(3) * job.part
            return Measured({"top1": job.part}, {"blocks.1": 0.5}, 3, outcomes={"right": right_N})

        return rows_once(Store(tmp_path / "store.jsonl"), {"name": job.name, "seed": job.seed}, compute)

    jobs = [Look(name=name, seed=seed, part=0.25 + seed) for seed in (0, 1) for name in ("dense", "a")]
    with pytest.raises(KeyboardInterrupt):
        list(compare(Table(), [jobs], measure, Runner(progress=False)))
    done.clear()
    table = Table()
    assert list(compare(table, [jobs], measure, Runner(progress=False))) == jobs
    assert done == ["dense", "a"]
    assert table.figures("a") == {0: {"top1": 0.25}, 1: {"top1": 1.25}}
    rows = table.runs["dense"][1]
    assert (rows.kept, rows.samples, rows.outcomes["right"].tolist()) == ({"blocks.1": 0.5}, 3, [0, 1.25, 2.5])
