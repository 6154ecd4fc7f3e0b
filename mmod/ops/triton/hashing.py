"""The kernel that draws random numbers from a fingerprint of each image.

Axes: B images, N tokens, D channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmod.ops.hashing import HASH_CHANNELS, MIX, MULTIPLIERS
from mmod.ops.triton.compat import launch, load_float

_MIX = tl.constexpr(MIX)
_M0, _M1, _M2, _M3, _M4, _M5, _M6, _M7 = (tl.constexpr(value) for value in MULTIPLIERS)


@triton.jit
def _mix(value):  # type: ignore[no-untyped-def]
    """Scatter the low 32 bits of 64-bit integers."""
    value = value & 0xFFFFFFFF
    value = (((value >> 16) ^ value) * _MIX) & 0xFFFFFFFF
    value = (((value >> 16) ^ value) * _MIX) & 0xFFFFFFFF
    return (value >> 16) ^ value


@triton.jit
def random_kernel(  # type: ignore[no-untyped-def]
    x,
    valid,
    out,
    tokens,
    channels,
    salt,
    x_image,
    x_token,
    x_channel,
    valid_image,
    valid_token,
    HAS_VALID: tl.constexpr,
    BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Draw the numbers of one image."""
    image = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, CHANNELS)
    total = tl.zeros([CHANNELS], tl.float32)
    square = tl.zeros([CHANNELS], tl.float32)
    count = tl.zeros([BLOCK], tl.float32)
    for start in range(0, tokens, BLOCK):
        token = (start + tl.arange(0, BLOCK)).to(tl.int64)
        inside = token < tokens
        if HAS_VALID:
            inside = inside & (tl.load(valid + image * valid_image + token * valid_token, mask=inside, other=0) != 0)
        mask = inside[:, None] & (channel < channels)[None, :]
        value = load_float(x + image * x_image + token[:, None] * x_token + channel[None, :] * x_channel, mask)
        total += tl.sum(value, 0)
        square += tl.sum(value * value, 0)
        count += inside.to(tl.float32)
    number = tl.maximum(tl.sum(count, 0), 1.0)
    variance = tl.sum(square, 0) / (number * channels) / number
    deviation = tl.sqrt(tl.maximum(variance, 1e-30))
    # The exponent's bits alone are the power of two below, without a logarithm whose last bit may differ.
    step = (deviation.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True) / 4
    ratio = total / number / step
    # To even where a number lies half way, as torch rounds.
    low = tl.floor(ratio)
    odd = low - 2 * tl.floor(low / 2)
    up = (ratio - low > 0.5) | ((ratio - low == 0.5) & (odd == 1.0))
    coarse = tl.where(up, low + 1, low).to(tl.int64) & 0x7FFFFFFF
    # Chosen by comparisons: a kernel has no table to index.
    factor = tl.where(channel == 0, _M0, tl.where(channel == 1, _M1, tl.where(channel == 2, _M2, _M3)))
    other = tl.where(channel == 4, _M4, tl.where(channel == 5, _M5, tl.where(channel == 6, _M6, _M7)))
    factor = tl.where(channel < 4, factor, other).to(tl.int64) & 0xFFFFFFFF
    product = tl.where(channel < channels, (coarse * factor) & 0xFFFFFFFF, 0)
    key = _mix(tl.sum(product, 0) + tl.load(salt))
    for start in range(0, tokens, BLOCK):
        token = (start + tl.arange(0, BLOCK)).to(tl.int64)
        bits = _mix(key + token) & 0xFFFFFF
        tl.store(out + image * tokens + token, bits.to(tl.float32) / 16777216.0, mask=token < tokens)


def random_scores(out: Tensor, x_BND: Tensor, salt: Tensor, valid_BN: Tensor | None) -> None:
    """Compute `mmod.ops.random_scores`."""
    images, tokens, channels = x_BND.shape
    valid = out if valid_BN is None else valid_BN.view(torch.uint8)
    launch(
        random_kernel,
        (images,),
        x_BND,
        valid,
        out,
        tokens,
        min(HASH_CHANNELS, channels),
        salt.to(x_BND.device),
        *x_BND.stride(),
        *valid.stride(),
        HAS_VALID=valid_BN is not None,
        BLOCK=256,
        CHANNELS=HASH_CHANNELS,
    )
