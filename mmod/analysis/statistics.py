"""Confidence intervals by the bootstrap, the jackknife or Student's t; permutation tests with Holm's correction.

Axes: I or N images, C columns, S draws."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist, mean, stdev
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mmod.plain import without_nan

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Values = NDArray[np.float64]
BySeed = Mapping[int, float]
"""The figure of one model for each seed."""
# Numbers that are drawn at once, which bounds memory.
_CHUNK = 4_000_000
_NORMAL = 1.959964
ROUNDING = 1e-9
"""Errors of sums and of resampled means, which give equal values an interval: far below what figures differ by."""
# Measurements repeat to within 2 %.
_AS_CHEAP = 1.02
Name = TypeVar("Name")
FEWEST = 59
"""Samples below which a mean of other figures than zeros and ones has no interval.

The largest loss among so many bounds those of 19 in 20 samples with 95 % probability. Among fewer, samples that lose
more than all others may be missing, and a bootstrap would not know of them. Source: Wilks, The Annals of Mathematical
Statistics 12 (1941).
"""
# A loss that would need more times as many samples is too close to the tolerance for an estimate.
MOST = 50


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % confidence interval.

    Args:
        value: NaN without samples.
        low: Lower end of the interval; NaN without an interval.
        seeds: Number of paired seeds if this is a difference between two models, which is printed with its sign; None
            otherwise.

    Example:
        >>> print(Estimate(91.25, 89.5, 93.0))
        91.2 [89.5, 93.0]
        >>> print(Estimate(-0.5, -0.8, -0.2, seeds=5), Estimate(-0.5, seeds=1), Estimate(math.nan), Estimate(1, 1, 1))
        -0.5 [-0.8, -0.2] -0.5 no samples 1.0
    """

    value: float
    low: float = math.nan
    high: float = math.nan
    seeds: int | None = None

    @property
    def has_interval(self) -> bool:
        """Whether there is an interval; one seed or too few samples give none."""
        return not math.isnan(self.low)

    @property
    def has_width(self) -> bool:
        """Whether there is an interval that says something of chance: samples that are all alike say nothing."""
        if not self.has_interval:
            return False
        return self.high - self.low > ROUNDING * max(1.0, abs(self.value))

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0

    def __rmul__(self, factor: float) -> Estimate:
        # A negative factor would swap the ends; those in use are positive.
        return Estimate(factor * self.value, factor * self.low, factor * self.high, self.seeds)

    def __format__(self, form: str) -> str:
        if math.isnan(self.value):
            return "no samples"
        if not form:
            # A difference has a sign, also above zero.
            form = ".1f" if self.seeds is None else "+.1f"
        value = _written(self.value, form)
        if not self.has_width:
            return value
        return f"{value} [{_written(self.low, form)}, {_written(self.high, form)}]"

    def __str__(self) -> str:
        return format(self)


def _written(number: float, form: str) -> str:
    """Return a number as text, in which zero has one sign."""
    text = f"{number:{form}}"
    is_zero = not text.strip("+-0.")
    if is_zero:
        return f"{0.0:{form}}"
    return text


def published(result: DataclassInstance) -> dict[str, object]:
    """Return the fields of a dataclass, and of those in it, under the names that files of results have.

    An `Estimate` gets the keys value, low and high; one that is a difference paired by seed gets mean, low, high and
    seeds. NaN becomes None. Other dataclasses keep their names.
    """
    return asdict(result, dict_factory=_published_fields)


def _published_fields(fields: Sequence[tuple[str, object]]) -> dict[str, object]:
    named = dict(fields)
    if list(named) != ["value", "low", "high", "seeds"]:
        return named
    seeds = named.pop("seeds")
    value, low, high = without_nan(list(named.values()))
    if seeds is None:
        return {"value": value, "low": low, "high": high}
    return {"mean": value, "low": low, "high": high, "seeds": seeds}


def difference(one: BySeed, other: BySeed) -> Estimate:
    """Return the mean of `one` minus `other`, paired by seed, with its interval by Student's t distribution.

    Example:
        >>> print(difference({0: 95.0, 1: 94.0, 2: 96.0}, {0: 94.0, 1: 93.2, 2: 94.8}))
        +1.0 [+0.5, +1.5]
    """
    seeds = sorted(set(one) & set(other))
    gaps = [one[seed] - other[seed] for seed in seeds]
    middle = mean(gaps)
    if len(gaps) == 1:
        return Estimate(middle, seeds=1)
    from scipy.special import stdtrit

    quantile = float(stdtrit(len(gaps) - 1, 0.975))
    half = quantile * stdev(gaps) / len(gaps) ** 0.5
    return Estimate(middle, middle - half, middle + half, len(gaps))


