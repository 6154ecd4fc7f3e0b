"""The control that draws tokens at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from mmod.config import Placement, Score, register_score
from mmod.ops import random_scores
from mmod.ops.hashing import mix
from mmod.values import check_fields


@register_score("random")
@dataclass(frozen=True)
class Random(Score):
    """Scores drawn uniformly from [0, 1), once for consecutive routed blocks, see `RandomScore`.

    Args:
        seed: Chooses the draw.
    """

    shared: ClassVar[bool] = True
    positional: ClassVar[bool] = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "router")

    def make(self, place: Placement) -> nn.Module:
        """Return the module that scores tokens."""
        return RandomScore(self.seed, place.block)


@register_score("coin")
@dataclass(frozen=True)
class Coin(Score):
    """A number drawn uniformly from [0, 1) for a whole image, in each routed block another.

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
        return RandomScore(self.seed, place.block, whole=True)


class RandomScore(nn.Module):
    """Score tokens uniformly at random in [0, 1), differently for every image: the control of every experiment.

    The draw is a hash of seed, block, position and image, see `mmod.ops.random_scores`: the same image draws the same
    scores again, in any batch and however often it is recomputed.

    Args:
        block: Index of the block, so that blocks draw independently.
        whole: Give all tokens of an image the number of its first token.
    """

    def __init__(self, seed: int, block: int, whole: bool = False) -> None:
        super().__init__()
        self.salt = _mix_number(_mix_number(seed) + block)
        self.whole = whole

    def forward(self, x_BND: Tensor, valid_BN: Tensor | None = None) -> Tensor:
        """Return the scores (B, N) for tokens (B, N, D); padding, where `valid_BN` is False, leaves no fingerprint."""
        score_BN = random_scores(x_BND, self.salt, valid_BN)
        return score_BN[:, :1].expand_as(score_BN) if self.whole else score_BN


def _mix_number(value: int) -> int:
    return int(mix(torch.tensor(value + 1, dtype=torch.int64, device="cpu")))
