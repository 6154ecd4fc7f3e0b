"""Scores: one raw fp32 number per token.

Axes: B images, N tokens, D channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn


class LinearScore(nn.Module):
    """Score tokens by a learned vector: `score = w . x / rms(x) + b`, computed in fp32 under autocast too.

    Args:
        dim: Channels D of a token.
        bias: Add a bias, which starts at 0.
        normalize: Divide the input by its root mean square first.
        init_std: Standard deviation of the initial weight.
        initial: Value around which the scores start; other than 0 it needs the bias.
        device: Where the weight is created.
        dtype: Type of the weight; the score is fp32 whatever it is.

    Source: Raposo et al., arXiv 2404.02258, section 3.4 (linear, no bias, raw input). A normalised input keeps the
    size of the score apart from the growth of the residual stream with depth.

    Example:
        >>> LinearScore(8)(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5])
    """

    def __init__(
        self,
        dim: int,
        *,
        bias: bool = False,
        normalize: bool = True,
        init_std: float = 0.0,
        initial: float = 0.0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.normalize = normalize
        self.init_std = init_std
        self.initial = initial
        self.weight = nn.Parameter(torch.empty(1, dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(1, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial weight."""
        nn.init.normal_(self.weight, std=self.init_std)
        if self.bias is not None:
            nn.init.constant_(self.bias, self.initial)

    def forward(self, x_BND: Tensor) -> Tensor:
        """Return the scores (B, N) of tokens (B, N, D)."""
        device = x_BND.device.type
        # Torch has no answer for meta, where shapes are followed and nothing is rounded.
        if device != "meta" and torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return self._score(x_BND)
        return self._score(x_BND)

    def _score(self, x_BND: Tensor) -> Tensor:
        x_BND = x_BND.float()
        weight = self.weight[0].float()
        if self.normalize:
            # Dividing the product instead of the tokens reads them twice and writes them never.
            norm_BN = torch.linalg.vector_norm(x_BND, dim=-1).clamp_min(1e-6)
            score_BN = x_BND @ (weight * math.sqrt(x_BND.shape[-1])) / norm_BN
        else:
            score_BN = x_BND @ weight
        return score_BN if self.bias is None else score_BN + self.bias.float()


class NormScore(nn.Module):
    """Score tokens by their Euclidean norm: a control without parameters."""

    def forward(self, x_BND: Tensor) -> Tensor:
        """Return the norms (B, N) of tokens (B, N, D)."""
        return x_BND.detach().float().norm(dim=-1)


class StrideScore(nn.Module):
    """Score tokens so that the best K are spread evenly over the sequence, whatever K is: a control.

    The scores are the van der Corput sequence, the same for every image.

    Example:
        >>> StrideScore()(torch.zeros(1, 4, 1)).tolist()
        [[1.0, 0.5, 0.75, 0.25]]
    """

    def forward(self, x_BND: Tensor) -> Tensor:
        """Return the scores (B, N) for tokens (B, N, D)."""
        position = torch.arange(x_BND.shape[1], device=x_BND.device)
        score = torch.ones_like(position, dtype=torch.float32)
        for bit in range(20):
            score = score - ((position >> bit) & 1) * 2.0 ** -(bit + 1)
        return score.unsqueeze(0).expand(x_BND.shape[0], -1)


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


class FunctionScore(nn.Module):
    """Score tokens by a function of the user's.

    Args:
        function: Maps tokens (B, N, D) to scores (B, N).
    """

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        # A module given as the function is registered, so that its parameters train and are saved.
        self.function = function

    def forward(self, x_BND: Tensor) -> Tensor:
        """Return the scores (B, N) of tokens (B, N, D).

        Raises:
            ValueError: The function returned another shape.
        """
        score = self.function(x_BND)
        if score.shape != x_BND.shape[:2]:
            raise ValueError(
                f"the router function must return scores of shape {tuple(x_BND.shape[:2])} (images, tokens), "
                f"got {tuple(score.shape)}"
            )
        return score.float()


_MULTIPLIER = 0x45D9F3B


def _mix(value: Tensor) -> Tensor:
    """Scatter the low 32 bits of an int64 tensor; multiplications stay below 2**63."""
    value = value & 0xFFFFFFFF
    value = ((value >> 16) ^ value) * _MULTIPLIER & 0xFFFFFFFF
    value = ((value >> 16) ^ value) * _MULTIPLIER & 0xFFFFFFFF
    return (value >> 16) ^ value


def _mix_number(value: int) -> int:
    return int(_mix(torch.tensor(value + 1, dtype=torch.int64, device="cpu")))


def near_dense_std(dim: int, gate_scale: float) -> float:
    """Return an initial weight scale at which tanh gates of normalised tokens start within a percent of 1.

    A weight of exactly zero would tie every score, and ties keep the lowest positions of every image: the router
    would start with the upper rows of the picture and only ever see a gradient from there.

    Args:
        dim: Channels D of a token.
        gate_scale: The gate's factor.
    """
    return 0.01 / (2.5 * max(gate_scale, 0.01) * math.sqrt(dim))