def estimate_of(value: float, resampled: Values) -> Estimate:
    """Return a figure with the percentile interval of its bootstrap resamples."""
    low, high = np.percentile(resampled, (2.5, 97.5))
    return Estimate(float(value), float(low), float(high))


def share_of(is_so_I: Values) -> Estimate:
    """Return the share of ones among zeros and ones; the interval has a width even where all are equal.

    Values between zero and one have an interval at most as wide.

    Source: Wilson, Journal of the American Statistical Association 22 (1927).

    Example:
        >>> print(100 * share_of(np.ones(64)))
        100.0 [94.3, 100.0]
    """
    return _interval_of_share(float(is_so_I.mean(dtype=np.float64)), len(is_so_I))


def _interval_of_share(share: float, images: int) -> Estimate:
    # Wilson's interval.
    extra = _NORMAL**2 / images
    middle = (share + extra / 2) / (1 + extra)
    half = (extra * share * (1 - share) + extra**2 / 4) ** 0.5 / (1 + extra)
    return Estimate(share, min(share, middle - half), max(share, middle + half))


def change_of(change_I: Values) -> Estimate:
    """Return the mean of changes by -1, 0 or 1; the interval has a width even where nothing changed.

    Source: Bonett and Price, Journal of Educational and Behavioral Statistics 37 (2012): one more change each way.

    Example:
        >>> print(100 * change_of(np.zeros(256)))
        0.0 [-1.1, 1.1]
    """
    padded = np.append(change_I, [1.0, -1.0])
    middle = float(padded.mean())
    half = _NORMAL * float(padded.std()) / len(padded) ** 0.5
    return Estimate(float(change_I.mean()), middle - half, middle + half)


def of_samples(mean: Estimate, samples: int, wanted: int) -> Estimate:
    """Return a mean with the interval that other samples of another number would give, if they are alike.

    Args:
        mean: One of `samples` samples: a share, a change, or a mean whose interval is from its spread.

    Example:
        >>> print(100 * of_samples(change_of(np.zeros(80)), 80, 137), 100 * change_of(np.zeros(137)))
        0.0 [-2.0, 2.0] 0.0 [-2.0, 2.0]
    """
    if 0 <= mean.value <= 1:
        share = _interval_of_share(mean.value, samples)
        is_low = math.isclose(share.low, mean.low, abs_tol=ROUNDING)
        is_high = math.isclose(share.high, mean.high, abs_tol=ROUNDING)
        # The interval is that of a share, and not of a change or a mean.
        if is_low and is_high:
            return _interval_of_share(mean.value, wanted)
    middle = mean.value * samples / (samples + 2)
    # The further end: the other one may be cut off where all or none are right.
    half = max(mean.high - middle, middle - mean.low)
    # The two changes that `change_of` adds weigh less with more samples, so that its interval shrinks faster.
    changed = ((half / _NORMAL) ** 2 * (samples + 2) + middle**2) * (samples + 2) - 2
    if changed / samples >= mean.value**2 - ROUNDING:
        middle = mean.value * wanted / (wanted + 2)
        variance = (changed * wanted / samples + 2) / (wanted + 2) - middle**2
        half = _NORMAL * (variance / (wanted + 2)) ** 0.5
        return Estimate(mean.value, middle - half, middle + half)
    shrinking = (samples / wanted) ** 0.5
    low = mean.value - shrinking * (mean.value - mean.low)
    high = mean.value + shrinking * (mean.high - mean.value)
    return Estimate(mean.value, low, high)


def one_of_many(value: Estimate, number: int) -> Estimate:
    """Return an estimate with the interval that it has beside others, all of which hold together with 95 %.

    Args:
        number: How many there are.

    Source: Dunn, Journal of the American Statistical Association 56 (1961): Bonferroni's inequality.

    Example:
        >>> print(one_of_many(Estimate(-4.0, -7.9, -0.1), 19))
        -4.0 [-10.0, 2.0]
    """
    wider = NormalDist().inv_cdf(1 - 0.025 / number) / _NORMAL
    if value.seeds is not None and value.seeds > 1:
        from scipy.special import stdtrit

        corrected = stdtrit(value.seeds - 1, 1 - 0.025 / number)
        wider = float(corrected / stdtrit(value.seeds - 1, 0.975))
    low = value.value - wider * (value.value - value.low)
    return replace(value, low=low, high=value.value + wider * (value.high - value.value))


