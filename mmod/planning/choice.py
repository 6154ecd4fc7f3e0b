"""Which model to use in place of the dense one: the rule by which advice and studies decide, and its words.

A model counts by the worse end of its 95 % interval: it is within a tolerance if that end is, and at a wanted speed the
one whose worse end is best is named. So the sentence follows from the table by eye.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from mmod.analysis.statistics import (
    FEWEST,
    MOST,
    ROUNDING,
    Estimate,
    chance_within,
    decides,
    exceeds,
    keeps,
    least_samples,
    missing_samples,
    unbeaten,
)
from mmod.analysis.timing import Spread

NOISE = 1.03
"""Speeds whose ratio is below this are within the noise of a machine."""
# A gain below this is one to think about.
_HARDLY = 1.1
USE = "<- use"
"""What marks the row of a table that a sentence says to use."""
NAMED = "<- named"
"""What marks the row that a sentence on a wanted speed names where it says to use none."""
ON_FRONT = "no other is faster and loses less, by the means."
"""What a star in a table means; what is used goes by intervals, as one of many is better by luck."""
SEEDS = "seeds"
"""What intervals are over where models were trained several times."""
# Speeds for which a model is named, as multiples of the dense model's.
_SPEEDS = (1.25, 1.5, 2.0)
# Chance from which on a result is called probable; between it and its opposite, it is as likely as not.
_PROBABLE = 2 / 3
# A loss that more than so many times the samples would decide about is too close to the tolerance. One up to so many
# times as wide may be chosen instead.
_MANY = 10
_WIDER = 2.5
# Ends of the names of measures that count answers, right or wrong, or equal or not.
_OF_ANSWERS = ("accuracy", "agreement", "right answers")


@dataclass(frozen=True)
class AdviceRow:
    """What a candidate costs and loses, compared with the dense model that it may replace.

    Args:
        name: The candidate's.
        label: Name with the side of smaller images, which their share of the FLOPs does not say.
        speedup: Time of the dense model over the candidate's, over the rounds: median and quartiles.
        score: Share of images with the dense model's top class, mean cosine of features, or share of next tokens that
            are the dense model's; 95 % interval over images or prompts. A study has none.
        accuracy: Difference of top-1 accuracy, or of the share of right answers to prompts, to the dense model's, where
            there are labels; 95 % interval. It replaces the score in every comparison.
        images: Number of images, or of seeds; few for candidates that were far from the front.
        code: The line of Python that applies it, empty for smaller images of prompts; `config` the key of a training
            config that does, empty for a class of model that configs cannot name.
        on_front: It is faster than the dense model, and no other row that may be advised is faster and loses less.
        cache: Bytes of the KV cache of a prompt of mean length; None for image models.
        series: Name that it shares with the same model at other budgets; empty for none.
        speedups: Speed-ups of further passes: of images in "batch 1", or on the "mix" of prompts of different lengths,
            padded to one.
        control: Name of the candidate that keeps as many tokens by no choice, with the same FLOPs; None without one.
        to_control: Difference of the accuracy, or of the score without labels, to the control's.
        agreement_to_control: That of the agreement, where there are labels.
        at_random: Chance chooses what it keeps: other rows are compared with it, and it is never advised.
        chooses: It chooses the tokens that it keeps, by routers or as pruning does, so that random ones may do as well.
            False in a study, whose report compares with controls.
        flops: FLOPs of a sample, as a share of the dense model's; None where they cannot be counted.
    """

    name: str
    label: str
    speedup: Spread
    score: Estimate
    accuracy: Estimate | None
    images: int
    code: str = ""
    config: str = ""
    on_front: bool = False
    cache: int | None = None
    series: str = ""
    speedups: Mapping[str, Spread] = field(default_factory=dict)
    control: str | None = None
    to_control: Estimate | None = None
    agreement_to_control: Estimate | None = None
    at_random: bool = False
    chooses: bool = False
    flops: float | None = None

    @property
    def loss(self) -> Estimate:
        """Accuracy lost, or disagreement where there are no labels."""
        score = self.score
        lossless = 1
        if self.accuracy is not None:
            # The difference to the dense model.
            score = self.accuracy
            lossless = 0
        # A score turned round, and so are the ends of its interval.
        return Estimate(lossless - score.value, lossless - score.high, lossless - score.low)

    @property
    def is_clearly_faster(self) -> bool:
        """Whether it is faster than the dense model by the lower quartile."""
        return self.speedup.shown.low >= NOISE

    @property
    def worst(self) -> float:
        """What it loses at the worse end of its interval, or by its mean where there is none."""
        return self.loss.high if self.loss.has_interval else self.loss.value

    @property
    def shown_worst(self) -> float:
        """That in points, as it is printed: what no reader can tell apart goes to the faster."""
        return round(100 * self.worst, 1)

    @property
    def order(self) -> tuple[float, float]:
        """What is lower is chosen of models that are as fast as they must be."""
        return self.shown_worst, -self.speedup.median

    @property
    def figures(self) -> tuple[float, float, float]:
        """Its time as a share of the dense model's, its loss and the worse end: what is lower in all is better."""
        # By the mean alone, one of many is better by luck.
        return 1 / self.speedup.median, self.loss.value, self.worst


