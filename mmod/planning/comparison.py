"""What every comparison of models needs: interleaved times, differences with intervals, and who is as fast."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

import numpy as np

from mmod.analysis.statistics import Estimate, change_of, estimate_of, resampled_means, share_of

_DRAWS = 2000


class Scores(ABC):
    """Scores of models, compared in pairs: by seed, or by sample."""

    @abstractmethod
    def mean(self, name: str) -> float:
        """Return the mean score of a model."""

    @abstractmethod
    def gap(self, name: str, other: str) -> Estimate | None:
        """Return the difference of a model's score to another's; None where they share no seed or sample."""

    def gaps(self, partners: Mapping[str, str | None]) -> dict[str, Estimate | None]:
        """Return the difference of every model to its partner; None for none, or itself."""
        return {
            name: None if partner is None or partner == name else self.gap(name, partner)
            for name, partner in partners.items()
        }

    def best(self, names: Iterable[str]) -> str | None:
        """Return the model with the best mean score; None of none."""
        return max(names, key=self.mean, default=None)


class SampleScores(Scores):
    """Scores of models that are paired by sample; models may be judged on the first samples alone.

    Args:
        by_sample: The score of each sample (N,), by model.

    Example:
        >>> scores = SampleScores({"dense": np.ones(64), "a": np.eye(1, 64, 3)[0]})
        >>> print(scores.interval("dense"), scores.gap("a", "dense"))
        1.0 [0.9, 1.0] -1.0 [-1.0, -0.9]
    """

    def __init__(self, by_sample: Mapping[str, np.ndarray]) -> None:
        self.by_sample = by_sample

    def mean(self, name: str) -> float:
        """Return the mean over the samples that a model is judged on."""
        return float(self.by_sample[name].mean())

    def interval(self, name: str) -> Estimate:
        """Return the mean with its interval: by a formula of counts where scores are 0 and 1, else by the bootstrap."""
        score_N = self.by_sample[name]
        return share_of(score_N) if {0, 1}.issuperset(score_N) else _bootstrapped(score_N)

    def gap(self, name: str, other: str) -> Estimate | None:
        """Return the difference of a model's score to another's over the samples of both; None where there are none."""
        count = min(len(self.by_sample[name]), len(self.by_sample[other]))
        change_N = self.by_sample[name][:count] - self.by_sample[other][:count]
        if not count:
            return None
        return change_of(change_N) if {-1, 0, 1}.issuperset(change_N) else _bootstrapped(change_N)


def _bootstrapped(value_N: np.ndarray) -> Estimate:
    return estimate_of(float(value_N.mean()), resampled_means(value_N[:, None], _DRAWS, seed=0)[:, 0])
