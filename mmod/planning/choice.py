"""Which model to use in place of the dense one: the rule by which advice and studies decide, and its words.

A model counts by the worse end of its 95 % interval: it is within a tolerance if that end is, and at a wanted speed the
one whose worse end is best is named. So the sentence follows from the table by eye.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmod.analysis.statistics import Estimate, of_samples, unbeaten
from mmod.analysis.table import FEWEST
from mmod.analysis.timing import Spread

TOLERANCE = 0.02
"""Share of accuracy, or of agreement, that may be lost."""
NOISE = 1.03
"""Speeds whose ratio is below this are within the noise of a machine."""
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
        note: Further sentences about it, where it is named.
        is_control: It chooses nothing and shows what others gain by choosing: it is compared, and never advised.
    """

    name: str
    speedup: Spread
    loss: Estimate
    samples: int
    measured: str
    note: str = ""
    is_control: bool = False

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
        tolerance: Share that may be lost.
        unit: Unit of losses, "points" or "%".
        samples: What intervals are over, "images", "prompts" or `SEEDS`.
        where: The pass, such as "in batches of 8".
    """

    models: Sequence[Alternative]
    tolerance: float
    unit: str
    samples: str
    where: str

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

    def at_speed(self, speed: float) -> Alternative | None:
        """Return the model that loses least, by the worse end of its interval, of those that reach a speed-up."""
        # The best mean of many is often luck. What reaches the speed within the noise counts.
        reaching = [model for model in self._advised if NOISE * model.speedup.median >= speed]
        return min(reaching, key=lambda model: (model.worst, -model.speedup.median), default=None)

    @property
    def sentence(self) -> str:
        """The choice first, and what so few samples leave undecided."""
        named = self.named
        others = [self._as_undecided(model) for model in self.undecided if model is not named]
        if self.best is not None:
            text = f"Use {self.best.name}: {_times(self.best)} {self.where}, at {self._measured(self.best)}."
            further = f" Undecided, and faster: {', '.join(others)}." if others else ""
            return f"{text}{_noted(self.best)}{further}"
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
        return f"Nothing here pays {self.where} at a tolerance of {self.limit}: keep the dense model."

    def sentence_at(self, speed: float) -> str:
        """Return what to use for a speed-up that is wanted, or that nothing keeps the tolerance, and the nearest."""
        chosen = self.at_speed(speed)
        if chosen is None:
            fastest = max(self._advised, key=lambda model: model.speedup.median, default=None)
            nearest = ""
            if fastest is not None:
                nearest = f"; the fastest is {fastest.name}: {_times(fastest)} at {self._measured(fastest)}"
            return f"Nothing tried is {speed:g} times as fast {self.where}{nearest}.{self._beside(fastest)}"
        about = "" if chosen.speedup.median >= speed else "about "
        if keeps(chosen.loss, self.tolerance):
            return (
                f"For {about}{speed:g} times the speed use {chosen.name}: {_times(chosen)} {self.where}, at "
                f"{self._measured(chosen)}, the least lost of what was tried.{_noted(chosen)}"
            )
        # Its worse end is the best of all at this speed.
        text = (
            f"Nothing tried is sure to stay within {self.limit} at {about}{speed:g} times the speed {self.where}: "
            f"least lost is {chosen.name}, {_times(chosen)} at {self._measured(chosen)}.{_noted(chosen)}"
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
        """The models that lose least at some speeds, a line each, without that of the sentence; empty for no other."""
        speeds: dict[Alternative, list[float]] = {}
        for speed in _SPEEDS:
            chosen = self.at_speed(speed)
            if chosen is not None:
                speeds.setdefault(chosen, []).append(speed)
        if not speeds:
            return f"Nothing measured is {_SPEEDS[0]:g} times as fast {self.where}."
        lines = []
        for chosen, reached in speeds.items():
            if not self._is_tested or chosen is not self.named:
                times = " and ".join(f"{speed:g}" for speed in reached)
                lines.append(f"- {times} times as fast: {chosen.name}, {_times(chosen)} at {self._measured(chosen)}")
        header = f"Least lost {self.where}, by the worse end of each interval, speeds within 3 %:\n"
        return "\n".join([header, *lines] if lines else [])

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
        return [model for model in self.models if not model.is_control]

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
        return f"{100 * self.tolerance:g} {self.unit}"

    def _is_open(self, model: Alternative) -> bool:
        return not keeps(model.loss, self.tolerance) and not exceeds(model.loss, self.tolerance)

    def _measured(self, model: Alternative) -> str:
        """Return what a model loses in words, with a warning where that may be more than the tolerance."""
        if exceeds(model.loss, self.tolerance):
            return f"{model.measured}, which is clearly more lost than {self.limit}"
        if model.worst > self.tolerance and model.loss.has_interval:
            return f"{model.measured}, but may lose up to {100 * model.worst:.1f} {self.unit}"
        return model.measured

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


def noted(alone: Spread | None, control: str | None, to_control: Estimate | None) -> str:
    """Say whether a model chosen in batches is slower for single samples, and how it compares with its control.

    Args:
        alone: Its speed-up for single samples, where it was timed.
        to_control: Difference to its control in points.
    """
    notes = []
    if alone is not None and alone.median < 1:
        notes.append(f"For single images it is slower than the dense model: {alone.median:.2f} times as fast.")
    if to_control is not None and to_control.has_interval:
        if to_control.low > 0:
            notes.append(
                f"It is better than its control, {control}, by {to_control:.1f} points: what it keeps matters."
            )
        elif to_control.high < 0:
            notes.append(f"It is worse than its control ({to_control:+.1f} points): {control} keeps what matters more.")
        else:
            notes.append(
                f"It is not clearly better than its control, {control} ({to_control:+.1f} points): on these samples it "
                "hardly matters what is kept."
            )
    return " ".join(notes)


def beside_controls(differences: Mapping[str, Estimate | None]) -> str:
    """Say which models are better or worse than their controls, such as random tokens; empty where none is tested.

    Args:
        differences: Difference of each model to its control, by name; None for those without.
    """
    tested = {name: value for name, value in differences.items() if value is not None and value.has_interval}
    better = "; ".join(name for name, value in tested.items() if value.low > 0)
    worse = "; ".join(name for name, value in tested.items() if value.high < 0)
    alike = "; ".join(name for name, value in tested.items() if not value.is_clear)
    sentences = []
    if better:
        sentences.append(f"Clearly better than their controls, such as random tokens: {better}.")
    if worse:
        sentences.append(f"Clearly worse than their controls, such as random tokens: {worse}.")
    if alike:
        sentences.append(
            f"Not clearly different from their controls, such as random tokens: {alike}. On these samples it hardly "
            "matters what these keep."
        )
    return " ".join(sentences)


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


def _times(model: Alternative) -> str:
    return f"{model.speedup.median:.2f} times as fast"


def _noted(model: Alternative) -> str:
    return f" {model.note}" if model.note else ""
