"""Curves of loss over size at one budget, and where they are least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Curve", "fit_curve"]


@dataclass(frozen=True)
class Curve:
    """A parabola of the loss in the logarithm of the size, through models of one budget and routing.

    Args:
        sizes: Parameters of the models, ascending.
        flops: FLOPs of a forward pass of each.
        coefficients: Those of the parabola, the highest power first.

    Source: Hoffmann et al., arXiv 2203.15556, approach 2.
    """

    sizes: tuple[float, ...]
    flops: tuple[float, ...]
    coefficients: tuple[float, float, float]

    def loss(self, size: float) -> float:
        """Return the loss at a number of parameters."""
        return float(np.polyval(self.coefficients, np.log(size)))

    def forward(self, size: float) -> float:
        """Return the FLOPs of a forward pass at a number of parameters, between those of the models next to it."""
        return float(np.exp(np.interp(np.log(size), np.log(self.sizes), np.log(self.flops))))

    @property
    def optimum(self) -> float | None:
        """The number of parameters with the least loss; None where the parabola has no least loss among the sizes."""
        square, slope, _ = self.coefficients
        if square <= 0:
            return None
        found = float(np.exp(-slope / (2 * square)))
        return found if self.sizes[0] <= found <= self.sizes[-1] else None


def fit_curve(sizes: Sequence[float], flops: Sequence[float], losses: Sequence[float]) -> Curve | None:
    """Fit a parabola by least squares; None for fewer than three sizes.

    Args:
        sizes: Parameters of each model.
        flops: FLOPs of a forward pass of each.
        losses: Loss of each.

    Example:
        >>> sizes = [1e4, 1e5, 1e6, 1e7]
        >>> curve = fit_curve(sizes, sizes, [3.0, 2.0, 2.0, 3.0])
        >>> round(curve.optimum), round(curve.loss(curve.optimum), 3)
        (316228, 1.875)
    """
    order = np.argsort(sizes)
    if len(set(sizes)) < 3:
        return None
    size, flop, loss = (np.asarray(each, dtype=float)[order] for each in (sizes, flops, losses))
    square, slope, level = np.polyfit(np.log(size), loss, 2).tolist()
    return Curve(tuple(size.tolist()), tuple(flop.tolist()), (square, slope, level))
