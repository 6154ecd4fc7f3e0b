"""Scores, a preset and a loss as another package adds them: one file, imported before a config names them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import mmod
from mmod.routing import Router, Routing


@mmod.register_score("contrast")
@dataclass(frozen=True)
class Contrast(mmod.Score):
    """The learned distance of a token from the mean of its image.

    Args:
        power: Exponent of the distance.
    """

    learns: ClassVar[bool] = True
    power: float = 1.0

    def make(self, placement: Any) -> nn.Module:
        return ContrastScore(placement.dim, self.power)

    def normalised(self, score_BN: Tensor, valid_BN: Tensor | None = None) -> Tensor:
        return score_BN / score_BN.amax(dim=1, keepdim=True)


class ContrastScore(nn.Module):
    def __init__(self, dim: int, power: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.power = power

    def forward(self, x_BND: Tensor, valid_BN: Tensor | None = None) -> Tensor:
        distance_BND = (x_BND - x_BND.mean(dim=1, keepdim=True)).float().abs() ** self.power
        return distance_BND @ self.weight


@mmod.register_score("weighed-importance")
@dataclass(frozen=True)
class WeighedImportance(mmod.Score):
    """Importance times the norm of a token, computed in every block."""

    reads_importance: ClassVar[bool] = True

    def make(self, placement: Any) -> nn.Module:
        return WeighedImportanceScore()


class WeighedImportanceScore(nn.Module):
    def forward(self, x_BND: Tensor, valid_BN: Tensor | None, importance_BN: Tensor) -> Tensor:
        return importance_BN * x_BND.detach().float().norm(dim=-1)


@mmod.register_preset("contrast-mod")
def contrast_mod(depth: int) -> dict[str, Any]:
    return {"router": "contrast", "blocks": tuple(range(depth // 2, depth)), "losses": {"spread": 0.1}}


@mmod.register_loss("spread")
def spread_loss(routing: Routing, router: Router) -> Tensor:
    return -routing.score_BN.std()
