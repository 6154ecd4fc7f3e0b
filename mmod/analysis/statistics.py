"""Figures with intervals, by the bootstrap over images or Student's t over seeds; tests by random signs, Holm's method.

Axes: I or N images, B images of a batch, C columns, S draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = [
    "BySeed",
    "Difference",
    "Estimate",
    "Resampling",
    "RunningMean",
    "adjusted",
    "difference",
    "estimate_of",
    "pseudo_mean",
    "resampled_means",
    "sign_test",
    "simultaneous",
]

Values = NDArray[np.float64]
BySeed = Mapping[int, float]
"""The figure of one model for each seed."""
# Numbers that are drawn at once, so that memory does not grow with the images.
_AT_ONCE = 4_000_000
_NORMAL = 1.959964


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval.

    Args:
        value: The figure.
        low: Lower end of the interval.
        high: Upper end.

    Example:
        >>> print(Estimate(91.25, 89.5, 93.0))
        91.2 [89.5, 93.0]
    """

    value: float
    low: float
    high: float

    def __rmul__(self, factor: float) -> Estimate:
        return Estimate(factor * self.value, factor * self.low, factor * self.high)

    def __format__(self, form: str) -> str:
        form = form or ".1f"
        return f"{self.value:{form}} [{self.low:{form}}, {self.high:{form}}]"

    def __str__(self) -> str:
        return format(self)


@dataclass(frozen=True)
class Difference:
    """Mean difference between two models over the seeds they share.

    Args:
        mean: The mean difference.
        low: Lower end of its 95 % interval; None with one seed.
        high: Upper end.
        seeds: Number of shared seeds.

    Example:
        >>> print(Difference(-0.5, -0.8, -0.2, seeds=5), Difference(-0.5, -0.8, -0.2, seeds=5).is_clear)
        -0.5 [-0.8, -0.2] True
    """

    mean: float
    low: float | None
    high: float | None
    seeds: int

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    def __str__(self) -> str:
        interval = "" if self.low is None else f" [{self.low:+.1f}, {self.high:+.1f}]"
        return f"{self.mean:+.1f}{interval}"


def difference(own: BySeed, other: BySeed) -> Difference:
    """Return how much higher `own` is than `other`, paired by seed.

    Args:
        own: Figures of a model by seed.
        other: Figures of the model it is compared with.

    Returns:
        The mean with its interval by Student's t distribution.

    Raises:
        ValueError: If they share no seed.

    Example:
        >>> print(difference({0: 95.0, 1: 94.0, 2: 96.0}, {0: 94.0, 1: 93.2, 2: 94.8}))
        +1.0 [+0.5, +1.5]
    """
    shared = sorted(set(own) & set(other))
    if not shared:
        raise ValueError(f"no shared seed: one has seeds {sorted(own)}, the other {sorted(other)}")
    gaps = [own[seed] - other[seed] for seed in shared]
    middle = mean(gaps)
    if len(gaps) == 1:
        return Difference(middle, None, None, 1)
    half = _quantile(len(gaps) - 1) * stdev(gaps) / len(gaps) ** 0.5
    return Difference(middle, middle - half, middle + half, len(gaps))


def resampled_means(value_IC: Values, draws: int, seed: int) -> Values:
    """Return the means of columns over images drawn with replacement, the same images for all columns (draws, C).

    Args:
        value_IC: A row for each image.
        draws: How often images are drawn.
        seed: Chooses the draws.

    Source: Efron, The Annals of Statistics 7 (1979): the bootstrap.
    """
    return np.concatenate([count_SI @ value_IC / len(value_IC) for count_SI in _drawn(len(value_IC), draws, seed)])


def estimate_of(value: float, resampled: Values) -> Estimate:
    """Return a figure with the percentile interval of what it is in the resamples.

    Args:
        value: The figure.
        resampled: The same in each resample.
    """
    low, high = np.percentile(resampled, (2.5, 97.5))
    return Estimate(float(value), float(low), float(high))


class Resampling:
    """Bootstrap over images: draws with replacement, the same for all that is compared.

    Args:
        images: Number of images.
        draws: Number of draws.
        seed: Seed of the draws.

    Source: Efron, Bootstrap methods: another look at the jackknife, Annals of Statistics 7 (1979).
    """

    def __init__(self, images: int, draws: int = 2000, seed: int = 0) -> None:
        # How often each image is drawn, as a share of all.
        self.weight_SN = np.concatenate([own.astype(np.float32) / images for own in _drawn(images, draws, seed)])

    def mean(self, values: np.ndarray) -> Difference:
        """Return the mean of a figure over the images, with its 95 % interval.

        Args:
            values: The figure of each image (images,); of a paired difference, the difference.

        Example:
            >>> print(Resampling(4).mean(np.full(4, 2.0)))
            +2.0 [+2.0, +2.0]
        """
        return self.of(lambda weight_SN: weight_SN @ values.astype(np.float64))

    def of(self, figure: Callable[[np.ndarray], np.ndarray]) -> Difference:
        """Return a figure of the images, with its 95 % interval.

        Args:
            figure: From the weight of each image in each draw (draws, images) to the figure in each draw (draws,).
        """
        images = self.weight_SN.shape[1]
        whole = estimate_of(figure(np.full((1, images), 1 / images))[0], figure(self.weight_SN))
        return Difference(whole.value, whole.low, whole.high, seeds=1)