def keeps(loss: Estimate, tolerance: float) -> bool:
    """Return whether the whole interval of a loss is within a tolerance."""
    return loss.high <= tolerance


def exceeds(loss: Estimate, tolerance: float) -> bool:
    """Return whether the whole interval of a loss is above a tolerance."""
    return loss.low > tolerance


def chance_within(loss: Estimate, tolerance: float) -> float:
    """Return the chance that a loss is within a tolerance, as if it were normal to the end that faces the tolerance.

    Example:
        >>> chance_within(Estimate(0.02, 0.0, 0.04), 0.02), round(chance_within(Estimate(0.01, 0.0, 0.03), 0.02), 2)
        (0.5, 0.84)
    """
    end = loss.high if loss.value <= tolerance else loss.low
    # Of 95 %, both ends are as many deviations away.
    deviation = abs(end - loss.value) / NormalDist().inv_cdf(0.975)
    return NormalDist(loss.value, deviation).cdf(tolerance)


def missing_samples(loss: Estimate, tolerance: float, samples: int) -> int:
    """Return about how many more samples would decide, if these are alike: their interval is within or beyond.

    It is a lower bound for a loss that is too close to the tolerance, or has no interval yet.

    Args:
        samples: Number of samples that the estimate is from.
    """
    if not loss.has_interval:
        return max(1, FEWEST - samples)
    # Intervals of more samples are narrower, so that the least number is found by halves.
    most = MOST * samples
    numbers = range(samples + 1, most)
    least = bisect.bisect_left(numbers, True, key=lambda wanted: decides(loss, tolerance, samples, wanted))
    missing = least + 1
    digits = max(0, len(str(missing)) - 2)
    return math.ceil(missing / 10**digits) * 10**digits


def least_samples(tolerance: float, is_share: bool) -> int:
    """Return the number of samples from which on a model that changes no answer is within a tolerance, as `keeps` says.

    Args:
        tolerance: Above 0: at 0, no number of samples suffices.
        is_share: Its interval is that of `share_of`, and else that of `change_of`.

    Example:
        >>> least_samples(0.02, is_share=False), least_samples(0.02, is_share=True)
        (137, 189)
    """
    # Where nothing changes, the ends of both intervals are fractions of the number of samples.
    if is_share:
        return math.ceil(_NORMAL**2 * (1 - tolerance) / tolerance)
    return max(1, math.ceil(_NORMAL * 2**0.5 / tolerance - 2))


def decides(loss: Estimate, tolerance: float, samples: int, wanted: int) -> bool:
    """Return whether so many samples decide about a loss that is measured on some."""
    # Too few samples do not say how far others may be.
    if not loss.has_interval:
        return False
    grown = of_samples(loss, samples, wanted)
    return keeps(grown, tolerance) or exceeds(grown, tolerance)


class Resampling:
    """Images drawn with replacement, the same draws for all figures that are compared.

    Source: Efron, The Annals of Statistics 7 (1979): the bootstrap.
    """

    def __init__(self, images: int, draws: int = 2000, seed: int = 0) -> None:
        self.images = images
        rng = np.random.default_rng(seed)
        # How often each image is drawn, in some of the draws (S, I). In few bytes, since all of them are kept.
        self._counts: list[NDArray[np.int16]] = []
        for size in _chunks(images, draws):
            count_SI = rng.multinomial(images, np.full(images, 1 / images), size=size)
            self._counts.append(count_SI.astype(np.int16))

    def means(self, value_IC: Values) -> Values:
        """Return the column means of each draw (draws, C)."""
        return np.concatenate([count_SI @ value_IC / self.images for count_SI in self._counts])

    def of(self, figure: Callable[[np.ndarray], np.ndarray]) -> Estimate:
        """Return a difference that `figure` computes from weights of the images (S, images); one has no interval."""
        equal_weights = np.full((1, self.images), 1 / self.images)
        value = float(figure(equal_weights)[0])
        if self.images == 1:
            return Estimate(value, seeds=1)
        drawn = []
        for count_SI in self._counts:
            weight_SI = count_SI.astype(np.float32) / self.images
            drawn.append(figure(weight_SI))
        return replace(estimate_of(value, np.concatenate(drawn)), seeds=1)


def simultaneous(value_C: Values, resampled: Values) -> list[Estimate]:
    """Return figures with intervals that cover all of them together with 95 % probability.

    Every half-width is the same number of standard errors: the 95th percentile of the largest error in a resample.

    Source: Romano and Wolf, Econometrica 73 (2005), section 4: studentized maxima.
    """
    error = resampled.std(axis=0)
    # The largest deviation over all figures, in units of each one's error, bounds all of them at once.
    unit = np.where(error > 0, error, 1.0)
    deviation = np.abs(resampled - resampled.mean(axis=0)) / unit
    half_C = np.percentile(deviation.max(axis=1), 95) * error
    pairs = zip(value_C.tolist(), half_C.tolist())
    return [Estimate(value, value - half, value + half) for value, half in pairs]


