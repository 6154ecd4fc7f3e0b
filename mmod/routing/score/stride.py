"""The control that spreads kept tokens evenly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from mmod.config import Placement, Score, register_score


@register_score("stride")
@dataclass(frozen=True)
class Stride(Score):
    """Scores in (0, 1] whose best are evenly spread, see `StrideScore`."""

    shared: ClassVar[bool] = True
    positional: ClassVar[bool] = True

    def make(self, place: Placement) -> nn.Module:
        """Return the module that scores tokens."""
        return StrideScore()


class StrideScore(nn.Module):
    """Score tokens so that the best K are spread evenly over the sequence, whatever K is: a control.

    The scores are the van der Corput sequence, the same for every image.

    Example:
        >>> StrideScore()(torch.zeros(1, 4, 1)).tolist()
        [[1.0, 0.5, 0.75, 0.25]]
    """

    def forward(self, x_BND: Tensor, valid_BN: Tensor | None = None) -> Tensor:
        """Return the scores (B, N) for tokens (B, N, D)."""
        return spread_evenly(x_BND.shape[1], x_BND.device).unsqueeze(0).expand(x_BND.shape[0], -1)


def spread_evenly(tokens: int, device: torch.device) -> Tensor:
    """Return numbers in (0, 1], the largest K of which are evenly spread, whatever K is: the van der Corput sequence.

    Args:
        tokens: How many.
        device: Where.
    """
    position = torch.arange(tokens, device=device)
    number = torch.ones_like(position, dtype=torch.float32)
    for bit in range(20):
        number = number - ((position >> bit) & 1) * 2.0 ** -(bit + 1)
    return number
