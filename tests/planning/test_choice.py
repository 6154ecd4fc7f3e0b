"""The choice of a model: what a sentence says follows from the intervals, and holds on other samples."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from mmod.analysis.statistics import (
    FEWEST,
    Estimate,
    chance_within,
    change_of,
    keeps,
    least_samples,
    missing_samples,
    share_of,
)
from mmod.analysis.table import Measured, Table, interval_of
from mmod.analysis.timing import Spread
from mmod.planning.choice import (
    NOISE,
    USE,
    AdviceRow,
    Recommendation,
    points,
)
from mmod.planning.verdict import beside_controls, verdict_of

TOLERANCES = (0.01, 0.02, 0.05, 0.1)
# A front as models have it: faster ones lose more, some near a tolerance.
TRUE_LOSS = {1.1: 0.0, 1.2: 0.013, 1.3: 0.004, 1.4: 0.03, 1.6: 0.048, 1.8: 0.12, 2.2: 0.3}


def drawn(rng: np.random.Generator, samples: int, tolerance: float) -> Recommendation:
    """Return the choice by random samples among models with the true losses."""
    models = []
    for speed, lost in TRUE_LOSS.items():
        score = share_of(rng.random(samples) >= lost)
        loss = Estimate(1 - score.value, 1 - score.high, 1 - score.low)
        models.append(alternative(f"at {speed}", speed, loss, samples))
    return among(models, tolerance)


def alternative(name: str, speed: float, loss: Estimate, samples: int = 64, **more: Any) -> AdviceRow:
    change = Estimate(-loss.value, -loss.high, -loss.low)
    return AdviceRow(name, name, Spread(speed, speed, speed), Estimate(1.0), change, samples, **more)


def among(models: Sequence[AdviceRow], tolerance: float = 0.02, **more: Any) -> Recommendation:
    return Recommendation(models, tolerance, "accuracy", "images", "batches of 8", **more)


def rows_of(*choices: Recommendation) -> list[list[str]]:
    """Return the cells of the rows of a verdict."""
    return [list(row) for row in verdict_of(choices).table.rows[1:]]


def true_loss(model: AdviceRow) -> float:
    return TRUE_LOSS[model.speedup.median]


@pytest.mark.parametrize("tolerance", TOLERANCES)
def test_where_no_answer_changes_the_least_number_of_samples_is_within_the_tolerance(tolerance: float) -> None:
    for is_share, estimate in ((True, share_of), (False, change_of)):
        least = least_samples(tolerance, is_share)
        for number in (least - 1, least):
            mean = estimate(np.full(number, float(is_share)))
            lost = Estimate(is_share - mean.value, is_share - mean.high, is_share - mean.low)
            assert keeps(lost, tolerance) == (number == least)


def test_where_nothing_is_within_the_tolerance_it_says_from_how_many_samples_on_anything_can_be() -> None:
    equal = change_of(np.zeros(100))
    # Not only where a recipe is faster.
    for speed in (0.8, 1.5):
        choice = among([alternative("a", speed, equal, 100)])
        told = 'Even a recipe that changes no answer is a "yes" only from 137 images on; these are 100.'
        assert verdict_of([choice, choice]).sentences[2:] == [told]
    labelled = alternative("a", 1.5, equal, 100)
    unlabelled = dataclasses.replace(labelled, score=share_of(np.ones(100)), accuracy=None)
    agreement = dataclasses.replace(choice, models=[unlabelled], measure="agreement")
    assert "only from 189 images on; these are 100." in agreement.too_few
    # Fewer tell of what gains, as its row says.
    lost = change_of(np.array([-1.0] + [0.0] * 31))
    gaining = among([alternative("a", 1.5, lost, 32)])
    assert gaining.too_few.endswith("from 137 images on; these are 32. Of one that gains, fewer may tell.")
    assert gaining.outcome(gaining.models[0]) == "probably: 48 more images would tell"
    # Enough images, a wider tolerance, scores that are no answers, seeds, and no number that suffices.
    cosine = dataclasses.replace(unlabelled, score=Estimate(0.97, 0.9, 0.99))
    for silent in (
        among([alternative("a", 1.5, change_of(np.zeros(137)), 137)]),
        among([alternative("a", 1.5, Estimate(0.1, -0.1, 0.3), 137)]),
        among([labelled], tolerance=0.03),
        among([labelled], tolerance=0.0),
        among([]),
        dataclasses.replace(choice, models=[cosine], measure="cosine of features"),
        dataclasses.replace(choice, measure="mean IoU"),
        dataclasses.replace(choice, samples="seeds"),
    ):
        assert silent.too_few == ""


@pytest.mark.parametrize("samples", [64, 256, 1024])
def test_what_is_told_to_be_used_keeps_the_tolerance(samples: int) -> None:
    rng = np.random.default_rng(0)
    draws = [drawn(rng, samples, 0.0) for _ in range(150)]
    for tolerance in TOLERANCES:
        choices = [dataclasses.replace(choice, tolerance=tolerance) for choice in draws]
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


def test_a_speed_is_reached_with_the_best_worse_end() -> None:
    rng = np.random.default_rng(0)
    for tolerance in TOLERANCES:
        choice = drawn(rng, 256, tolerance)
        for speed in (1.05, 1.25, 1.5, 2.0):
            chosen = choice.at_speed(speed)
            assert chosen is not None
            reaching = [model for model in choice.models if NOISE * model.speedup.median >= speed]
            ends = {model.name: f"{100 * model.loss.high:.1f}" for model in reaching}
            assert ends[chosen.name] == min(ends.values(), key=float)
            # Ends that are printed alike are a tie, which goes to the faster.
            tied = [model.speedup.median for model in reaching if ends[model.name] == ends[chosen.name]]
            assert chosen.speedup.median == max(tied)
            wanted = dataclasses.replace(choice, speed=speed)
            # No verb asks to use what may lose more than the tolerance.
            kept = chosen.loss.high <= tolerance
            assert (wanted.used == chosen) == kept
            start = f"Use {chosen.name} "
            if not kept:
                start = (
                    f"Nothing tried that is {speed:g} times as fast ({speed / 1.03:.2f} or more) for batches of 8 is "
                )
                start += f"surely within {choice.limit}. Of what is as fast, {chosen.name} loses least: "
            assert wanted.sentence.startswith(start)
            least = f", the least at {speed:g} times the speed ({speed / 1.03:.2f} or more)."
            assert wanted.sentence.endswith(least) == kept
            assert chosen.name in wanted.sentence
            # What keeps the tolerance is told beside what may not.
            names = verdict_of([wanted]).named
            assert names[0] == chosen.name
            assert choice.best is None or choice.best.name in names
            if speed in (1.25, 1.5, 2.0):
                (row,) = [row for row in rows_of(choice) if row[1] == chosen.name]
                least, *most = map(float, re.findall("[0-9.]+(?= to| times)", row[0]))
                assert least <= speed <= max([least, *most])
    assert choice.at_speed(2.5) is None
    unreached = dataclasses.replace(choice, speed=2.5).sentence
    start = "Nothing tried is 2.5 times as fast (2.43 or more) for batches of 8. The fastest is at 2.2: 2.20 times as "
    assert unreached.startswith(start)


def test_what_has_a_star_at_a_wanted_speed_has_a_row_and_lines() -> None:
    named = alternative("named", 1.4, Estimate(0.01, 0.0, 0.03), on_front=True)
    starred = alternative("starred", 2.2, Estimate(0.01, -0.02, 0.05), on_front=True)
    plain, slow = alternative("plain", 1.8, starred.loss), alternative("slow", 1.2, starred.loss, on_front=True)
    choice = among([starred, plain, named, slow], speed=1.4)
    assert choice.sentence.startswith("Nothing tried that is 1.4 times as fast")
    roles = [("named", "batches of 8, 1.4 times"), ("starred", "batches of 8, starred")]
    assert [(model.name, role) for model, role in choice.roles] == roles
    assert verdict_of([choice]).named == ["named", "starred"]
    # Without a wanted speed, stars are no roles.
    assert not any("starred" in role for _, role in dataclasses.replace(choice, speed=None).roles)


def test_what_is_printed_alike_is_a_tie_which_goes_to_the_faster() -> None:
    # Both ends are printed as 1.8 points.
    slow = alternative("slow", 1.54, Estimate(-0.027, -0.071, 0.0176))
    fast = alternative("fast", 1.58, Estimate(0.0, -0.018, 0.0184))
    for choice in (among([slow, fast]), among([slow, fast], speed=1.5)):
        assert choice.used == fast
    worse = alternative("fast", 1.58, Estimate(0.0, -0.018, 0.0186))
    assert among([slow, worse], speed=1.5).used == slow


def test_without_anything_to_compare_the_dense_model_is_kept() -> None:
    for choice in (among([]), dataclasses.replace(among([]), speed=1.5)):
        assert choice.sentence.startswith("Keep the dense model for batches of 8: nothing tried is ")
        assert verdict_of([choice]).named == []


def test_where_quartiles_of_speeds_overlap_the_medians_decide_what_is_as_fast() -> None:
    def of(name: str, low: float, median: float, high: float, lost: float) -> AdviceRow:
        model = alternative(name, median, Estimate(lost, lost - 0.001, lost + 0.001))
        return dataclasses.replace(model, speedup=Spread(median, low, high))

    lossy = of("lossy", 2.0, 2.1, 2.2, 0.05)
    for mild, used in ((of("mild", 1.44, 1.47, 1.5, 0.01), "mild"), (of("mild", 1.42, 1.44, 1.48, 0.01), "quick")):
        models = [lossy, of("quick", 1.47, 1.5, 1.53, 0.015), mild]
        for choice in (among(models), among(models, speed=1.5)):
            assert choice.used is not None
            assert choice.used.name == used
    # What is used by the medians stands between the others.
    three = [of("a", 1.96, 2.0, 2.04, 0.015), of("b", 1.92, 1.97, 2.02, 0.01), of("c", 1.5, 1.8, 2.2, 0.003)]
    assert among(three).sentence.startswith("Use b for")


def test_of_what_is_undecided_the_fastest_that_is_probably_within_the_tolerance_is_named_first() -> None:
    risky = alternative("risky", 2.0, Estimate(0.04, -0.04, 0.12), 60)
    fast = alternative("fast", 1.7, Estimate(0.0, -0.04, 0.06), 60)
    mild = alternative("mild", 1.1, Estimate(0.0, -0.04, 0.04), 60)
    choice = among([risky, fast, mild])
    assert choice.sentence == (
        "Keep the dense model for batches of 8 for now. fast is probably within 2 points: 1.70 times as fast, "
        "+0.0 [-6.0, +4.0] points of accuracy. 260 more images would tell."
    )
    # From the slowest on, whatever the sentence names first.
    assert verdict_of([choice]).named[0] == "fast"
    assert rows_of(choice) == [
        ["batches of 8, undecided", "mild", "1.10", "+0.0 [-4.0, +4.0]", "probably: 180 more images would tell"],
        [
            "batches of 8, 1.25 to 1.5 times",
            "fast",
            "1.70",
            "+0.0 [-6.0, +4.0]",
            "probably: 260 more images would tell",
        ],
        ["batches of 8, 2 times", "risky", "2.00", "-4.0 [-12.0, +4.0]", "probably not: 710 more images would tell"],
    ]
    assert among([risky]).sentence == (
        "Keep the dense model for batches of 8: nothing clearly faster is likely to be within 2 points."
    )
    assert [row[1] for row in rows_of(among([risky]))] == ["risky"]
    # What is within the tolerance, and faster by its median alone, makes no sentence false.
    hardly = dataclasses.replace(
        alternative("hardly", 1.07, Estimate(0.0, -0.01, 0.01)), speedup=Spread(1.07, 0.94, 1.1)
    )
    at_limit = alternative("a", 1.5, Estimate(0.02, -0.01, 0.05))
    for beside in (risky, at_limit):
        told = " hardly is within 2 points, but not clearly faster: 1.07 [0.94, 1.10] times."
        assert among([hardly, beside]).sentence == among([beside]).sentence + told
        row = ["batches of 8", "hardly", "1.07 [0.94, 1.10]", "+0.0 [-1.0, +1.0]", "yes; not clearly faster"]
        assert row in rows_of(among([hardly, beside]))
    # Beside what is probably within it too, and not beside what is to be used, or where it is no faster.
    assert among([hardly, mild]).sentence.endswith(f"points of accuracy. 180 more images would tell.{told}")
    assert "not clearly" not in among([hardly, alternative("used", 1.5, Estimate(0.0, -0.01, 0.01))]).sentence
    slow = dataclasses.replace(hardly, speedup=Spread(1.02, 0.94, 1.1))
    assert among([slow, risky]).sentence == among([risky]).sentence


def test_what_is_printed_decides_to_the_digit() -> None:
    def of(low: float, median: float = 1.3, speed: float | None = None) -> Recommendation:
        model = alternative("a", median, Estimate(0.0, -0.01, 0.01))
        return among([dataclasses.replace(model, speedup=Spread(median, low, 1.4))], speed=speed)

    # 1.03 and 1.02, as printed.
    for low, is_used in ((1.0251, True), (1.0249, False)):
        choice = of(low)
        assert (choice.used is not None) == is_used
        assert ("not clearly faster" in str(verdict_of([choice]))) == (not is_used)
    # 1.36 or more are 1.4 times: 1.36 and 1.35, as printed.
    assert [of(1.2, median, 1.4).used is not None for median in (1.3551, 1.3549)] == [True, False]


@pytest.mark.parametrize("speed", [1.46, 1.6])
def test_of_what_is_probably_within_the_tolerance_and_as_fast_the_least_loss_is_named(speed: float) -> None:
    """Times of a few rounds cannot tell apart what is about as fast."""
    fastest = alternative("fastest", speed, Estimate(0.0, -0.04, 0.04))
    least = alternative("least", 1.45, Estimate(-0.01, -0.045, 0.024))
    named = among([fastest, least]).named
    assert named is not None
    assert named.name == ("least" if speed < 1.5 else "fastest")


def test_what_is_hardly_faster_is_said_to_be() -> None:
    for speed, told in ((1.094, ", though it is hardly faster: 1.09 times"), (1.096, ": 1.10 times")):
        choice = among([alternative("a", speed, Estimate(0.0, -0.01, 0.01))])
        assert choice.sentence.startswith(f"Use a for batches of 8{told} as fast")
        busy = dataclasses.replace(choice, is_unsteady=True).sentence
        assert busy.startswith(f"Use a for batches of 8, if an idle machine confirms its speed{told} as fast")
        # What more samples may allow is faster.
        faster = among([*choice.models, alternative("b", 1.4, Estimate(0.005, -0.01, 0.025))]).sentence
        assert (" b is probably within 2 points: 1.40 times as fast, -0.5 [" in faster) == ("hardly" in told)
        assert faster.endswith(" more images would tell.") == ("hardly" in told)


def test_a_row_says_why_the_sentence_does_not_name_it_though_its_median_is_faster() -> None:
    sure = alternative("sure", 1.08, Estimate(0.0, -0.03, 0.04), 60)
    wide = dataclasses.replace(
        alternative("wide", 1.25, Estimate(-0.02, -0.06, 0.03), 60), speedup=Spread(1.25, 0.93, 1.4)
    )
    choice = among([sure, wide])
    assert "for now. sure is probably within 2 points: 1.08" in choice.sentence
    rows = {row[1]: row[4] for row in rows_of(choice)}
    assert "faster" not in rows["sure"]
    assert rows["wide"].endswith(" more images would tell; not clearly faster")
    # A wanted speed is one of the medians.
    assert "clearly" not in str(verdict_of([dataclasses.replace(choice, speed=1.2)]))


def test_whether_a_loss_at_the_tolerance_is_within_it_is_unclear_and_how_many_samples_would_tell() -> None:
    at_limit = alternative("a", 1.5, Estimate(0.02, -0.01, 0.05))
    assert chance_within(at_limit.loss, 0.02) == 0.5
    # No number decides about a loss of exactly the tolerance.
    # The sentence has what its row has, of the model that takes fewest.
    beside = alternative("b", 1.6, Estimate(0.015, -0.02, 0.05), 58)
    near = among([at_limit, beside])
    assert near.outcome(beside) == "unclear: `--tolerance 0.05` would tell"
    assert near.sentence.endswith("The loss of b is too close to 2 points to tell: `--tolerance 0.05` would.")
    # The interval of few images is wide, and a tolerance as wide is no advice.
    beside = alternative("b", 1.6, Estimate(0.015, -0.02, 0.051), 58)
    near = among([at_limit, beside])
    told = "These images cannot tell of b, nor would 50 times as many."
    assert near.sentence.endswith(f"unclear whether anything clearly faster is within 2 points. {told}")
    assert near.outcome(beside) == "unclear"
    # So many more that nobody has them are no advice: a tolerance that decides is, in the sentence and in its row.
    assert among([at_limit]).sentence == (
        "Keep the dense model for batches of 8: it is unclear whether anything clearly faster is within 2 points. The "
        "loss of a is too close to 2 points to tell: `--tolerance 0.05` would."
    )
    assert among([at_limit]).outcome(at_limit) == "unclear: `--tolerance 0.05` would tell"
    assert among([at_limit], tolerance=0.05).used == at_limit
    close = alternative("a", 1.5, Estimate(0.012, -0.0211, 0.0451))
    (named,) = re.findall(
        r"accuracy\. The loss is .* to tell: `--tolerance (0\.046)` would\.$", among([close]).sentence
    )
    assert [among([close], tolerance=float(named) - below).used for below in (0.0, 0.001)] == [close, None]
    # None does about a loss that may be all; of seeds the loss is not known so well.
    lost = among([alternative("a", 1.5, Estimate(0.5, 0.0, 1.0))], tolerance=0.5)
    assert lost.sentence.endswith("These images cannot tell of a, nor would 50 times as many.")
    # Where no number is known to decide, of many images a wider one is named, and at 0 of few too.
    for tolerance, value, high, samples in ((0.0, 0.0, 0.06, 300), (0.0, 0.0, 0.24, 12), (0.4, 0.4, 0.46, 300)):
        open_ = alternative("a", 1.5, Estimate(value, 2 * value - high, high), samples)
        told = f"The loss of a is too close to {100 * tolerance:g} points to tell: `--tolerance {high:g}` would."
        assert among([open_], tolerance).sentence.endswith(told)
    wide = among([alternative("a", 1.5, Estimate(0.02, -0.02, 0.06), 300)])
    assert wide.outcome(wide.models[0]) == "unclear: `--tolerance 0.06` would tell"
    assert dataclasses.replace(near, samples="seeds").sentence.endswith("2 points. More seeds would tell of b.")
    # It is not named as what is probably within, and neither is what is a little below.
    for value, is_named in ((0.02, False), (0.019, False), (0.0, True)):
        choice = among([alternative("a", 1.5, Estimate(value, -0.01, 0.05))])
        assert (choice.named is not None) == is_named
        reason = " for now. a is probably" if is_named else ": it is unclear whether anything clearly faster is"
        assert choice.sentence.startswith(f"Keep the dense model for batches of 8{reason} within 2 points")
        (row,) = [row for row in rows_of(choice) if row[1] == "a"]
        assert row[4].startswith("probably: " if is_named else "unclear")
    # Whichever way it is told, by seeds too.
    seeds = dataclasses.replace(choice, samples="seeds")
    assert seeds.outcome(at_limit) == "unclear: more seeds would tell"


@pytest.mark.parametrize("samples", [64, 256, 1024])
def test_all_that_is_named_has_a_row_with_its_figures_and_what_is_used_a_mark(samples: int) -> None:
    rng = np.random.default_rng(0)
    for tolerance in TOLERANCES:
        batches = drawn(rng, samples, tolerance)
        # Single images take other times.
        models = [dataclasses.replace(model, speedup=Spread(0.97, 0.96, 0.98)) for model in batches.models]
        models[1] = dataclasses.replace(models[1], speedup=Spread(1.31, 1.29, 1.33))
        single = dataclasses.replace(batches, models=models, where="single images")
        for choices in ([batches, single], [dataclasses.replace(batches, speed=1.5)]):
            verdict = verdict_of(choices)
            lost = {model.name: points(model.loss) for model in batches.models}
            rows = verdict.table.rows[1:]
            assert {row[1] for row in rows} - {"none as fast"} == {*verdict.named}
            assert all(row[3] == lost[row[1]] for row in rows if row[1] in lost)
            marks = sum(row[4].endswith(USE) for row in rows)
            assert marks == sum(one.used is not None for one in choices)
            # Of a wanted speed the sentence names a row, whether it is to be used or not.
            (marked,) = [row[1] for row in rows if "<- " in row[4]] if choices[0].speed else [None]
            assert marked is None or marked in verdict.sentences[0]


def test_single_images_have_a_sentence_and_rows_of_their_own() -> None:
    same = Estimate(0.0, -0.01, 0.01)
    one = alternative("a", 1.5, same, 256)
    slow = dataclasses.replace(one, speedup=Spread(0.82, 0.8, 0.9))
    single = dataclasses.replace(among([slow]), where="single images")
    verdict = verdict_of([among([one]), single])
    used = "Use a for batches of 8: 1.50 times as fast, +0.0 [-1.0, +1.0] points of accuracy."
    slower = (
        "Keep the dense model for single images: nothing tried is clearly faster and within 2 points. a is slower "
        "than the dense model there: 0.82 [0.80, 0.90] times."
    )
    assert verdict.sentences == [used, slower]
    assert verdict.named == ["a"]
    assert rows_of(among([one]), single) == [
        ["batches of 8, 1.25 to 1.5 times", "a", "1.50", "+0.0 [-1.0, +1.0]", "yes <- use"],
        ["batches of 8, 2 times", "none as fast", "", "", ""],
        ["single images, 1.25 times", "none as fast", "", "", ""],
    ]
    alike = dataclasses.replace(one, speedup=Spread(0.97, 0.95, 1.01))
    told = verdict_of([among([one]), dataclasses.replace(single, models=[alike])]).sentences[1]
    assert told.endswith(" a is about as fast as the dense model there: 0.97 [0.95, 1.01] times.")
    harmed = dataclasses.replace(among([one]), harm="; but the dense model fell")
    assert harmed.sentence == f"{used.removesuffix('.')}; but the dense model fell."
    busy = dataclasses.replace(among([one]), is_unsteady=True)
    assert busy.sentence == used.replace("batches of 8:", "batches of 8, if an idle machine confirms its speed:")
    assert rows_of(busy)[0][-1] == "yes <- use, if confirmed"
    # One sign, that of the tables: what is gained is positive, what is lost negative.
    for sign, told in ((-1, "+3.0 [+1.0, +5.0]"), (1, "-3.0 [-5.0, -1.0]")):
        wanted = among([alternative("a", 1.5, Estimate(sign * 0.03, *sorted((sign * 0.01, sign * 0.05))))], speed=1.5)
        assert f"1.50 times as fast, {told} points of accuracy" in wanted.sentence


@pytest.mark.parametrize("samples", [64, 256, 1024])
def test_a_choice_at_random_is_compared_and_never_advised(samples: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        choice = drawn(rng, samples, 0.02)
        models = [dataclasses.replace(model, name="a", at_random=True) for model in choice.models]
        both = dataclasses.replace(choice, models=[*models, *choice.models])
        verdicts = [str(verdict_of([one])) for one in (choice, both)]
        assert verdicts[0] == re.sub("(othing tried) but a choice at random", r"\1", verdicts[1])


@pytest.mark.parametrize("at_random", [True, False])
def test_a_control_that_chooses_is_advised(at_random: bool) -> None:
    """A method that others are compared with may be the best of all; what chance keeps is only told of."""
    control = alternative("b", 2.0, Estimate(0.0, -0.01, 0.01), 256, at_random=at_random)
    choice = among([control, alternative("a", 1.05, Estimate(0.3, 0.25, 0.35), 256)])
    wanted = dataclasses.replace(choice, speed=1.5)
    if not at_random:
        assert choice.sentence.startswith("Use b for batches of 8: 2.00 times as fast")
        assert wanted.sentence.startswith("Use b for batches of 8: 2.00 times as fast")
        return
    assert "nothing tried but a choice at random is clearly faster" in choice.sentence
    assert wanted.sentence.startswith("Nothing tried but a choice at random is 1.5 times as fast")


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
        model = alternative("a", 2.0, loss, samples)
        choice = among([model], tolerance)
        missing = missing_samples(loss, tolerance, samples)
        if model not in choice.undecided or f": {missing:,} more images" not in choice.outcome(model):
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
        way = "probably" if np.mean(ways) > 0.5 else "probably not"
        assert choice.outcome(model).startswith((f"{way}: ", "unclear: ")), (samples, rate)


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
    models = [alternative("a", 1.6, Estimate(0.02)), alternative("b", 1.4, Estimate(0.01))]
    choice = dataclasses.replace(among(models), samples="seeds", where="single images")
    assert choice.best is None
    assert choice.sentence == (
        "No interval tells what is within 2 points for single images: these lose least by their means."
    )
    assert rows_of(choice) == [
        ["single images, 1.25 times", "b", "1.40", "-1.0", "unclear: more seeds would tell"],
        ["single images, 1.5 times", "a", "1.60", "-2.0", "unclear: more seeds would tell"],
        ["single images, 2 times", "none as fast", "", "", ""],
    ]
    few = dataclasses.replace(among([alternative("a", 0.9, Estimate(0.02))]), samples="images", where="single images")
    assert few.sentence == (
        f"No interval tells what is within 2 points for single images (it takes at least {FEWEST} images), and nothing "
        "tried is 1.25 times as fast."
    )


@pytest.mark.parametrize(
    ("to_control", "told"),
    [
        # An interval that holds zero is equality only where all of it is small.
        (
            {"a": Estimate(0.0, -1.0, 1.0), "b": Estimate(2.0, -0.1, 4.0)},
            r"As good as .*, within 2 points: a \(\+0\.0 \[-1\.0, \+1\.0\]\)\. It hardly .* Too few .*: b \(\+2\.0",
        ),
        # Where random tokens lose less, it matters what is kept.
        (
            {"a": Estimate(-2.0, -3.0, -1.0), "b": None},
            "Clearly worse .* random tokens, in points: a \\(-2.0 \\[-3.0, -1.0\\]\\)\\.$",
        ),
        (
            {"a": Estimate(0.0, -1.0, 1.0), "b": Estimate(2.0, 0.1, 4.0)},
            "Clearly better .*: b \\(.*\\)\\. As good .*: a \\(.*\\)\\.",
        ),
        (
            {"b": Estimate(2.0, 0.1, 4.0)},
            r"Clearly better than their controls, such as random tokens, in points: b \(\+2\.0 \[\+0\.1, \+4\.0\]\)\.$",
        ),
        # Equal in accuracy, and not in what it answers.
        ({"same": Estimate(0.0, -1.0, 1.0)}, "Too few samples .*: same \\(.*; better by agreement\\)\\.$"),
        ({"as FastV": Estimate(0.0, -3.0, 3.0)}, r"Too few samples .* differ from their controls, .*: 'as FastV' \("),
        # Of one seed it is not known.
        ({"a": Estimate(0.0, seeds=1), "b": None}, "$"),
    ],
)
def test_what_is_better_than_its_control_is_named(to_control: dict[str, Estimate | None], told: str) -> None:
    assert re.match(told, beside_controls(to_control, 0.02, {"same": Estimate(0.1, 0.05, 0.2)}))