@dataclass(frozen=True)
class Recommendation:
    """Which of the models that were timed in one kind of pass to use.

    Args:
        tolerance: What may be lost; 0.02 are 2 points.
        measure: What is lost, such as "accuracy".
        samples: What intervals are over, "images", "prompts" or `SEEDS`.
        where: The pass, such as "batches of 8".
        speed: A speed-up that is wanted: what loses least at it is named. None names the fastest model within the
            tolerance, and beside it what loses least at some speeds.
        more: How to ask for a number of samples, with {0} in its place, in brackets; empty says nothing.
        given: Samples given for each evaluated one: more than one where a plan search takes some.
        available: Samples that there are.
        harm: What makes the dense model a worse measure than it was, for the sentence that says what to use.
        is_unsteady: Times are uncertain, as on a busy machine, see `Table.caution`.
        invalid: Why differences to the dense model say nothing, such as `say_guessing`. Nothing is advised then.
    """

    models: Sequence[AdviceRow]
    tolerance: float
    measure: str
    samples: str
    where: str
    speed: float | None = None
    more: str = ""
    given: Fraction = Fraction(1)
    available: float = math.inf
    harm: str = ""
    is_unsteady: bool = False
    invalid: str = ""

    @property
    def best(self) -> AdviceRow | None:
        """The fastest model within the tolerance, or one as fast that loses less; None if the dense one is."""
        return _best_of_fastest(self._within)

    @property
    def undecided(self) -> list[AdviceRow]:
        """The models that may be within the tolerance, and are faster than all that surely are.

        What a model as fast beats in both mean and worse end, or is hardly faster, would not change the choice.
        """
        by_name = {model.name: model for model in self._faster}

        def is_better(one: str, other: str) -> bool:
            better = by_name[one].figures
            worse = by_name[other].figures
            return better != worse and all(low <= high for low, high in zip(better, worse))

        costs = {name: model.figures[0] for name, model in by_name.items()}
        fastest = 0.0
        if self._within:
            fastest = NOISE * self._within[0].speedup.shown.median
        front = [by_name[name] for name in unbeaten(costs, is_better, tolerance=1.0)]
        return [model for model in front if self._is_open(model) and model.speedup.shown.median > fastest]

    def at_speed(self, speed: float) -> AdviceRow | None:
        """Return the model that loses least, by the worse end of its interval, of those that reach a speed-up.

        Of those whose ends are printed alike, the fastest.
        """
        # The best mean of many is often luck.
        reaching = filter(_reaches(speed), self._advised)
        return min(reaching, key=lambda model: model.order, default=None)

    @property
    def unreached(self) -> list[float]:
        """The usual speeds that no model reaches; none where nothing is advised."""
        if self.invalid:
            return []
        return [speed for speed in _SPEEDS if self.at_speed(speed) is None]

    @property
    def used(self) -> AdviceRow | None:
        """The model that the sentence says to use; None where it says of none."""
        if self.speed is None:
            return self.best
        chosen = self.at_speed(self.speed)
        if chosen is None or not keeps(chosen.loss, self.tolerance):
            return None
        return chosen

    @property
    def named(self) -> AdviceRow | None:
        """The model that the sentence is about; None where it is about none."""
        if not self.is_tested:
            return None
        if self.speed is None:
            return self._likely
        fastest = max(self._advised, key=lambda model: model.speedup.median, default=None)
        return self.at_speed(self.speed) or fastest

    def mark(self, model: AdviceRow) -> str:
        """Return what marks the row of a model that the sentence is about, `USE` or `NAMED`; empty for others."""
        if model == self.used:
            return USE
        if self.speed is not None and model == self.named:
            return NAMED
        return ""

    @property
    def sentence(self) -> str:
        """What to do."""
        if self.invalid:
            return f"Nothing is advised: {self.invalid}"
        if not self.is_tested:
            untold = f"No interval tells what is within {self.limit} for {self.where}"
            if self.samples != SEEDS:
                untold += f" (it takes at least {FEWEST} {self.samples})"
            if not self.roles:
                return f"{untold}, and nothing tried is {self.speed or _SPEEDS[0]:g} times as fast."
            return f"{untold}: these lose least by their means."
        named = self.named
        if named is None:
            return f"Keep the dense model for {self.where}: {self._kept}{self._hardly_faster}"
        figures = f"{named.speedup:[.2f} times as fast, {self._change(named)}"
        if self.used is not None:
            at_speed = ""
            if self.speed is not None:
                at_speed = f", the least at {self.speed:g} times the speed ({_least_speed(self.speed)})"
            condition = ""
            if self.is_unsteady:
                condition = ", if an idle machine confirms its speed"
            faster = ""
            if named.speedup.shown.median < _HARDLY:
                condition += ", though it is hardly faster"
                faster = self._likely_faster
            return f"Use {named.label} for {self.where}{condition}: {figures}{at_speed}{self.harm}.{faster}"
        if self.speed is None:
            return f"Keep the dense model for {self.where} for now.{self._probably(named)}{self._hardly_faster}"
        as_fast = f"{self.speed:g} times as fast ({_least_speed(self.speed)}) for {self.where}"
        if not _reaches(self.speed)(named):
            nothing = self._nothing(_reaches(self.speed))
            return f"{nothing.capitalize()} is {as_fast}. The fastest is {named.label}: {figures}."
        return (
            f"Nothing tried that is {as_fast} is surely within {self.limit}. Of what is as fast, {named.label} "
            f"loses least: {figures}."
        )

    @property
    def too_few(self) -> str:
        """Say from how many samples on any model can be within the tolerance; empty where one is, or there are more.

        It is known for answers, which are right or not: means of cosines and of other scores have no such number.
        """
        within = [model for model in self.models if keeps(model.loss, self.tolerance)]
        if self.invalid or within or not self.models or not self.measure.endswith(_OF_ANSWERS):
            return ""
        if self.samples == SEEDS or not self.tolerance:
            return ""
        least = least_samples(self.tolerance, is_share=self.models[0].accuracy is None)
        number = max(model.images for model in self.models)
        if number >= least:
            return ""
        gaining = ""
        if any(model.loss.value < 0 for model in self.models):
            gaining = " Of one that gains, fewer may tell."
        return (
            f'Even a recipe that changes no answer is a "yes" only from {least:,} {self.samples} on'
            f"{self._asking(least, self.more)}; these are {number:,}.{gaining}"
        )

    @property
    def _kept(self) -> str:
        """Why the dense model is kept where no other is named, a sentence or two."""
        if self._awaited:
            nearest = min(self._awaited, key=lambda model: missing_samples(model.loss, self.tolerance, model.images))
            tell = self._deciding(nearest, of=f" of {nearest.label}")
            return f"it is unclear whether anything clearly faster is within {self.limit}. {tell}"
        if self.undecided:
            return f"nothing clearly faster is likely to be within {self.limit}."
        nothing = self._nothing(lambda model: model.is_clearly_faster and keeps(model.loss, self.tolerance))
        return f"{nothing} is clearly faster and within {self.limit}."

    @property
    def _sure(self) -> AdviceRow | None:
        """The fastest model within the tolerance where none is clearly faster than the dense one."""
        if self._within or self.speed is not None:
            return None
        sure = [model for model in self._advised if keeps(model.loss, self.tolerance)]
        faster = [model for model in sure if model.speedup.shown.median >= NOISE]
        return max(faster, key=lambda model: model.speedup.median, default=None)

    @property
    def _hardly_faster(self) -> str:
        if self._sure is None:
            return ""
        return f" {self._sure.label} is within {self.limit}, but not clearly faster: {self._sure.speedup:[.2f} times."

    @property
    def roles(self) -> list[tuple[AdviceRow, str]]:
        """What the sentence and the usual speeds name, and what is undecided, each with what it is for."""
        speeds: dict[str, list[str]] = {}
        # Of a wanted speed, only what is surely within the tolerance stands beside what reaches it.
        likely = self.best
        if self.speed is None and self.is_tested:
            likely = self._likely
        for model in (self.named, likely, self._sure):
            if model is not None:
                speeds[model.name] = []
        wanted = _SPEEDS if self.speed is None else (self.speed,)
        for speed in wanted:
            chosen = self.at_speed(speed)
            if chosen is not None:
                speeds.setdefault(chosen.name, []).append(f"{speed:g}")
        # By their means, these look better than what the interval chooses.
        starred = [model for model in self._advised if self.speed and model.on_front and _reaches(self.speed)(model)]
        for model in starred:
            speeds.setdefault(model.name, [])
        awaited = []
        if self.speed is None and self.is_tested:
            awaited = self._awaited
        for model in awaited:
            speeds.setdefault(model.name, [])
        by_name = {model.name: model for model in self.models}
        roles = []
        for name, reached in speeds.items():
            role = self.where
            if reached:
                # What loses least at two speeds does so between them.
                ends = sorted({reached[0], reached[-1]})
                role += f", {' to '.join(ends)} times"
            elif by_name[name] in awaited:
                role += ", undecided"
            elif by_name[name] in starred:
                role += ", starred"
            roles.append((by_name[name], role))
        return roles

    def outcome(self, model: AdviceRow) -> str:
        """Say whether a model is within the tolerance, and what would tell where that is open."""
        if keeps(model.loss, self.tolerance):
            return "yes"
        if exceeds(model.loss, self.tolerance):
            return "no"
        chance = chance_within(model.loss, self.tolerance)
        outcome = "unclear"
        if chance >= _PROBABLE:
            outcome = "probably"
        elif chance <= 1 - _PROBABLE:
            outcome = "probably not"
        needed = self._wider(model) or self._missing(model)
        if not needed:
            return outcome
        return f"{outcome}: {needed} would tell"

    def _deciding(self, model: AdviceRow, of: str) -> str:
        """Return as a sentence what would decide about a model.

        Args:
            of: Names the model; empty where it was named before.
        """
        wider = self._wider(model)
        if wider:
            return f"The loss{of} is too close to {self.limit} to tell: {wider} would."
        missing = self._missing(model, self.more)
        if missing:
            return f"{missing[0].upper()}{missing[1:]} would tell{of}."
        return f"These {self.samples} cannot tell{of}, nor would {MOST} times as many."

    def _wider(self, model: AdviceRow) -> str:
        """Return in words a tolerance that would decide about a model where too many samples would be needed."""
        if not self._is_near(model):
            return ""
        # The worse end, rounded up as figures are printed.
        enough = math.ceil(1000 * model.loss.high - ROUNDING) / 1000
        # The interval of a few is wide wherever their loss is: a tolerance as wide says nothing.
        is_useful = enough <= _WIDER * self.tolerance
        if not self._is_enough(model):
            is_useful = is_useful or not self.tolerance or model.images >= FEWEST
        return f"`--tolerance {enough:g}`" if is_useful and enough < 1 else ""

    def _is_near(self, model: AdviceRow) -> bool:
        """Return whether a loss is so near to the tolerance that too many samples would be needed to decide."""
        if self.samples == SEEDS or not model.loss.has_interval:
            return False
        return missing_samples(model.loss, self.tolerance, model.images) > _MANY * model.images

    def _missing(self, model: AdviceRow, how: str = "") -> str:
        """Return in words how many more samples would decide about a model; empty where no number is known to.

        Args:
            how: How to ask for so many, see `more`.
        """
        if self.samples == SEEDS:
            # The spread of a few seeds is not known well enough for a number.
            return f"more {SEEDS}"
        number = missing_samples(model.loss, self.tolerance, model.images)
        more = math.ceil(number * self.given)
        told = f"{more:,} more {self.samples}{self._asking(model.images + number, how)}"
        if not model.loss.has_interval:
            # So many give a first interval.
            return f"at least {told}"
        return told if self._is_enough(model) else ""

    def _asking(self, evaluated: int, how: str) -> str:
        number = math.ceil(evaluated * self.given)
        if number > self.available:
            return f" (there are {self.available:,} in all)"
        return how.format(number)

    def _is_enough(self, model: AdviceRow) -> bool:
        """Return whether the number of missing samples decides about a model, and is no lower bound."""
        return decides(model.loss, self.tolerance, model.images, MOST * model.images)

    @property
    def limit(self) -> str:
        """The tolerance in words."""
        return _in_points(self.tolerance)

    @property
    def is_tested(self) -> bool:
        """Whether losses have intervals: nothing is said on a tolerance without."""
        return not self.models or any(model.loss.has_interval for model in self.models)

    def _change(self, model: AdviceRow) -> str:
        """Return in words the difference of a model to the dense one: what is lost is negative."""
        return f"{points(model.loss)} points of {self.measure}"

    def _nothing(self, holds: Callable[[AdviceRow], bool]) -> str:
        """Return the subject of a sentence on what no model does, but perhaps one that chooses at random."""
        if any(model.at_random and holds(model) for model in self.models):
            return "nothing tried but a choice at random"
        return "nothing tried"

    @property
    def _likely(self) -> AdviceRow | None:
        """The best model, or the same of the undecided ones that are probably within the tolerance."""
        return self.best or self._probable

    @property
    def _probable(self) -> AdviceRow | None:
        """The best of the undecided models that are probably within the tolerance."""
        return _best_of_fastest(
            [model for model in self.undecided if chance_within(model.loss, self.tolerance) >= _PROBABLE]
        )

    def _probably(self, model: AdviceRow) -> str:
        figures = f"{model.speedup:[.2f} times as fast, {self._change(model)}"
        return f" {model.label} is probably within {self.limit}: {figures}. {self._deciding(model, of='')}"

    @property
    def _likely_faster(self) -> str:
        """Say what is probably as good as a model that is hardly faster than the dense one; empty for nothing."""
        if self.speed is not None or self._probable is None:
            return ""
        return self._probably(self._probable)

    @property
    def _awaited(self) -> list[AdviceRow]:
        """The undecided models for which more samples are worth while: not those that probably lose more."""
        # The chance of a loss without an interval is not known.
        return [model for model in self.undecided if not chance_within(model.loss, self.tolerance) <= 1 - _PROBABLE]

    @property
    def _advised(self) -> list[AdviceRow]:
        """The models that may be advised."""
        if self.invalid:
            return []
        return [model for model in self.models if not model.at_random]

    @property
    def _faster(self) -> list[AdviceRow]:
        """Models that are clearly faster than the dense one, the fastest first."""
        faster = [model for model in self._advised if model.is_clearly_faster]
        return sorted(faster, key=lambda model: -model.speedup.median)

    @property
    def _within(self) -> list[AdviceRow]:
        """Those of them that are within the tolerance by their whole interval."""
        return [model for model in self._faster if keeps(model.loss, self.tolerance)]

    def _is_open(self, model: AdviceRow) -> bool:
        return not keeps(model.loss, self.tolerance) and not exceeds(model.loss, self.tolerance)


