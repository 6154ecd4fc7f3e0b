"""Which model to use in place of the dense one: the rule by which advice and studies decide, and its words.

A model counts by the worse end of its 95 % interval: it is within a tolerance if that end is, and at a wanted speed the
one whose worse end is best is named. So the sentence follows from the table by eye.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from mmod.analysis.statistics import Estimate, of_samples, unbeaten
from mmod.analysis.table import FEWEST
from mmod.analysis.timing import Spread

TOLERANCE = 0.02
"""Share of accuracy, or of agreement, that may be lost."""
NOISE = 1.03
"""Speeds whose ratio is below this are within the noise of a machine."""
USE = "<- use"
"""What marks the row of a table that a sentence says to use."""
BY_INTERVALS = f"`{USE}` is chosen by whole intervals, and need not be one of them."
"""Beside the sentence on the front: a model with a better mean may be one that was lucky."""
SEEDS = "seeds"
"""What intervals are over where models were trained several times."""
# Speeds for which a model is named, as multiples of the dense model's.
_SPEEDS = (1.25, 1.5, 2.0)
# A loss that would need more times as many samples is too close to the tolerance for an estimate.
_MOST = 50


@dataclass(frozen=True)
class Alternative:
    """A model that may take the dense one's place.

    Args:
        speedup: Time of the dense model over its own, over the rounds.
        loss: What it loses to the dense model, as a share.
        samples: Number of samples, or of seeds, that the loss is from.
        measured: The loss in words.
        alone: Its speed-up for single samples, where it was timed in batches too.
        control: Name of the model that it is compared with.
        to_control: Difference to it in points.
        agreement_to_control: That of the agreement with the dense model, where it is not what is lost.
        at_random: Chance chooses what it keeps: it is compared, and never advised.
    """

    name: str
    speedup: Spread
    loss: Estimate
    samples: int
    measured: str
    alone: Spread | None = None
    control: str | None = None
    to_control: Estimate | None = None
    agreement_to_control: Estimate | None = None
    at_random: bool = False

    @property
    def worst(self) -> float:
        """What it loses at the worse end of its interval, or by its mean where there is none."""
        return self.loss.high if self.loss.has_interval else self.loss.value

    @property
    def figures(self) -> tuple[float, float, float]:
        """Its time as a share of the dense model's, its loss and the worse end: what is lower in all is better."""
        # By the mean alone, one of many is better by luck.
        return 1 / self.speedup.median, self.loss.value, self.worst


