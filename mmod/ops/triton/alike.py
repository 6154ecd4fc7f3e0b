"""Kernels that compare rows by cosine: a program keeps the running maximum of its rows, and no map is stored.

Axes: B images, N tokens, K slots per image, D channels, E projected channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmod.ops.triton.compat import launch, load_float

_OPTIONS = {"ROWS": 32, "COLUMNS": 64, "CHANNELS": 32}


@triton.jit
def unit_kernel(  # type: ignore[no-untyped-def]
    x,
    out,
    rows,
    tokens,
    channels,
    sums,
    x_image,
    x_token,
    x_channel,
    SIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Add up the signed channels of some rows, and divide by the norm; CHANNELS spans the sums."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    image = (row // tokens).to(tl.int64)
    token = (row % tokens).to(tl.int64)
    sum_index = tl.arange(0, CHANNELS)
    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    for start in range(0, channels, sums):
        channel = (start + sum_index).to(tl.int64)
        mask = (row < rows)[:, None] & ((sum_index < sums) & (channel < channels))[None, :]
        value = load_float(x + (image * x_image + token * x_token)[:, None] + channel[None, :] * x_channel, mask)
        # The signs of `mmod.ops.alike._signs`, computed in place.
        if SIGNED:
            bit = (((channel + 1) * 2654435761) >> 19) & 1
            value = value * (1.0 - 2.0 * bit.to(tl.float32))[None, :]
        total += value
    total = total / tl.maximum(tl.sqrt(tl.sum(total * total, 1)), 1e-12)[:, None]
    mask = (row < rows)[:, None] & (sum_index < sums)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * sums + sum_index[None, :], total, mask=mask)


@triton.jit
def _spread(position):  # type: ignore[no-untyped-def]
    """Return the bits of a position in reverse order: lower numbers come first in the spread order."""
    bits = position.to(tl.uint32)
    bits = ((bits >> 1) & 0x55555555) | ((bits & 0x55555555) << 1)
    bits = ((bits >> 2) & 0x33333333) | ((bits & 0x33333333) << 2)
    bits = ((bits >> 4) & 0x0F0F0F0F) | ((bits & 0x0F0F0F0F) << 4)
    bits = ((bits >> 8) & 0x00FF00FF) | ((bits & 0x00FF00FF) << 8)
    bits = (bits >> 16) | (bits << 16)
    # 20 of 32 bits, as in `spread_evenly`.
    return (bits >> 12).to(tl.int32)


@triton.jit
def _cosine(  # type: ignore[no-untyped-def]
    left, right, inside_m, inside_n, channels, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr
):
    """Return products of rows; takes pointers to their starts."""
    product = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, channels, CHANNELS):
        channel = start + tl.arange(0, CHANNELS)
        across = (channel < channels)[None, :]
        x = tl.load(left[:, None] + channel[None, :], mask=inside_m[:, None] & across, other=0.0)
        y = tl.load(right[:, None] + channel[None, :], mask=inside_n[:, None] & across, other=0.0)
        product += tl.dot(x, tl.trans(y), input_precision="ieee")
    return product


@triton.jit
def redundancy_kernel(  # type: ignore[no-untyped-def]
    x,
    position,
    valid,
    out,
    tokens,
    channels,
    prefix,
    blocks,
    HAS_VALID: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Smallest distance of each row to one before it in the spread order."""
    image = (tl.program_id(0) // blocks).to(tl.int64)
    row = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    base = image * tokens
    inside_m = row < tokens
    rank_m = row - prefix
    # Ranks count valid rows alone, so that padding does not move the order.
    if HAS_VALID:
        rank_m = tl.load(position + base + row, mask=inside_m, other=0)
    rank_m = _spread(tl.maximum(rank_m, 0))
    top = tl.full([ROWS], -1.0, tl.float32)
    for start in range(0, tokens, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside_n = (column < tokens) & (column >= prefix)
        rank_n = column - prefix
        if HAS_VALID:
            inside_n = inside_n & (tl.load(valid + base + column, mask=inside_n, other=0) != 0)
            rank_n = tl.load(position + base + column, mask=inside_n, other=0)
        rank_n = _spread(tl.maximum(rank_n, 0))
        alike = _cosine(
            x + (base + row) * channels,
            x + (base + column) * channels,
            inside_m,
            inside_n,
            channels,
            ROWS,
            COLUMNS,
            CHANNELS,
        )
        before = inside_n[None, :] & (rank_n[None, :] < rank_m[:, None])
        top = tl.maximum(top, tl.max(tl.where(before, alike, -1.0), 1))
    tl.store(out + base + row, tl.where(row < prefix, 2.0, 1.0 - top), mask=inside_m)


@triton.jit
def nearest_kernel(  # type: ignore[no-untyped-def]
    x,
    index,
    valid,
    out,
    tokens,
    slots,
    channels,
    prefix,
    blocks,
    HAS_VALID: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Slot of the kept row that each row is most like, or that holds it."""
    image = (tl.program_id(0) // blocks).to(tl.int64)
    row = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    base = image * tokens
    inside_m = row < tokens
    top = tl.full([ROWS], -float("inf"), tl.float32)
    nearest = tl.full([ROWS], -1, tl.int32)
    held = tl.full([ROWS], -1, tl.int32)
    for start in range(0, slots, COLUMNS):
        slot = start + tl.arange(0, COLUMNS)
        inside_n = slot < slots
        token = tl.load(index + image * slots + slot, mask=inside_n, other=0)
        if HAS_VALID:
            inside_n = inside_n & (tl.load(valid + image * slots + slot, mask=inside_n, other=0) != 0)
        here = inside_n[None, :] & (token[None, :] == row[:, None])
        held = tl.maximum(held, tl.max(tl.where(here, slot[None, :], -1), 1))
        alike = _cosine(
            x + (base + row) * channels,
            x + (base + token) * channels,
            inside_m,
            inside_n,
            channels,
            ROWS,
            COLUMNS,
            CHANNELS,
        )
        # NaN is nearest to none, but must find a slot.
        alike = tl.where(alike != alike, -3.0e38, alike)
        alike = tl.where((inside_n & (slot >= prefix))[None, :], alike, -float("inf"))
        best = tl.max(alike, 1)
        # The lowest slot among equal ones, as torch's `max` on a CPU returns it.
        first = tl.min(tl.where(alike == best[:, None], slot[None, :], slots), 1)
        # Strictly better than earlier columns, which have lower slots.
        nearest = tl.where(best > top, first, nearest)
        top = tl.maximum(top, best)
    tl.store(out + base + row, tl.where(held >= 0, held, nearest).to(tl.int64), mask=inside_m)


def unit_rows(out: Tensor, x_BND: Tensor, channels: int) -> None:
    """Compute `mmod.ops.unit_rows`."""
    images, tokens, dim = x_BND.shape
    span = triton.next_power_of_2(channels)
    rows = images * tokens
    tile_rows = max(1, 2048 // span)
    launch(
        unit_kernel,
        (triton.cdiv(rows, tile_rows),),
        x_BND,
        out,
        rows,
        tokens,
        dim,
        channels,
        *x_BND.stride(),
        SIGNED=channels < dim,
        ROWS=tile_rows,
        CHANNELS=span,
    )


def redundancy(out: Tensor, unit_BNE: Tensor, prefix: int = 0, valid_BN: Tensor | None = None) -> None:
    """Compute `mmod.ops.redundancy_scores`."""
    unit_BNE = unit_BNE.contiguous()
    images, tokens, channels = unit_BNE.shape
    # The kernel reads no mask that is absent, but its arguments must be tensors.
    position = out
    valid = out
    if valid_BN is not None:
        counted_BN = valid_BN[:, prefix:]
        position_BN = (counted_BN.cumsum(1, dtype=torch.int32) - 1).clamp(min=0)
        position = torch.nn.functional.pad(position_BN, (prefix, 0)).contiguous()
        valid = valid_BN.contiguous().view(torch.uint8)
    blocks = triton.cdiv(tokens, _OPTIONS["ROWS"])
    launch(
        redundancy_kernel,
        (images * blocks,),
        unit_BNE,
        position,
        valid,
        out,
        tokens,
        channels,
        prefix,
        blocks,
        HAS_VALID=valid_BN is not None,
        **_OPTIONS,
    )


def nearest_rows(out: Tensor, unit_BNE: Tensor, row_BK: Tensor, prefix: int, valid_BK: Tensor | None) -> None:
    """Compute `mmod.ops.nearest_rows`."""
    unit_BNE = unit_BNE.contiguous()
    row_BK = row_BK.contiguous()
    images, tokens, channels = unit_BNE.shape
    valid = row_BK if valid_BK is None else valid_BK.contiguous().view(torch.uint8)
    blocks = triton.cdiv(tokens, _OPTIONS["ROWS"])
    launch(
        nearest_kernel,
        (images * blocks,),
        unit_BNE,
        row_BK,
        valid,
        out,
        tokens,
        row_BK.shape[1],
        channels,
        prefix,
        blocks,
        HAS_VALID=valid_BK is not None,
        **_OPTIONS,
    )
