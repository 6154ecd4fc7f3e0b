"""The choice of a model: what a sentence says follows from the intervals, and holds on other samples."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable

import numpy as np
import pytest

from mmod.analysis.statistics import Estimate, change_of, share_of
from mmod.analysis.table import FEWEST, Measured, Table, interval_of
from mmod.analysis.timing import Spread
from mmod.planning.choice import NOISE, Alternative, Recommendation, beside_controls, missing_samples

TOLERANCES = (0.01, 0.02, 0.05, 0.1)
# A front as models have it: faster ones lose more, some near a tolerance.
TRUE_LOSS = {1.1: 0.0, 1.2: 0.013, 1.3: 0.004, 1.4: 0.03, 1.6: 0.048, 1.8: 0.12, 2.2: 0.3}


def drawn(rng: np.random.Generator, samples: int, tolerance: float) -> Recommendation:
    """Return the choice by random samples among models with the true losses."""
    models = []
    for speed, lost in TRUE_LOSS.items():
        score = share_of(rng.random(samples) >= lost)
        loss = Estimate(1 - score.value, 1 - score.high, 1 - score.low)
        models.append(Alternative(f"at {speed}", Spread(speed, speed, speed), loss, samples, f"{100 * score} %"))
    return Recommendation(models, tolerance, "images", "in batches of 8")


def true_loss(model: Alternative) -> float:
    return TRUE_LOSS[model.speedup.median]


@pytest.mark.parametrize("tolerance", TOLERANCES)
@pytest.mark.parametrize("samples", [64, 256, 1024])
def test_what_is_told_to_be_used_keeps_the_tolerance(samples: int, tolerance: float) -> None:
    rng = np.random.default_rng(0)
    choices = [drawn(rng, samples, tolerance) for _ in range(300)]
    for choice in choices:
        assert choice.sentence.startswith("Use ") == (choice.best is not None)
    kept = [true_loss(choice.best) <= tolerance for choice in choices if choice.best is not None]
    assert not kept or np.mean(kept) >= 0.95
    # Where nothing is open, few faster models that keep the tolerance are missed.
    decided = [choice for choice in choices if choice.best is not None and not choice.undecided]
    fastest = max(speed for speed, lost in TRUE_LOSS.items() if lost <= tolerance)
    found = [NOISE * choice.best.speedup.median >= fastest for choice in decided if choice.best is not None]
    assert len(found) < 20 or np.mean(found) >= 0.9


@pytest.mark.parametrize("samples", [64, 256, 1024])
def test_a_stricter_tolerance_allows_no_more(samples: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        choice = drawn(rng, samples, 0.0)
        speeds = []
        for tolerance in np.linspace(0, 0.3, 31):
            best = dataclasses.replace(choice, tolerance=float(tolerance)).best
            speeds.append(1.0 if best is None else best.speedup.median)
        # Models as fast within the noise are told apart by their loss.
        assert all(strict <= NOISE * loose for strict, loose in itertools.pairwise(speeds))


def test_a_speed_is_reached_with_the_best_worse_end_and_a_warning() -> None:
    rng = np.random.default_rng(0)
    for tolerance in TOLERANCES:
        choice = drawn(rng, 256, tolerance)
        for speed in (1.05, 1.25, 1.5, 2.0):
            chosen = choice.at_speed(speed)
            assert chosen is not None
            reaching = [model for model in choice.models if NOISE * model.speedup.median >= speed]
            assert chosen.loss.high == min(model.loss.high for model in reaching)
            sentence = choice.sentence_at(speed)
            # No verb asks to use what may lose more than the tolerance.
            kept = chosen.loss.high <= tolerance
            assert sentence.startswith(f"For {speed:g} times the speed use {chosen.name}: ") == kept
            nothing = f"Nothing tried is sure to stay within {choice.limit} at {speed:g} times the speed "
            assert (sentence.startswith(nothing) and f": least lost is {chosen.name}, " in sentence) != kept
            worst = f", but may lose up to {100 * chosen.loss.high:.1f} points"
            assert (worst in sentence) == (chosen.loss.low <= tolerance < chosen.loss.high)
            assert ("clearly more lost than" in sentence) == (chosen.loss.low > tolerance)
            # What keeps the tolerance is told beside what may not.
            if choice.named not in (None, chosen) and not kept:
                assert choice.named is not None
                which = "within" if choice.best is not None else "that probably stays within"
                assert f" The fastest {which} {choice.limit} is {choice.named.name}: " in sentence
            if speed in (1.25, 1.5, 2.0):
                (line,) = [line for line in choice.text.splitlines() if line.startswith(f"- {speed:g} times: ")]
                # The model of the sentence, or of a line above, is not described twice.
                if line.endswith("as above"):
                    assert line == f"- {speed:g} times: {chosen.name}, as above"
                    assert f"{chosen.name}, {chosen.speedup.median:.2f} times" in choice.text or chosen is choice.best
                else:
                    assert line.startswith(f"- {speed:g} times: {chosen.name}, ")
                    assert (worst in line) == (worst in sentence)
    assert choice.at_speed(2.5) is None
    assert choice.sentence_at(2.5).startswith(
        "Nothing tried is 2.5 times as fast in batches of 8; the fastest is at 2.2"
    )


def test_of_what_is_undecided_the_fastest_that_probably_keeps_the_tolerance_is_named_first() -> None:
    models = [
        Alternative(name, Spread(speed, speed, speed), Estimate(loss, -0.04, high), 60, f"{-100 * loss:+.1f} points")
        for name, speed, loss, high in (("risky", 2.0, 0.04, 0.12), ("fast", 1.7, 0.01, 0.06), ("mild", 1.1, 0.0, 0.04))
    ]
    choice = Recommendation(models, 0.02, "images", "in batches of 8")
    assert choice.sentence == (
        "Undecided: keep the dense model in batches of 8 for now. The fastest that probably stays within 2 points is "
        "fast, 1.70 times as fast at -1.0 points, but may lose up to 6.0 points; about 440 more images would decide, "
        "probably for it. Undecided too: risky (2.00 times as fast at -4.0 points; about 710 more images would decide, "
        "probably against it), mild (1.10 times as fast at -0.0 points; about 180 more images would decide, probably "
        "for it)."
    )
    risky_alone = Recommendation(models[:1], 0.02, "images", "in batches of 8")
    assert risky_alone.named is None
    assert risky_alone.sentence == (
        "Nothing is likely to stay within 2 points in batches of 8: keep the dense model. Not yet excluded: risky "
        "(2.00 times as fast at -4.0 points; about 710 more images would decide, probably against it)."
    )


@pytest.mark.parametrize("samples", [64, 256, 1024])
def test_a_choice_at_random_is_compared_and_never_advised(samples: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        choice = drawn(rng, samples, 0.02)
        models = [dataclasses.replace(model, name="a", at_random=True) for model in choice.models]
        both = dataclasses.replace(choice, models=[*models, *choice.models])
        assert both.recommended == choice.recommended
        assert both.text.replace("Nothing tried but a choice at random", "Nothing tried") == choice.text


@pytest.mark.parametrize("at_random", [True, False])
def test_a_control_that_chooses_is_advised(at_random: bool) -> None:
    """A method that others are compared with may be the best of all; what chance keeps is only told of."""
    same = Estimate(0.0, -0.01, 0.01)
    control = Alternative("b", Spread(2.0, 1.9, 2.1), same, 256, "+0.0 points", at_random=at_random)
    lost = Estimate(0.3, 0.25, 0.35)
    model = Alternative("a", Spread(1.05, 1.04, 1.06), lost, 256, "-30.0 points", control="b")
    choice = Recommendation([control, model], 0.02, "images", "in batches of 8")
    if not at_random:
        assert choice.sentence.startswith("Use b: 2.00 [1.90, 2.10] times as fast")
        return
    assert choice.sentence.startswith("Nothing tried but a choice at random pays")
    assert choice.sentence_at(1.5).startswith("Nothing tried but a choice at random is 1.5 times as fast")
    assert choice.by_speed == "Nothing tried but a choice at random is 1.25 times as fast in batches of 8."


def outcomes(kind: str, lost: float, rng: np.random.Generator, samples: int) -> np.ndarray:
    """Return losses of samples: 1 for one that is lost, and of changes -1 for one that is won."""
    draw_N = rng.random(samples)
    if kind == "share":
        return (draw_N < lost).astype(float)
    # Beside the loss, one sample in thirty changes each way.
    return np.where(draw_N < 1 / 30 + lost, 1.0, np.where(draw_N < 2 / 30 + lost, -1.0, 0.0))


@pytest.mark.parametrize("tolerance", [0.02, 0.05])
@pytest.mark.parametrize(("kind", "rule"), [("share", share_of), ("change", change_of)])
def test_about_as_many_samples_as_are_missing_decide_and_as_is_said(
    kind: str, rule: Callable[[np.ndarray], Estimate], tolerance: float
) -> None:
    rng = np.random.default_rng(0)
    for samples, rate in itertools.product((64, 256), (0.0, 0.4, 2.5)):
        first_N = outcomes(kind, rate * tolerance, rng, samples)
        loss = rule(first_N)
        model = Alternative("a", Spread(2.0, 2.0, 2.0), loss, samples, "much")
        choice = Recommendation([model], tolerance, "images", "in batches of 8")
        missing = missing_samples(loss, tolerance, samples)
        if model not in choice.undecided or f"about {missing:,} more images would decide" not in choice.sentence:
            continue
        numbers = sorted({*map(round, np.geomspace(1, 8 * missing, 60))})
        needed, ways = [], []
        # Further samples, which lose as those that were measured, until the interval decides.
        for _ in range(80):
            more_N = rng.choice(first_N, numbers[-1])
            grown = {number: rule(np.append(first_N, more_N[:number])) for number in numbers}
            decided = [n for n, one in grown.items() if one.high <= tolerance or one.low > tolerance]
            needed.append(decided[0] if decided else numbers[-1])
            ways.append(bool(decided) and grown[decided[0]].high <= tolerance)
        median = np.median(needed)
        assert 0.75 * median - 5 <= missing <= 2.5 * median + 5, (samples, rate)
        way = "for" if np.mean(ways) > 0.5 else "against"
        assert f"would decide, probably {way} it" in choice.sentence, (samples, rate)


def test_samples_that_are_missing_follow_from_the_intervals_rule() -> None:
    nothing_lost = change_of(np.zeros(80))
    assert missing_samples(nothing_lost, 0.02, 80) == 57
    assert [change_of(np.zeros(80 + more)).high <= 0.02 for more in (56, 57)] == [False, True]
    # Too close to the tolerance, or no interval yet: a lower bound.
    assert missing_samples(Estimate(0.02, 0.0, 0.1), 0.02, 64) == 3_200
    assert missing_samples(Estimate(0.0), 0.02, 4) == FEWEST - 4


@pytest.mark.parametrize("samples", [2, 4, 16, FEWEST - 1, FEWEST, 128, 256])
def test_cosines_of_few_samples_do_not_hide_those_that_lose_most(samples: int) -> None:
    rng = np.random.default_rng(0)
    within = []
    for _ in range(200):
        # One sample in twenty loses half, and more is lost than the tolerance.
        table = Table()
        cosine_N = 1 - np.where(rng.random(samples) < 0.05, 0.5, 0.001 * rng.random(samples))
        table.add("a", 0, Measured({}, outcomes={"cosine": cosine_N}))
        score = interval_of(table, "cosine", "a")
        assert score.has_interval == (samples >= FEWEST)
        within.append(1 - score.low <= 0.02)
    assert np.mean(within) <= 0.07


def test_without_intervals_only_speeds_are_told() -> None:
    models = [
        Alternative(name, Spread(speed, speed, speed), Estimate(loss), 100, f"{-100 * loss:+.1f} points")
        for name, speed, loss in (("a", 1.6, 0.02), ("b", 1.4, 0.01))
    ]
    choice = Recommendation(models, 0.02, "images", "for single images")
    assert choice.best is None
    assert choice.text.splitlines() == [
        "Least lost for single images, by the worse end of each interval, speeds within 3 %:",
        "",
        "- 1.25 times: b, 1.40 times as fast at -1.0 points",
        "- 1.5 times: a, 1.60 times as fast at -2.0 points",
        "- 2 times: nothing tried is as fast",
    ]


@pytest.mark.parametrize(
    ("alone", "to_control", "agreement", "told"),
    [
        (None, None, None, ""),
        (Spread(1.1, 1.0, 1.2), None, None, ""),
        (
            Spread(0.82, 0.8, 0.9),
            None,
            None,
            "For single images it is slower than the dense model: 0.82 [0.80, 0.90] times as fast.",
        ),
        (
            None,
            Estimate(4.0, 1.0, 7.0),
            None,
            "It is better than its control, random, by 4.0 [1.0, 7.0] points: what it keeps matters.",
        ),
        (
            None,
            Estimate(0.0, -1.0, 1.0),
            None,
            "It is within 2 points of its control, random (+0.0 [-1.0, +1.0] points): on these samples it hardly "
            "matters what is kept.",
        ),
        (
            None,
            Estimate(0.0, -1.0, 1.0),
            Estimate(9.0, 2.0, 16.0),
            "It is within 2 points of its control, random (+0.0 [-1.0, +1.0] points); by agreement with the dense "
            "model it is better (+9.0 [+2.0, +16.0] points).",
        ),
        # No significant difference is not the same as no difference.
        (
            None,
            Estimate(3.8, -0.6, 8.1),
            Estimate(0.5, -1.0, 2.0),
            "64 images cannot tell whether it is better than its control, random (+3.8 [-0.6, +8.1] points).",
        ),
        (
            None,
            Estimate(-3.8, -8.1, 0.6),
            Estimate(-9.0, -16.0, -2.0),
            "64 images cannot tell whether it is better than its control, random (-3.8 [-8.1, +0.6] points); by "
            "agreement with the dense model it is worse (-9.0 [-16.0, -2.0] points).",
        ),
        (
            None,
            Estimate(-2.0, -3.0, -1.0),
            None,
            "It is worse than its control (-2.0 [-3.0, -1.0] points): random keeps what matters more.",
        ),
        (None, Estimate(3.0), None, ""),
    ],
)
def test_what_a_choice_is_worse_in_is_said_in_words(
    alone: Spread | None, to_control: Estimate | None, agreement: Estimate | None, told: str
) -> None:
    fast = Spread(1.5, 1.4, 1.6)
    model = Alternative(
        "a", fast, Estimate(0.0, -0.01, 0.01), 256, "+0.0 points", alone, "random", to_control, agreement
    )
    control = Alternative("random", fast, Estimate(0.0, -0.01, 0.01), 64, "+0.0 points")
    choice = Recommendation([model, control], 0.02, "images", "in batches of 8")
    use = "Use a: 1.50 [1.40, 1.60] times as fast in batches of 8, at +0.0 points."
    assert choice.sentence == f"{use} {told}".rstrip()
    harmed = dataclasses.replace(choice, harm="but the dense model fell")
    assert harmed.sentence == f"{use.removesuffix('.')}; but the dense model fell. {told}".rstrip()


@pytest.mark.parametrize(
    ("to_control", "told"),
    [
        # An interval that holds zero is equality only where all of it is small.
        (
            {"a": Estimate(0.0, -1.0, 1.0), "b": Estimate(2.0, -0.1, 4.0)},
            "Within 2 points .*: a\\. On these samples it hardly matters .* Too few samples .*: b\\.$",
        ),
        # Where random tokens lose less, it matters what is kept.
        ({"a": Estimate(-2.0, -3.0, -1.0), "b": None}, "Clearly worse .* random tokens: a\\.$"),
        ({"a": Estimate(0.0, -1.0, 1.0), "b": Estimate(2.0, 0.1, 4.0)}, "Clearly better .*: b\\. Within .*: a\\."),
        ({"b": Estimate(2.0, 0.1, 4.0)}, "Clearly better than their controls, such as random tokens: b\\.$"),
        # Equal in accuracy, and not in what it answers.
        ({"same": Estimate(0.0, -1.0, 1.0)}, "Too few samples .*: same \\(better by agreement\\)\\.$"),
        # Of one seed it is not known.
        ({"a": Estimate(0.0, seeds=1), "b": None}, "$"),
    ],
)
def test_what_is_better_than_its_control_is_named(to_control: dict[str, Estimate | None], told: str) -> None:
    assert re.match(told, beside_controls(to_control, 0.02, {"same": Estimate(0.1, 0.05, 0.2)}))
