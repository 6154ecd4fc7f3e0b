"""The control that scores tokens by their norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from mmod.config import Placement, Score, register_score


@register_score("norm")
@dataclass(frozen=True)
class Norm(Score):
    """The Euclidean norm of a token. A threshold is compared with it relative to the image's mean."""

    relative: ClassVar[bool] = True

    def make(self, place: Placement) -> nn.Module:
        """Return the module that scores tokens."""
        return NormScore()


class NormScore(nn.Module):
    """Score tokens by their Euclidean norm: a control without parameters."""

    def forward(self, x_BND: Tensor, valid_BN: Tensor | None = None) -> Tensor:
        """Return the norms (B, N) of tokens (B, N, D)."""
        return x_BND.detach().float().norm(dim=-1)
