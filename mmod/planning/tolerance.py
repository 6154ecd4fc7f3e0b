"""Whether a loss is within a tolerance, and how many more samples would tell.

Each decision is a one-sided test at 5 %: one end of a 90 % interval, as in TOST (Schuirmann, 1987).
"""

from __future__ import annotations

import math

from mmod.analysis.statistics import Estimate

# Samples that the intervals of shares and changes count beside the real ones (Agresti and Coull, 1998).
_PSEUDO = 4
# Half of a 90 % interval as a share of that of the 95 % interval of an estimate.
_ONE_SIDED = 1.645 / 1.96
# By how much the distance to the tolerance exceeds half of a 95 % interval if 80 % of new samples decide.
_POWER = (1.645 + 0.84) / 1.96
# A loss that would need more times as many samples is too close to the tolerance for an estimate.
_MOST = 50


def keeps(loss: Estimate, tolerance: float) -> bool:
    """Return whether a loss is clearly within a tolerance."""
    return loss.value + _ONE_SIDED * (loss.high - loss.value) <= tolerance


def exceeds(loss: Estimate, tolerance: float) -> bool:
    """Return whether a loss is clearly above a tolerance."""
    return loss.value - _ONE_SIDED * (loss.value - loss.low) > tolerance


def missing_samples(loss: Estimate, tolerance: float, samples: int) -> int:
    """Return about how many more samples would decide in four of five cases, if the loss is the estimate.

    It is a lower bound for a loss that is too close (`is_too_close`): 50 times the samples.

    Args:
        samples: Number of samples that the estimate is from.
    """
    counted = samples + _PSEUDO
    missing = counted * min(_growth(loss, tolerance), _MOST) - counted
    digits = max(0, len(str(round(missing))) - 2)
    return max(1, math.ceil(missing / 10**digits) * 10**digits)


def is_too_close(loss: Estimate, tolerance: float) -> bool:
    """Return whether a loss is so close to the tolerance that `missing_samples` is a lower bound."""
    return _growth(loss, tolerance) > _MOST


def _growth(loss: Estimate, tolerance: float) -> float:
    """Return how many times as many samples would decide."""
    # One sample does not say how far others may be.
    if not loss.has_interval:
        return math.inf
    margin = abs(tolerance - loss.value)
    # The end of the interval that must pass the tolerance. Those of small shares are short below, with few samples.
    half = loss.high - loss.value if loss.value <= tolerance else (loss.high - loss.low) / 2
    shrinking = half / margin if margin else math.inf
    # An interval shrinks with the square root of the samples; one end of it without any loss, with the samples.
    return _POWER**2 * (shrinking if loss.value == 0 else shrinking**2)