def pseudo_mean(value: float, left_out_G: Tensor) -> Estimate:
    """Return the jackknife estimate of a figure, without its small-sample bias, and the normal interval.

    Source: Tukey, The Annals of Mathematical Statistics 29 (1958): the jackknife's pseudo-values.

    Example:
        >>> import torch
        >>> values = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64)
        >>> print(pseudo_mean(3.0, (12.0 - values) / 3))  # The mean has no bias.
        3.0 [0.9, 5.1]
    """
    groups = len(left_out_G)
    return normal_mean(groups * value - (groups - 1) * left_out_G)


def sign_test(gap_IC: Values, draws: int, seed: int) -> Values:
    """Return the two-sided p-value of each column's mean under random sign flips, at least 1 / (draws + 1).

    Source: Fisher, The Design of Experiments (1935), section 21.
    """
    images = len(gap_IC)
    rng = np.random.default_rng(seed)
    # Rounding must not make equal sums differ.
    observed = np.abs(gap_IC.sum(axis=0)) - 1e-9
    exceeding = np.zeros(gap_IC.shape[1])
    for size in _chunks(images, draws):
        signs = rng.integers(0, 2, size=(size, images), dtype=np.int8) * 2.0 - 1
        flipped = np.abs(signs @ gap_IC)
        exceeding += (flipped >= observed).sum(axis=0)
    # The observed signs count as one of the draws, so that no p-value is 0.
    return (exceeding + 1) / (draws + 1)


def adjusted(p: Sequence[float]) -> list[float]:
    """Return p-values corrected for multiple testing by Holm's method.

    Source: Holm, Scandinavian Journal of Statistics 6 (1979).
    """
    corrected = [0.0] * len(p)
    largest = 0.0
    for rank, index in enumerate(np.argsort(p, kind="stable")):
        # Never smaller than that of a smaller p-value: Holm's method goes on only while it rejects.
        largest = max(largest, min(1.0, (len(p) - rank) * p[index]))
        corrected[index] = largest
    return corrected


def normal_mean(value_I: Tensor) -> Estimate:
    """Return the mean of a figure over images with its normal interval, without those where it is not finite.

    NaN without images; one image has no interval.
    """
    # A figure over nothing, such as a share of no tokens, is NaN and does not count.
    value_I = value_I[value_I.isfinite()].double()
    count = len(value_I)
    if not count:
        return Estimate(math.nan)
    middle = float(value_I.sum()) / count
    if count == 1:
        return Estimate(middle)
    square = float(value_I.square().sum()) / count
    # Rounding may make it negative where all values are equal.
    variance = max(0.0, square - middle**2) * count / (count - 1)
    half = _NORMAL * (variance / count) ** 0.5
    return Estimate(middle, middle - half, middle + half)


def _chunks(images: int, draws: int) -> Iterator[int]:
    step = max(1, _CHUNK // images)
    for start in range(0, draws, step):
        yield min(step, draws - start)


def as_cheap(costs: Mapping[Name, float], name: Name, tolerance: float = _AS_CHEAP) -> list[Name]:
    """Return the others that cost at most as much as one of them, and 2 % more for noise."""
    return [other for other, cost in costs.items() if other != name and cost <= tolerance * costs[name]]


def unbeaten(
    costs: Mapping[Name, float], is_better: Callable[[Name, Name], bool], tolerance: float = _AS_CHEAP
) -> list[Name]:
    """Return the names than which none that is as cheap is better; `is_better` may hold for clear differences alone."""
    names = []
    for name in costs:
        if not any(is_better(other, name) for other in as_cheap(costs, name, tolerance)):
            names.append(name)
    return names


def pareto_front(costs: Mapping[Name, float], scores: Mapping[Name, float]) -> list[Name]:
    """Return the names that none beats: by a higher score at no higher cost, or by a lower cost at the same score.

    Example:
        >>> pareto_front({"a": 1.0, "b": 2.0, "c": 0.99}, {"a": 5, "b": 4, "c": 3})
        ['a', 'c']
    """

    def is_better(one: Name, other: Name) -> bool:
        if scores[one] == scores[other]:
            return costs[one] < costs[other]
        return scores[one] > scores[other]

    return unbeaten(costs, is_better, tolerance=1.0)