def _best_of_fastest(models: Sequence[AdviceRow]) -> AdviceRow | None:
    """Return the first of models, the fastest, or one as fast that loses less; None of none."""
    # Times of a few rounds cannot tell these apart: the loss does.
    as_fast = [model for model in models if NOISE * model.speedup.shown.median >= models[0].speedup.shown.median]
    return min(as_fast, key=lambda model: model.order, default=None)


def batches_of(size: int, samples: str = "images") -> str:
    """Return in words how many samples a timed pass has."""
    if size == 1:
        return f"single {samples}"
    return f"batches of {size}"


def _in_points(share: float) -> str:
    """Return a share as a number of points in words."""
    number = f"{100 * share:g}"
    noun = "point" if number == "1" else "points"
    return f"{number} {noun}"


def points(loss: Estimate) -> str:
    """Return a loss as the difference to dense in points, with its sign and interval, as studies write it.

    Example:
        >>> points(Estimate(0.004, -0.002, 0.01))
        '-0.4 [-1.0, +0.2]'
    """
    value, low, high = (round(-100 * end, 1) for end in (loss.value, loss.high, loss.low))
    return f"{Estimate(value, low, high):+.1f}"


def reaches(shown: float, speed: float) -> bool:
    """Return whether a speed-up as it is shown is that which is wanted, within the noise."""
    return shown >= round(speed / NOISE, 2)


def _reaches(speed: float) -> Callable[[AdviceRow], bool]:
    return lambda model: reaches(model.speedup.shown.median, speed)


def _least_speed(speed: float) -> str:
    """Return in words from which speed-up on a model counts as so many times as fast."""
    return f"{speed / NOISE:.2f} or more"
