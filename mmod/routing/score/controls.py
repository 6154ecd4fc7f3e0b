"""The controls: random draws of tokens and of images, the norm of a token, and evenly spread tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from mmod.config import Placement, Score, register_score
from mmod.ops import random_scores, spread_evenly
from mmod.ops.hashing import mix
from mmod.routing.score.function import FunctionScore


@register_score("random")
@dataclass(frozen=True)
class Random(Score):
    """Scores drawn uniformly from [0, 1), once for consecutive routed blocks: the control of every experiment.

    The draw is a hash of seed, block, position and image. The same image draws the same scores again, in any batch.

    Args:
        seed: Chooses the draw.
    """

    shared: ClassVar[bool] = True
    positional: ClassVar[bool] = True
    seed: int = 0

    def make(self, placement: Placement) -> nn.Module:
        """Return the module that scores tokens."""
        return RandomScore(self.seed, placement.block)


@register_score("coin")
@dataclass(frozen=True)
class Coin(Score):
    """One random score per image and routed block, uniform in [0, 1).

    A threshold t keeps the share 1 - t of the images: the control of scores that decide per sequence.

    Args:
        seed: Chooses the draw.
    """

    seed: int = 0

    @property
    def per_image(self) -> bool:
        """Whether all tokens of an image have one score."""
        return True

    def make(self, placement: Placement) -> nn.Module:
        """Return the module that scores tokens."""
        return RandomScore(self.seed, placement.block, per_image=True)


class RandomScore(nn.Module):
    """Score tokens uniformly at random in [0, 1), differently for every image: the control of every experiment.

    The draw is a hash of seed, block, position and image, see `mmod.ops.random_scores`: the same image draws the same
    scores again, in any batch and however often it is recomputed.

    Args:
        block: Index of the block, so that blocks draw independently.
        per_image: Give all tokens of an image the number of its first token.
    """

    def __init__(self, seed: int, block: int, per_image: bool = False) -> None:
        super().__init__()
        self._number = _mix_number(_mix_number(seed) + block)
        # A tensor, because compilers guard on numbers: a graph with a number would serve one block alone. It is no
        # buffer, whose value is lost where a model is built on "meta".
        self.salt = torch.tensor(self._number, device="cpu")
        self.per_image = per_image

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RandomScore:
        """Let the salt follow the module to another device."""
        device = fn(self.salt).device
        if device.type == "meta":
            device = torch.device("cpu")
        self.salt = torch.tensor(self._number, device=device)
        return super()._apply(fn, recurse)

    def forward(self, x_BND: Tensor, valid_BN: Tensor | None = None) -> Tensor:
        """Return the scores (B, N) for tokens (B, N, D); padding, where `valid_BN` is False, leaves no fingerprint."""
        score_BN = random_scores(x_BND, self.salt, valid_BN)
        if self.per_image:
            return score_BN[:, :1].expand_as(score_BN)
        return score_BN


def _mix_number(value: int) -> int:
    # The hash of 0 is 0.
    return int(mix(torch.tensor(value + 1, dtype=torch.int64, device="cpu")))


@register_score("norm")
@dataclass(frozen=True)
class Norm(Score):
    """The Euclidean norm of a token. A threshold is compared with it relative to the image's mean."""

    relative: ClassVar[bool] = True

    def make(self, placement: Placement) -> nn.Module:
        """Return the module that scores tokens."""
        return FunctionScore(_norms)


def _norms(x_BND: Tensor) -> Tensor:
    return x_BND.detach().float().norm(dim=-1)


@register_score("stride")
@dataclass(frozen=True)
class Stride(Score):
    """Scores in (0, 1], the same for every image, whose best K are evenly spread whatever K is: a control."""

    shared: ClassVar[bool] = True
    same_everywhere: ClassVar[bool] = True
    positional: ClassVar[bool] = True

    def make(self, placement: Placement) -> nn.Module:
        """Return the module that scores tokens."""
        return FunctionScore(_spread)


def _spread(x_BND: Tensor) -> Tensor:
    return spread_evenly(x_BND.shape[1], x_BND.device).unsqueeze(0).expand(x_BND.shape[0], -1)
