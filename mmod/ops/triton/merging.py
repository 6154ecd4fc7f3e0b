"""Kernels for groups of tokens: their sizes, their means, and the update of each group for its tokens.

Groups are compared with tokens, not added up by atomics, so every run gives the same bits.
Axes: B images, N tokens, K slots per image, D channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmod.ops.triton.compat import launch, load_float
from mmod.ops.triton.rows import tile_of

_TILE = 32


@triton.jit
def size_kernel(  # type: ignore[no-untyped-def]
    slot, size, bias, tokens, slots, width, slot_image, slot_token, SLOTS: tl.constexpr, TOKENS: tl.constexpr
):
    """Count the tokens of some slots of one image, and write the logarithm of the count."""
    image = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * SLOTS + tl.arange(0, SLOTS)
    count = tl.zeros([SLOTS], tl.int32)
    for start in range(0, tokens, TOKENS):
        token = (start + tl.arange(0, TOKENS)).to(tl.int64)
        joined = tl.load(slot + image * slot_image + token * slot_token, mask=token < tokens, other=-1)
        count += tl.sum((joined[None, :] == group[:, None]).to(tl.int32), 1)
    number = count.to(tl.float32)
    tl.store(size + image * slots + group, number, mask=group < slots)
    # The bias is wider than the slots, up to a multiple of eight; what is beyond counts nothing and has log 1.
    value = tl.log(tl.maximum(number, 1.0)).to(bias.dtype.element_ty)
    tl.store(bias + image * width + group, value, mask=group < width)


@triton.jit
def mean_kernel(  # type: ignore[no-untyped-def]
    x,
    slot,
    size,
    weight,
    out,
    tokens,
    slots,
    channels,
    blocks,
    x_image,
    x_token,
    x_channel,
    HAS_SIZE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Add up the rows of some slots of one image, as a product with the map of which token is in which slot."""
    image = (tl.program_id(0) // blocks).to(tl.int64)
    group = tl.program_id(0) % blocks * SLOTS + tl.arange(0, SLOTS)
    channel = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)).to(tl.int64)
    total = tl.zeros([SLOTS, CHANNELS], tl.float32)
    for start in range(0, tokens, TOKENS):
        token = (start + tl.arange(0, TOKENS)).to(tl.int64)
        inside = token < tokens
        joined = tl.load(slot + image * tokens + token, mask=inside, other=-1)
        share = (joined[None, :] == group[:, None]).to(tl.float32)
        if HAS_WEIGHT:
            share = share * load_float(weight + image * tokens + token, inside)[None, :]
        # A row of no group may hold anything, and 0 * inf is NaN.
        mask = (inside & (joined >= 0))[:, None] & (channel < channels)[None, :]
        value = load_float(x + image * x_image + token[:, None] * x_token + channel[None, :] * x_channel, mask)
        # In full precision: the product only adds rows up, and TF32 would round them.
        total += tl.dot(share, value, input_precision="ieee")
    if HAS_SIZE:
        number = load_float(size + image * slots + group, group < slots)
        total = total / tl.maximum(number, 1.0)[:, None]
    mask = (group < slots)[:, None] & (channel < channels)[None, :]
    offset = (image * slots + group)[:, None] * channels + channel[None, :]
    tl.store(out + offset, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def add_kernel(  # type: ignore[no-untyped-def]
    x,
    update,
    slot,
    out,
    rows,
    tokens,
    channels,
    x_image,
    x_token,
    x_channel,
    update_image,
    update_slot,
    update_channel,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Add to every row the update of its slot."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)).to(tl.int64)
    image = (row // tokens).to(tl.int64)
    token = (row % tokens).to(tl.int64)
    joined = tl.load(slot + row, mask=row < rows, other=-1).to(tl.int64)
    mask = (row < rows)[:, None] & (channel < channels)[None, :]
    value = load_float(x + (image * x_image + token * x_token)[:, None] + channel[None, :] * x_channel, mask)
    offset = (image * update_image + joined * update_slot)[:, None] + channel[None, :] * update_channel
    value += load_float(update + offset, mask & (joined >= 0)[:, None])
    offset = row.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(out + offset, value.to(out.dtype.element_ty), mask=mask)


def size_groups(results: tuple[Tensor, ...], slot_BN: Tensor, slots: int, dtype: torch.dtype) -> None:
    """Compute the sizes (B, K) and their logarithms (B, 1, 1, K rounded up to a multiple of eight)."""
    size, bias = results
    width = bias.shape[-1]
    launch(
        size_kernel,
        (slot_BN.shape[0], triton.cdiv(width, _TILE)),
        slot_BN,
        size,
        bias,
        slot_BN.shape[1],
        slots,
        width,
        *slot_BN.stride(),
        SLOTS=_TILE,
        TOKENS=128,
    )


def mean_rows(
    out: Tensor, x_BND: Tensor, slot_BN: Tensor, slots: int, size_BK: Tensor | None, weight_BN: Tensor | None
) -> None:
    """Compute the mean of each group (B, K, D), or its sum where no size is given."""
    images, tokens, channels = x_BND.shape
    blocks = triton.cdiv(slots, _TILE)
    # The kernel reads no tensor that is absent, but its argument must be one.
    size = out if size_BK is None else size_BK.contiguous()
    weight = out if weight_BN is None else weight_BN.contiguous()
    launch(
        mean_kernel,
        (images * blocks, triton.cdiv(channels, 64)),
        x_BND,
        slot_BN.contiguous(),
        size,
        weight,
        out,
        tokens,
        slots,
        channels,
        blocks,
        *x_BND.stride(),
        HAS_SIZE=size_BK is not None,
        HAS_WEIGHT=weight_BN is not None,
        SLOTS=_TILE,
        TOKENS=_TILE,
        CHANNELS=64,
    )


def add_updates(out: Tensor, x_BND: Tensor, update_BKD: Tensor, slot_BN: Tensor) -> None:
    """Add the updates of their slots to the rows (B, N, D)."""
    images, tokens, channels = x_BND.shape
    rows = images * tokens
    tile_rows, tile_channels = tile_of(channels)
    launch(
        add_kernel,
        (triton.cdiv(rows, tile_rows), triton.cdiv(channels, tile_channels)),
        x_BND,
        update_BKD,
        slot_BN.contiguous(),
        out,
        rows,
        tokens,
        channels,
        *x_BND.stride(),
        *update_BKD.stride(),
        ROWS=tile_rows,
        CHANNELS=tile_channels,
    )