def simultaneous(value_C: Values, resampled: Values) -> list[Estimate]:
    """Return figures with intervals that hold for all of them together in 95 of 100 cases.

    All are as wide in standard errors as the largest error in a resample is in 95 of 100 resamples.

    Args:
        value_C: The figures.
        resampled: The same in each resample (draws, C).

    Source: Romano and Wolf, Econometrica 73 (2005), section 4: studentized maxima.
    """
    error = resampled.std(axis=0)
    far = np.abs(resampled - resampled.mean(axis=0)) / np.where(error > 0, error, 1.0)
    half_C = np.percentile(far.max(axis=1), 95) * error
    return [Estimate(value, value - half, value + half) for value, half in zip(value_C.tolist(), half_C.tolist())]


def pseudo_mean(value: float, left_out_G: Tensor) -> Estimate:
    """Return a figure without the bias of small samples, and its normal interval, from groups left out one by one.

    Args:
        value: The figure of all images.
        left_out_G: The same without each group of images (G,).

    Source: Tukey, The Annals of Mathematical Statistics 29 (1958): the jackknife's pseudo-values.

    Example:
        >>> import torch
        >>> values = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64)
        >>> print(pseudo_mean(3.0, (12.0 - values) / 3))  # The mean has no bias.
        3.0 [0.9, 5.1]
    """
    groups = RunningMean()
    groups.add(len(left_out_G) * value - (len(left_out_G) - 1) * left_out_G)
    return groups.mean()


def sign_test(gap_IC: Values, draws: int, seed: int) -> Values:
    """Return for each column how likely a mean as far from 0 is where signs are a matter of chance.

    Args:
        gap_IC: Paired differences, a row for each image.
        draws: How often signs are drawn.
        seed: Chooses the draws.

    Returns:
        Two-sided p-values, never below 1 / (draws + 1).

    Source: Fisher, The Design of Experiments (1935), section 21.

    Example:
        >>> sign_test(np.stack([np.ones(20), np.tile([1.0, -1.0], 10)], axis=1), 999, seed=0).tolist()
        [0.001, 1.0]
    """
    images, rng = len(gap_IC), np.random.default_rng(seed)
    # Rounding of sums must not tell equal ones apart.
    far = np.abs(gap_IC.sum(axis=0)) - 1e-9
    beyond = np.zeros(gap_IC.shape[1])
    for start in range(0, draws, _step(images)):
        size = min(_step(images), draws - start)
        signs = rng.integers(0, 2, size=(size, images), dtype=np.int8) * 2.0 - 1
        beyond += (np.abs(signs @ gap_IC) >= far).sum(axis=0)
    return (beyond + 1) / (draws + 1)


def adjusted(p: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number, by Holm's method.

    Args:
        p: The p-values.

    Source: Holm, Scandinavian Journal of Statistics 6 (1979).

    Example:
        >>> adjusted([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    found, worst = [0.0] * len(p), 0.0
    for rank, place in enumerate(np.argsort(p, kind="stable")):
        worst = max(worst, min(1.0, (len(p) - rank) * p[place]))
        found[place] = worst
    return found


class RunningMean:
    """Running mean and variance of a value per image, in constant memory.

    Args:
        sums: How many figures there were, their sum and that of their squares.
    """

    def __init__(self, sums: Sequence[float] = (0.0, 0.0, 0.0)) -> None:
        self.sums = np.array(sums)

    def add(self, value_B: Tensor) -> None:
        """Add the figures of a batch; those that are not finite do not count.

        Args:
            value_B: One value per image (B,).
        """
        value_B = value_B[value_B.isfinite()].double()
        self.sums += [len(value_B), float(value_B.sum()), float(value_B.square().sum())]

    def mean(self) -> Estimate:
        """Return the mean over the images with its normal interval, NaN where there are none."""
        count, total, squares = self.sums.tolist()
        if not count:
            return Estimate(float("nan"), float("nan"), float("nan"))
        mean = total / count
        variance = max(0.0, squares / count - mean**2) * count / max(1.0, count - 1)
        half = _NORMAL * (variance / count) ** 0.5
        return Estimate(mean, mean - half, mean + half)


def _drawn(images: int, draws: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Yield how often each image is drawn, with replacement, in some of the draws (S, I)."""
    rng = np.random.default_rng(seed)
    for start in range(0, draws, _step(images)):
        size = min(_step(images), draws - start)
        yield rng.multinomial(images, np.full(images, 1 / images), size=size)


def _step(images: int) -> int:
    return max(1, _AT_ONCE // images)


def _quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.975))
