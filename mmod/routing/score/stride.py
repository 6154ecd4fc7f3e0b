"""The control that spreads kept tokens evenly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from mmod.config import Placement, Score, register_score
from mmod.ops import spread_evenly


@register_score("stride")
@dataclass(frozen=True)
class Stride(Score):
    """Scores in (0, 1], the same for every image, whose best K are evenly spread whatever K is: a control."""

    shared: ClassVar[bool] = True
    positional: ClassVar[bool] = True

    def make(self, place: Placement) -> nn.Module:
        """Return the module that scores tokens."""
        return StrideScore()


class StrideScore(nn.Module):
    """Score tokens by the van der Corput sequence, see `spread_evenly`."""

    def forward(self, x_BND: Tensor, valid_BN: Tensor | None = None) -> Tensor:
        """Return the scores (B, N) for tokens (B, N, D)."""
        return spread_evenly(x_BND.shape[1], x_BND.device).unsqueeze(0).expand(x_BND.shape[0], -1)