@dataclass(frozen=True)
class Recommendation:
    """What to use of the models that were timed in one kind of pass.

    Args:
        tolerance: What may be lost; 0.02 are 2 points.
        samples: What intervals are over, "images", "prompts" or `SEEDS`.
        where: The pass, such as "in batches of 8".
        harm: What makes the dense model a worse measure than it was, for the sentence that says what to use.
    """

    models: Sequence[Alternative]
    tolerance: float
    samples: str
    where: str
    harm: str = ""

    @property
    def best(self) -> Alternative | None:
        """The fastest model within the tolerance, or one as fast that loses less; None if the dense one is."""
        within = self._within
        # Times of a few rounds cannot tell these apart: the loss does.
        as_fast = [model for model in within if NOISE * model.speedup.median >= within[0].speedup.median]
        return min(as_fast, key=lambda model: model.worst, default=None)

    @property
    def undecided(self) -> list[Alternative]:
        """The models whose interval holds the tolerance, and that are faster than any within it.

        What a model as fast beats in both mean and worse end, or is hardly faster, would not change the choice.
        """
        by_name = {model.name: model for model in self._faster}

        def is_better(one: str, other: str) -> bool:
            better = by_name[one].figures
            worse = by_name[other].figures
            return better != worse and all(low <= high for low, high in zip(better, worse))

        costs = {name: model.figures[0] for name, model in by_name.items()}
        fastest = NOISE * self._within[0].speedup.median if self._within else 0.0
        front = [by_name[name] for name in unbeaten(costs, is_better, tolerance=1.0)]
        return [model for model in front if self._is_open(model) and model.speedup.median > fastest]

    @property
    def named(self) -> Alternative | None:
        """The model that the sentence is about: the best, or the fastest undecided one that is likely to be within."""
        # What loses more than the tolerance by its mean would mostly be decided against.
        likely = (model for model in self.undecided if model.loss.value <= self.tolerance)
        return self.best or next(likely, None)

    def used(self, speed: float | None = None) -> Alternative | None:
        """Return the model that a sentence says to use, also at a speed that is wanted; None where it says of none."""
        if speed is None:
            return self.best
        chosen = self.at_speed(speed)
        return chosen if chosen is not None and keeps(chosen.loss, self.tolerance) else None

    def at_speed(self, speed: float) -> Alternative | None:
        """Return the model that loses least, by the worse end of its interval, of those that reach a speed-up."""
        # The best mean of many is often luck.
        reaching = filter(self._reaches(speed), self._advised)
        return min(reaching, key=lambda model: (model.worst, -model.speedup.median), default=None)

    @property
    def sentence(self) -> str:
        """The choice first, and what so few samples leave undecided."""
        named = self.named
        others = [self._as_undecided(model) for model in self.undecided if model is not named]
        if self.best is not None:
            harm = f"; {self.harm}" if self.harm else ""
            text = f"Use {self.best.name}: {_times(self.best)} {self.where}, at {self._measured(self.best)}{harm}."
            further = f" Undecided, and faster: {', '.join(others)}." if others else ""
            return f"{text}{self._noted(self.best)}{further}"
        if named is not None:
            further = f" Undecided too: {', '.join(others)}." if others else ""
            return (
                f"Undecided: keep the dense model {self.where} for now. The fastest that probably stays within "
                f"{self.limit} is {named.name}, {_times(named)} at {self._measured(named)}; {self._decided_by(named)}."
                f"{further}"
            )
        if others:
            return (
                f"Nothing is likely to stay within {self.limit} {self.where}: keep the dense model. Not yet excluded: "
                f"{', '.join(others)}."
            )
        nothing = self._nothing(lambda model: model.speedup.low >= NOISE and keeps(model.loss, self.tolerance))
        return f"{nothing} pays {self.where} at a tolerance of {self.limit}: keep the dense model."

    def _nothing(self, holds: Callable[[Alternative], bool]) -> str:
        """Return the subject of a sentence on what no model does, but perhaps one that chooses at random."""
        is_by_chance = any(model.at_random and holds(model) for model in self.models)
        return "Nothing tried but a choice at random" if is_by_chance else "Nothing tried"

    def _reaches(self, speed: float) -> Callable[[Alternative], bool]:
        # What reaches the speed within the noise counts.
        return lambda model: NOISE * model.speedup.median >= speed

    def sentence_at(self, speed: float) -> str:
        """Return what to use for a speed-up that is wanted, or that nothing keeps the tolerance, and the nearest."""
        chosen = self.at_speed(speed)
        if chosen is None:
            fastest = max(self._advised, key=lambda model: model.speedup.median, default=None)
            nearest = ""
            if fastest is not None:
                nearest = f"; the fastest is {fastest.name}: {_times(fastest)} at {self._measured(fastest)}"
            nothing = self._nothing(self._reaches(speed))
            return f"{nothing} is {speed:g} times as fast {self.where}{nearest}.{self._beside(fastest)}"
        about = "" if chosen.speedup.median >= speed else "about "
        if chosen is self.used(speed):
            return (
                f"For {about}{speed:g} times the speed use {chosen.name}: {_times(chosen)} {self.where}, at "
                f"{self._measured(chosen)}, the least lost of what was tried.{self._noted(chosen)}"
            )
        # Its worse end is the best of all at this speed.
        text = (
            f"Nothing tried is sure to stay within {self.limit} at {about}{speed:g} times the speed {self.where}: "
            f"least lost is {chosen.name}, {_times(chosen)} at {self._measured(chosen)}.{self._noted(chosen)}"
        )
        if self._is_open(chosen):
            text += f" Undecided: {self._decided_by(chosen)}."
        return f"{text}{self._beside(chosen)}"

    def _beside(self, told: Alternative | None) -> str:
        """Return the fastest model within the tolerance as a further sentence, or that is likely to be; see `named`."""
        named = self.named
        if named is None or named is told:
            return ""
        which = "The fastest within" if self.best is not None else "The fastest that probably stays within"
        return f" {which} {self.limit} is {named.name}: {_times(named)} at {self._measured(named)}."

    @property
    def text(self) -> str:
        """The sentence, and the models that lose least at some speeds."""
        return "\n\n".join(filter(None, [self.sentence if self._is_tested else "", self.by_speed]))

    @property
    def by_speed(self) -> str:
        """The model that loses least at each of some speeds, a line each; a sentence where none reaches the first."""
        if self.at_speed(_SPEEDS[0]) is None:
            return f"{self._nothing(self._reaches(_SPEEDS[0]))} is {_SPEEDS[0]:g} times as fast {self.where}."
        told = [self.named] if self._is_tested else []
        lines = []
        for speed in _SPEEDS:
            chosen = self.at_speed(speed)
            if chosen is None:
                line = "nothing tried is as fast"
            elif chosen in told:
                line = f"{chosen.name}, as above"
            else:
                line = f"{chosen.name}, {_times(chosen)} at {self._measured(chosen)}"
            told.append(chosen)
            lines.append(f"- {speed:g} times: {line}")
        return "\n".join([f"Least lost {self.where}, by the worse end of each interval, speeds within 3 %:\n", *lines])

    @property
    def recommended(self) -> list[Alternative]:
        """The models that the text is about."""
        chosen = [self.named if self._is_tested else None, *map(self.at_speed, _SPEEDS)]
        return [model for model in dict.fromkeys(chosen) if model is not None]

    @property
    def _is_tested(self) -> bool:
        """Whether losses have intervals: the sentence on a tolerance says nothing without."""
        return any(model.loss.has_interval for model in self.models)

    @property
    def _advised(self) -> list[Alternative]:
        """The models that may be advised."""
        return [model for model in self.models if not model.at_random]

    @property
    def _faster(self) -> list[Alternative]:
        """Models that are clearly faster than the dense one, the fastest first."""
        faster = [model for model in self._advised if model.speedup.low >= NOISE]
        return sorted(faster, key=lambda model: -model.speedup.median)

    @property
    def _within(self) -> list[Alternative]:
        """Those of them that are within the tolerance by their whole interval."""
        return [model for model in self._faster if keeps(model.loss, self.tolerance)]

    @property
    def limit(self) -> str:
        """The tolerance in words."""
        points = f"{100 * self.tolerance:g}"
        return f"{points} point" if points == "1" else f"{points} points"

    def _is_open(self, model: Alternative) -> bool:
        return not keeps(model.loss, self.tolerance) and not exceeds(model.loss, self.tolerance)

    def _measured(self, model: Alternative) -> str:
        """Return what a model loses in words, with a warning where that may be more than the tolerance."""
        if exceeds(model.loss, self.tolerance):
            return f"{model.measured}, which is clearly more lost than {self.limit}"
        if model.worst > self.tolerance and model.loss.has_interval:
            return f"{model.measured}, but may lose up to {100 * model.worst:.1f} points"
        return model.measured

    def _noted(self, model: Alternative) -> str:
        """Say whether a model chosen in batches is slower for single samples, and how it compares with its control."""
        text = ""
        if model.alone is not None and model.alone.median < 1:
            text = f" For single images it is slower than the dense model: {model.alone:[.2f} times as fast."
        if model.to_control is not None and model.to_control.has_interval:
            text += f" {self._beside_control(model, model.to_control)}"
        return text

    def _beside_control(self, model: Alternative, gap: Estimate) -> str:
        """Say whether a model is better than its control, worse, as good, or whether too few samples tell."""
        if gap.low > 0:
            return f"It is better than its control, {model.control}, by {gap:.1f} points: what it keeps matters."
        if gap.high < 0:
            return f"It is worse than its control ({gap:+.1f} points): {model.control} keeps what matters more."
        agreement = model.agreement_to_control
        by_agreement = ""
        if agreement is not None and agreement.is_clear:
            which = "better" if agreement.low > 0 else "worse"
            by_agreement = f"; by agreement with the dense model it is {which} ({agreement:+.1f} points)"
        if _is_equivalent(gap, self.tolerance):
            matters = by_agreement or ": on these samples it hardly matters what is kept"
            return f"It is within {self.limit} of its control, {model.control} ({gap:+.1f} points){matters}."
        # The control may have run on the first samples alone.
        samples = min(one.samples for one in self.models if one.name in (model.name, model.control))
        return (
            f"{samples:,} {self.samples} cannot tell whether it is better than its control, {model.control} "
            f"({gap:+.1f} points){by_agreement}."
        )

    def _as_undecided(self, model: Alternative) -> str:
        return f"{model.name} ({_times(model)} at {model.measured}; {self._decided_by(model)})"

    def _decided_by(self, model: Alternative) -> str:
        """Return how many more samples decide about a model, and which way if it is as measured."""
        # The spread of a few seeds is not known well enough for a number.
        if self.samples == SEEDS:
            return f"more {SEEDS} would decide"
        missing = f"{missing_samples(model.loss, self.tolerance, model.samples):,} more {self.samples} would decide"
        if not _decides(model.loss, self.tolerance, model.samples, _MOST * model.samples):
            return f"at least {missing}"
        return f"about {missing}, probably {'for' if model.loss.value <= self.tolerance else 'against'} it"


