"""Random numbers that an image's own tokens decide: the same image draws the same numbers in any batch.

Axes: B images, N tokens, D channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmod.ops.backend import Kernel, kernel_op, op

HASH_CHANNELS = 8
# Odd 32-bit multipliers, one for each channel of the fingerprint.
MULTIPLIERS = (
    0x9E3779B1,
    0x85EBCA77,
    0xC2B2AE3D,
    0x27D4EB2F,
    0x165667B1,
    0xD3A2646D,
    0xFD7046C5,
    0xB55A4F09,
)
MIX = 0x45D9F3B
_random_scores = kernel_op(
    "hashing.random_scores",
    "(Tensor x, Tensor salt, Tensor? valid) -> Tensor",
    lambda x, *_: x.new_empty(x.shape[:2], dtype=torch.float32),
)


def mix(value: Tensor) -> Tensor:
    """Scatter the low 32 bits of an int64 tensor; multiplications stay below 2**63."""
    # Masked before each product: int64 holds 32 bits times the multiplier, and no more.
    value = value & 0xFFFFFFFF
    value = ((value >> 16) ^ value) * MIX & 0xFFFFFFFF
    value = ((value >> 16) ^ value) * MIX & 0xFFFFFFFF
    return (value >> 16) ^ value


@op(
    Kernel(
        lambda x_BND, salt, valid_BN=None: _random_scores(x_BND.detach(), salt, valid_BN),
        "a kernel",
        "not yet measured; reason: one launch instead of about 40",
    ),
    how="about 40 torch operations",
)
def random_scores(x_BND: Tensor, salt: Tensor, valid_BN: Tensor | None = None) -> Tensor:
    """Return a random number for every token, uniform in [0, 1).

    It is a hash of the salt, the position, and a coarse fingerprint of the image. The fingerprint is the means of eight
    channels, in steps of at most a quarter of what such a mean varies by. A step is a power of two, so that it does not
    change with the last bits, in which batch sizes, compilers and devices differ.

    Args:
        x_BND: Tokens (B, N, D); they get no gradient.
        salt: Chooses the draw: 32 bits, as an int64 tensor without axes, which may stay on the CPU.
        valid_BN: False where a token is padding (B, N), which leaves no fingerprint, or None.

    Returns:
        The numbers (B, N), fp32.

    Example:
        >>> x = torch.randn(2, 6, 4)
        >>> salt = torch.tensor(1)
        >>> torch.equal(random_scores(x, salt)[1:], random_scores(x[1:], salt))
        True
    """
    with torch.no_grad():
        x_BND = x_BND[..., :HASH_CHANNELS].float()
        tokens, channels = x_BND.shape[1:]
        count_B1: Tensor | int = tokens
        if valid_BN is not None:
            x_BND = x_BND * valid_BN.unsqueeze(-1)
            count_B1 = valid_BN.sum(dim=1, keepdim=True).clamp(min=1)
        mean_BD = x_BND.sum(dim=1) / count_B1
        square_B1 = x_BND.square().sum(dim=(1, 2)).unsqueeze(1) / (count_B1 * channels)
        # The standard deviation of a mean over the tokens; the bound keeps the logarithm of zeros finite.
        deviation_B1 = (square_B1 / count_B1).clamp(min=1e-30).sqrt()
        # A power of two, at most a quarter of the deviation: rounding to it forgives the noise of other batches.
        step_B1 = torch.exp2(torch.floor(torch.log2(deviation_B1)) - 2)
        coarse_BD = (mean_BD / step_B1).round().to(torch.int64)
        multiplier_D = torch.tensor(MULTIPLIERS[:channels], device=x_BND.device)
        # 31 bits of a step times 32 of a multiplier fit in int64, so that no product overflows.
        product_BD = (coarse_BD & 0x7FFFFFFF) * multiplier_D & 0xFFFFFFFF
        # The salt is added behind the sum, so that seeds and blocks differ for the same image.
        key_B1 = mix(product_BD.sum(dim=1, keepdim=True) + salt)
        bits_BN = mix(key_B1 + torch.arange(tokens, device=x_BND.device))
        # 24 bits are all that fp32 holds exactly.
        return (bits_BN & 0xFFFFFF).float() / 2.0**24
