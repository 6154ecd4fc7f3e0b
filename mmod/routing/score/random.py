"""The control that draws tokens at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from mmod.config import Placement, Score, register_score
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


class RandomScore(nn.Module):
    """Score tokens uniformly at random in [0, 1), differently for every image: the control of every experiment.

    The draw is a hash of seed, block, position and a coarse fingerprint of the image's tokens, so the same image
    gets the same tokens again, whatever else is in its batch and however often it is recomputed.

    Args:
        seed: Chooses the draw.
        block: Index of the block, so that blocks draw independently.

    Example:
        >>> x = torch.randn(2, 6, 4)
        >>> torch.equal(RandomScore(0, 1)(x)[1:], RandomScore(0, 1)(x[1:]))
        True
    """

    def __init__(self, seed: int, block: int) -> None:
        super().__init__()
        self.salt = _mix_number(_mix_number(seed) + block)

    def forward(self, x_BND: Tensor, valid_BN: Tensor | None = None) -> Tensor:
        """Return the scores (B, N) for tokens (B, N, D); padding, where `valid_BN` is False, leaves no fingerprint."""
        coarse_BD = _fingerprint(x_BND, valid_BN)
        key_B = torch.full_like(coarse_BD[:, 0], self.salt)
        for channel in range(coarse_BD.shape[1]):
            key_B = _mix(key_B + coarse_BD[:, channel])
        position_N = torch.arange(x_BND.shape[1], device=x_BND.device)
        bits_BN = _mix(key_B.unsqueeze(1) + position_N)
        return (bits_BN & 0xFFFFFF).float() / 2.0**24


def _fingerprint(x_BND: Tensor, valid_BN: Tensor | None) -> Tensor:
    """Return whole numbers that tell an image from others, whatever the scale of its tokens (B, channels).

    They are the means of eight channels, in steps of at most a quarter of what such a mean varies by. A step is a power
    of two, so that it does not change with the last bits, in which batch sizes and compilers differ.
    """
    x_BND = x_BND.detach()[..., :8].float()
    if valid_BN is not None:
        x_BND = x_BND * valid_BN.unsqueeze(-1)
    tokens = x_BND.shape[1] if valid_BN is None else valid_BN.sum(dim=1)[:, None, None].clamp(min=1)
    mean_B1D = x_BND.sum(dim=1, keepdim=True) / tokens
    square_B11 = x_BND.square().sum(dim=(1, 2), keepdim=True) / (tokens * x_BND.shape[2])
    deviation_B11 = (square_B11 / tokens).clamp(min=1e-30).sqrt()
    step_B11 = torch.exp2(torch.floor(torch.log2(deviation_B11)) - 2)
    return torch.round(mean_B1D / step_B11).to(torch.int64).squeeze(1)


_MULTIPLIER = 0x45D9F3B


def _mix(value: Tensor) -> Tensor:
    """Scatter the low 32 bits of an int64 tensor; multiplications stay below 2**63."""
    value = value & 0xFFFFFFFF
    value = ((value >> 16) ^ value) * _MULTIPLIER & 0xFFFFFFFF
    value = ((value >> 16) ^ value) * _MULTIPLIER & 0xFFFFFFFF
    return (value >> 16) ^ value


def _mix_number(value: int) -> int:
    return int(_mix(torch.tensor(value + 1, dtype=torch.int64, device="cpu")))