def beside_controls(
    differences: Mapping[str, Estimate | None],
    tolerance: float,
    agreements: Mapping[str, Estimate | None] = MappingProxyType({}),
) -> str:
    """Say which models are better or worse than their controls, such as random tokens; empty where none is tested.

    Args:
        differences: Difference of each model to its control in points, by name; None for those without.
        tolerance: Share that may be lost: models whose whole interval is within it are as good as their controls.
        agreements: That of the agreement with the dense model, where something else is compared.
    """
    groups: dict[str, list[str]] = {"better": [], "worse": [], "alike": [], "open": []}
    for name, value in differences.items():
        if value is None or not value.has_interval:
            continue
        agreement = agreements.get(name)
        if value.is_clear:
            groups["better" if value.low > 0 else "worse"].append(name)
        elif agreement is not None and agreement.is_clear:
            groups["open"].append(f"{name} ({'better' if agreement.low > 0 else 'worse'} by agreement)")
        else:
            # An interval with zero in it is no proof of equality: all of it has to be small.
            groups["alike" if _is_equivalent(value, tolerance) else "open"].append(name)
    named = {group: "; ".join(names) for group, names in groups.items() if names}
    sentences = {
        "better": "Clearly better than their controls, such as random tokens: {}.",
        "worse": "Clearly worse than their controls, such as random tokens: {}.",
        "alike": f"Within {100 * tolerance:g} points of their controls by the whole interval: {{}}. On these samples "
        "it hardly matters what these keep.",
        "open": "Too few samples to tell from their controls: {}.",
    }
    return " ".join(sentences[group].format(names) for group, names in named.items())


