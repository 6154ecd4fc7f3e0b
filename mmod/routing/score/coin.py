"""The control of scores that decide about whole images."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from mmod.config import Placement, Score, register_score
from mmod.routing.score.random import RandomScore
from mmod.values import check_fields


@register_score("coin")
@dataclass(frozen=True)
class Coin(Score):
    """A number drawn uniformly from [0, 1) for a whole image, in each routed block another, see `CoinScore`.

    A threshold t keeps the share 1 - t of the images: the control of scores that decide per sequence.

    Args:
        seed: Chooses the draw.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "router")

    @property
    def whole(self) -> bool:
        """Whether all tokens of an image have one score."""
        return True

    def make(self, place: Placement) -> nn.Module:
        """Return the module that scores tokens."""
        return CoinScore(self.seed, place.block)


class CoinScore(RandomScore):
    """Give all tokens of an image one number, drawn as `RandomScore` draws those of its tokens.

    Example:
        >>> import torch
        >>> x = torch.randn(2, 6, 4)
        >>> bool((CoinScore(0, 1)(x) == RandomScore(0, 1)(x)[:, :1]).all())
        True
    """

    def forward(self, x_BND: Tensor, valid_BN: Tensor | None = None) -> Tensor:
        """Return the scores (B, N) for tokens (B, N, D)."""
        score_BN = super().forward(x_BND, valid_BN)
        return score_BN[:, :1].expand_as(score_BN)
