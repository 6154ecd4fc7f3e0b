"""A comparison that stops early: who is evaluated on all samples, and that the others are out of reach."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmod.analysis.table import DENSE, Look, Measured, Table, compare, evaluated, gap
from mmod.io.jobs import Callback, Runner
from mmod.planning.early import for_speed, front_in, milliseconds, near_front, unclear_at

SAMPLES = 12
FIRST = 4


def evaluator(outcomes: Mapping[str, np.ndarray]) -> Callable[[Look, Callback], Measured]:
    """Return an evaluation that takes whether samples are right from known outcomes."""

    def evaluate(look: Look, callback: Callback) -> Measured:
        rows = outcomes[look.name][look.part.start : look.part.stop]
        return Measured({}, samples=len(rows), outcomes={"right": rows})

    return evaluate


def order_in(ms: Mapping[str, float], table: Table, name: str) -> tuple[float, float]:
    """Put the candidates that are right most often first, and of those the fastest."""
    return -float(table.runs[name][0].outcomes["right"].mean()), ms[name]


def by_interval(ms: Mapping[str, float], table: Table, name: str) -> tuple[float, float]:
    """Put the candidates first that lose least by the worse end of their interval, and of those the fastest."""
    difference = gap(table, "right", name, DENSE)
    assert difference is not None
    return -difference.low, ms[name]


@given(
    st.dictionaries(
        st.sampled_from("abcdef"),
        st.tuples(st.integers(1, 5), st.lists(st.integers(0, 1), min_size=SAMPLES, max_size=SAMPLES)),
        min_size=1,
    )
)
def test_the_front_is_evaluated_on_all_samples_and_each_sample_once(models: dict[str, tuple[int, list[int]]]) -> None:
    outcomes = {DENSE: np.ones(SAMPLES)} | {name: np.array(right, float) for name, (_, right) in models.items()}
    ms = {DENSE: 6.0} | {name: float(time) for name, (time, _) in models.items()}
    asked: dict[str, list[int]] = {name: [] for name in models}

    def evaluate(look: Look, callback: Callback) -> Measured:
        asked[look.name] += look.part
        return evaluator(outcomes)(look, callback)

    table = Table()
    table.add(DENSE, 0, Measured({}, samples=SAMPLES, outcomes={"right": outcomes[DENSE]}))
    times = {name: [value] * 3 for name, value in ms.items()}
    rounds = near_front(table, models, "right", FIRST, lambda: ({"batch": times}, 1.0))
    for look in compare(table, rounds, evaluate, Runner(progress=False)):
        assert evaluated(table, look.name) == look.part.stop
    assert milliseconds(table, "batch") == ms
    for name in models:
        assert asked[name] in (list(range(FIRST)), list(range(SAMPLES)))
        assert table.runs[name][0].outcomes["right"].tolist() == outcomes[name][: evaluated(table, name)].tolist()
    assert all(evaluated(table, name) == SAMPLES for name in front_in(table, "right"))
    # Who is evaluated on few samples is beaten by one that is as fast, and that was clearly better on as many.
    for name in models:
        others = [other for other in models if other != name and ms[other] <= ms[name]]
        better = [other for other in others if outcomes[other][:FIRST].mean() > outcomes[name][:FIRST].mean()]
        assert evaluated(table, name) == SAMPLES or better


def test_no_row_is_on_the_front_that_looks_beaten_as_it_is_shown() -> None:
    table = Table()
    for name, cosine in {DENSE: 1.0, "slow": 0.99996, "fast": 0.99994, "lossy": 0.98}.items():
        table.add(name, 0, Measured({}, samples=8, outcomes={"cosine": np.full(8, cosine)}))
    table.times = {"batch": {DENSE: [9.0], "slow": [8.0], "fast": [4.0], "lossy": [3.999]}}
    assert front_in(table, "cosine") == ["fast"]
    assert front_in(table, "cosine", decimals=5) == [DENSE, "slow", "fast"]


def test_what_is_slower_than_the_dense_model_is_on_no_front() -> None:
    """It may score better by the mean alone, and is of no use."""
    table = Table()
    for name, score in {DENSE: 0.8, "lucky": 0.9, "fast": 0.7}.items():
        table.add(name, 0, Measured({}, samples=8, outcomes={"right": np.full(8, score)}))
    table.times = {"batch": {DENSE: [9.0], "lucky": [9.5], "fast": [4.0]}}
    assert front_in(table, "right") == [DENSE, "fast"]


def test_candidates_are_compared_on_the_same_samples() -> None:
    """The first samples may be harder for all models than the others."""
    first, others = 64, 200
    dense = np.r_[np.eye(1, first)[0], np.ones(others)]
    # Better by a tenth on the first look, and worse by as much on all.
    lucky = np.r_[np.arange(first) % 8 < 1, np.arange(others) % 5 < 4].astype(float)
    models = {DENSE: dense, "lucky": lucky, "same": dense}
    table = Table()
    table.add(DENSE, 0, Measured({}, samples=len(dense), outcomes={"right": dense}))

    times = {DENSE: [6.0] * 3, "lucky": [4.0] * 3, "same": [5.0] * 3}
    rounds = near_front(table, ["lucky", "same"], "right", first, lambda: ({"batch": times}, 1.0))
    for _ in compare(table, rounds, evaluator(models), Runner(progress=False)):
        pass
    assert {name: evaluated(table, name) for name in models} == dict.fromkeys(models, len(dense))
    assert front_in(table, "right") == ["lucky", "same"]


@pytest.mark.parametrize("speed", [1.2, 2.0, 9.0])
@pytest.mark.parametrize("losses", [(1, 2, 3, 0), (3, 2, 1, 0), (0, 0, 0, 0)])
@pytest.mark.parametrize("own", [[], ["slow", "control"]])
def test_a_wanted_speed_leaves_fewer_candidates_step_by_step(
    speed: float, losses: tuple[int, ...], own: list[str]
) -> None:
    """Timing leaves one of each series, few samples leave one, and the answer is that on all samples, or a smaller."""
    series = [["a", "a smaller"], ["b"], ["slow"]]
    ms = {DENSE: 12.0, "a": 8.0, "a smaller": 4.0, "b": 5.0, "slow": 13.0, "control": 1.0}
    wrong = dict(zip(ms, (0, *losses, 0, 0)))
    outcomes = {name: np.r_[np.zeros(number), np.ones(SAMPLES - number)] for name, number in wrong.items()}
    table = Table(times={"batch": {name: [value] * 3 for name, value in ms.items()}})
    table.add(DENSE, 0, Measured({}, samples=SAMPLES, outcomes={"right": outcomes[DENSE]}))
    order = partial(order_in, ms)
    rounds = for_speed(table, series, own, "right", FIRST, speed, order)
    looks = list(compare(table, rounds, evaluator(outcomes), Runner(progress=False)))
    reaching = [next(filter(lambda name: ms[DENSE] / ms[name] >= speed, names), None) for names in series]
    chosen = {name for name in reaching if name} or {"a smaller"}
    # A user's own are compared in any case, and never the answer as a control.
    first = looks[: len(chosen | set(own))]
    assert {look.name for look in first} == chosen | set(own)
    # Of so few samples, no loss is clear: the next smaller one of the answer, and of what is as good, is tried too.
    tried = {look.name for look in looks} - set(own)
    answer = min(tried, key=partial(order, table))
    assert evaluated(table, answer) == SAMPLES
    best, _ = order(table, answer)
    if tried != chosen:
        assert tried - chosen == {"a smaller"}
        assert order(table, "a")[0] == min(order(table, name)[0] for name in chosen)
    elif "a" in chosen and order(table, "a")[0] == best:
        assert ms[DENSE] / ms["a smaller"] < speed


@pytest.mark.parametrize("gained", [5, 20])
def test_few_samples_rank_by_the_interval_that_as_many_like_them_would_have(gained: int) -> None:
    """What changes as many answers for the worse as for the better has a wide interval on all samples too."""
    first, samples = 64, 256
    right = np.arange(samples) % 2 < 1.0
    changed = right.copy()
    changed[np.flatnonzero(right)[:5]] = False
    changed[np.flatnonzero(~right)[:gained]] = True
    outcomes = {DENSE: right * 1.0, "equal": right * 1.0, "changed": changed * 1.0}
    ms = {DENSE: 12.0, "equal": 6.0, "changed": 5.0}
    table = Table(times={"batch": {name: [value] * 3 for name, value in ms.items()}})
    table.add(DENSE, 0, Measured({}, samples=samples, outcomes={"right": outcomes[DENSE]}))
    order = partial(by_interval, ms)
    series = [["equal"], ["changed"]]
    rounds = for_speed(table, series, [], "right", first, 1.9, order)
    looks = [look.name for look in compare(table, rounds, evaluator(outcomes), Runner(progress=False))]
    expected = "changed" if gained == 20 else "equal"
    assert looks == ["equal", "changed", expected, expected]


@pytest.mark.parametrize("samples", [70, 100])
def test_what_few_samples_leave_has_not_the_best_interval(samples: int) -> None:
    """Repeated in part, the first samples counted more than the others, and what was left on them was named."""
    names = [*"abcdef"]
    times = {"batch": {name: [1.0] * 3 for name in names} | {DENSE: [2.0] * 3}}
    for seed in range(40):
        draws = np.random.default_rng(seed)
        right = draws.random(samples) < 0.8
        outcomes = {DENSE: right * 1.0} | {name: (right ^ (draws.random(samples) < 0.07)) * 1.0 for name in names}
        table = Table(times=times)
        table.add(DENSE, 0, Measured({}, samples=samples, outcomes={"right": outcomes[DENSE]}))
        order = partial(by_interval, {name: float(number) for number, name in enumerate(names)})
        series = [[name] for name in names]
        rounds = for_speed(table, series, [], "right", 64, 1.9, order)
        list(compare(table, rounds, evaluator(outcomes), Runner(progress=False)))
        assert evaluated(table, min(names, key=partial(order, table))) == samples


def test_a_speed_without_candidates_evaluates_the_dense_model_alone() -> None:
    table = Table(times={"batch": {DENSE: [1.0]}})
    assert not [*unclear_at(table, [], [], 2.0)]
    assert [*for_speed(table, [], [], "right", FIRST, 2.0, lambda *_: (0.0, 0.0))] == [[]]


@pytest.mark.parametrize("is_steady", [False, True])
def test_what_may_miss_a_wanted_speed_is_timed_further(is_steady: bool) -> None:
    """Two of three readings are too fast, and of all that follow none."""
    rounds = {DENSE: [12.0] * 3, "lucky": [12.0, 7.5, 7.5], "smaller": [6.0] * 3, "varying": [6.0] * 3}
    if is_steady:
        rounds["lucky"] = [7.5] * 3
    table = Table(times={"batch": {**rounds, "slow": [11.0] * 3}})
    ones = np.ones(SAMPLES)
    table.add(DENSE, 0, Measured({}, samples=SAMPLES, outcomes={"right": ones}))
    series = [["lucky", "smaller"], ["varying"], ["slow"]]
    unclear = list(unclear_at(table, series, ["varying"], 1.5))
    # Its cost depends on the samples, of which few rounds read few.
    assert unclear == (["varying"] if is_steady else ["lucky", "varying"])
    further = {DENSE: [12.0] * 10, "varying": [6.0] * 10, "lucky": [12.0] * 10}
    table.add_rounds({"batch": {name: further[name] for name in (DENSE, *unclear)}})
    order = partial(order_in, {"lucky": 1.0, "smaller": 6.0, "varying": 7.0, "slow": 11.0})
    looks = compare(
        table,
        for_speed(table, series, [], "right", FIRST, 1.5, order),
        evaluator(dict.fromkeys([*rounds, "slow"], ones)),
        Runner(progress=False),
    )
    first = ["lucky", "varying"] if is_steady else ["smaller", "varying"]
    assert [look.name for look in looks][:2] == first