def in_batches_of(size: int, samples: str = "images") -> str:
    """Return in words how many samples a timed pass has."""
    return f"for single {samples}" if size == 1 else f"in batches of {size}"


def keeps(loss: Estimate, tolerance: float) -> bool:
    """Return whether the whole interval of a loss is within a tolerance."""
    return loss.high <= tolerance


def exceeds(loss: Estimate, tolerance: float) -> bool:
    """Return whether the whole interval of a loss is above a tolerance."""
    return loss.low > tolerance


def missing_samples(loss: Estimate, tolerance: float, samples: int) -> int:
    """Return about how many more samples would decide, if these are alike: their interval is within or beyond.

    It is a lower bound for a loss that is too close to the tolerance, or has no interval yet.

    Args:
        samples: Number of samples that the estimate is from.
    """
    if not loss.has_interval:
        return max(1, FEWEST - samples)
    # Intervals of more samples are narrower, so that the least number is found by halves.
    most = _MOST * samples
    numbers = range(samples + 1, most)
    least = bisect.bisect_left(numbers, True, key=lambda wanted: _decides(loss, tolerance, samples, wanted))
    missing = least + 1
    digits = max(0, len(str(missing)) - 2)
    return math.ceil(missing / 10**digits) * 10**digits


def _decides(loss: Estimate, tolerance: float, samples: int, wanted: int) -> bool:
    """Return whether so many samples decide about a loss that is measured on some."""
    # Too few samples do not say how far others may be.
    if not loss.has_interval:
        return False
    grown = of_samples(loss, samples, wanted)
    return keeps(grown, tolerance) or exceeds(grown, tolerance)


def _is_equivalent(difference: Estimate, tolerance: float) -> bool:
    """Return whether the whole interval of a difference in points is within a tolerance to both sides."""
    return max(-difference.low, difference.high) <= 100 * tolerance


def _times(model: Alternative) -> str:
    return f"{model.speedup:[.2f} times as fast"
