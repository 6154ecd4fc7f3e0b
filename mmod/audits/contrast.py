"""Candidates on the same samples against the first of them: means and changes with intervals, and tests of the changes.

Axes: I samples, F figures (accuracy in percent, loss), C candidates, S resamples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmod.analysis.statistics import Estimate, Resampling, Values, estimate_of, sign_test
from mmod.analysis.table import Table, mean_outcomes
from mmod.audits.tables import ACCURACY, LOSS

OF_ACCURACY = 0
OF_LOSS = 1


def values_of(table: Table, names: Sequence[str]) -> Values:
    """Return accuracy in percent and loss of each sample under some candidates (I, F, C), means over their draws."""
    outcomes = [mean_outcomes(table, name) for name in names]
    accuracies = [100 * columns[ACCURACY] for columns in outcomes]
    losses = [columns[LOSS] for columns in outcomes]
    return np.stack([*accuracies, *losses], axis=1).reshape(-1, 2, len(names))


@dataclass(frozen=True)
class Contrast:
    """Candidates on the same samples, resampled together.

    Args:
        mean_FC: Means over samples.
        drawn_SFC: The means in each resample.
        change_IFC: Figures of each sample minus those of the first candidate.
        p_FC: P-values of these changes, not corrected; 1 for the first candidate.
    """

    mean_FC: Values
    drawn_SFC: Values
    change_IFC: Values
    p_FC: Values

    @classmethod
    def of(cls, value_IFC: Values, resamples: int, *, seed: int, sign_seed: int) -> Contrast:
        """Compare the candidates of a table's values, see `values_of`."""
        images, *shape = value_IFC.shape
        drawn = Resampling(images, resamples, seed).means(value_IFC.reshape(images, -1))
        change_IFC = value_IFC - value_IFC[:, :, :1]
        p = sign_test(change_IFC.reshape(images, -1), resamples, sign_seed)
        return cls(value_IFC.mean(axis=0), drawn.reshape(-1, *shape), change_IFC, p.reshape(shape))

    def mean(self, figure: int, candidate: int) -> Estimate:
        """Return the mean of a figure."""
        return estimate_of(self.mean_FC[figure, candidate], self.drawn_SFC[:, figure, candidate])

    def change(self, figure: int, candidate: int) -> Estimate:
        """Return the mean change of a figure."""
        return estimate_of(self.change_IFC[:, figure, candidate].mean(), self.drawn_change(figure, candidate))

    def drawn_change(self, figure: int, candidate: int) -> Values:
        """Return the mean change of a figure in each resample (S)."""
        return self.drawn_SFC[:, figure, candidate] - self.drawn_SFC[:, figure, 0]
