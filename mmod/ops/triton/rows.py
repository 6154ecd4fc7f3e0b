"""Kernels that move rows: gather, gather with a norm, merge, and their gradients.

Every program moves a tile of ROWS rows by CHANNELS channels. Whatever a stride multiplies has 64 bits, since B * N * D
may pass 2**31. Indices are unique within an image, so nothing is added up in memory and every run gives the same bits.

Axes: B images, N tokens, K slots per image, D channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmod.ops.rows import inverse_rows
from mmod.ops.triton.compat import launch, load_float

# Elements of a tile: 128 threads move 32 bytes of bf16 each.
TILE = 2048
# Rows whose gradients of a norm's weight one program sums up before it writes them.
NORM_CHUNK = 32


@triton.jit
def _split(row, size):  # type: ignore[no-untyped-def]
    """Return the image of each row and its row there."""
    return (row // size).to(tl.int64), (row % size).to(tl.int64)


@triton.jit
def gather_kernel(  # type: ignore[no-untyped-def]
    x,
    index,
    out,
    rows,
    slots,
    channels,
    x_image,
    x_token,
    x_channel,
    index_image,
    index_slot,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Copy the rows of x (B, N, D) that index (B, K) names."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)).to(tl.int64)
    image, slot = _split(row, slots)
    token = tl.load(index + image * index_image + slot * index_slot, mask=row < rows, other=0).to(tl.int64)
    mask = (row < rows)[:, None] & (channel < channels)[None, :]
    value = tl.load(x + (image * x_image + token * x_token)[:, None] + channel[None, :] * x_channel, mask=mask)
    tl.store(out + row.to(tl.int64)[:, None] * channels + channel[None, :], value, mask=mask)


@triton.jit
def merge_kernel(  # type: ignore[no-untyped-def]
    x,
    inverse,
    z,
    y,
    gate,
    valid,
    out,
    rows,
    tokens,
    slots,
    channels,
    x_image,
    x_token,
    x_channel,
    z_image,
    z_slot,
    z_channel,
    y_image,
    y_slot,
    y_channel,
    HAS_X: tl.constexpr,
    HAS_Y: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_VALID: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Write every row once: a kept one from lerp(z, y, gate), any other from x; zeros stand in for what is absent."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)).to(tl.int64)
    image, token = _split(row, tokens)
    slot = tl.load(inverse + row, mask=row < rows, other=-1).to(tl.int64)
    kept = slot >= 0
    if HAS_VALID:
        kept = kept & (tl.load(valid + image * slots + slot, mask=kept, other=0) != 0)
    mask = (row < rows)[:, None] & (channel < channels)[None, :]
    from_block = mask & kept[:, None]
    value = tl.zeros([ROWS, CHANNELS], dtype=tl.float32)
    if HAS_X:
        offset = (image * x_image + token * x_token)[:, None] + channel[None, :] * x_channel
        value = load_float(x + offset, mask & (~kept)[:, None])
    if HAS_Y:
        offset = (image * y_image + slot * y_slot)[:, None] + channel[None, :] * y_channel
        after = load_float(y + offset, from_block)
        if HAS_GATE:
            offset = (image * z_image + slot * z_slot)[:, None] + channel[None, :] * z_channel
            before = load_float(z + offset, from_block)
            weight = load_float(gate + image * slots + slot, kept)[:, None]
            change = after - before
            # The form of torch.lerp: exact at gate 0 and at gate 1.
            after = tl.where(weight < 0.5, before + weight * change, after - change * (1 - weight))
        value = tl.where(from_block, after, value)
    offset = row.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(out + offset, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def merge_grad_kernel(  # type: ignore[no-untyped-def]
    grad,
    index,
    z,
    y,
    gate,
    valid,
    grad_z,
    grad_y,
    grad_gate,
    rows,
    slots,
    channels,
    grad_image,
    grad_token,
    grad_channel,
    z_image,
    z_slot,
    z_channel,
    y_image,
    y_slot,
    y_channel,
    HAS_VALID: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Gradients of lerp(z, y, gate) for the rows of grad (B, N, D) that index (B, K) names."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    image, slot = _split(row, slots)
    token = tl.load(index + row, mask=inside, other=0).to(tl.int64)
    weight = load_float(gate + row, inside)[:, None]
    filled = inside
    if HAS_VALID:
        filled = tl.load(valid + row, mask=inside, other=0) != 0
    total = tl.zeros([ROWS], dtype=tl.float32)
    for start in range(0, channels, CHANNELS):
        channel = (start + tl.arange(0, CHANNELS)).to(tl.int64)
        mask = inside[:, None] & (channel < channels)[None, :]
        offset = (image * grad_image + token * grad_token)[:, None] + channel[None, :] * grad_channel
        out = load_float(grad + offset, mask & filled[:, None])
        offset = (image * z_image + slot * z_slot)[:, None] + channel[None, :] * z_channel
        before = load_float(z + offset, mask)
        offset = (image * y_image + slot * y_slot)[:, None] + channel[None, :] * y_channel
        after = load_float(y + offset, mask)
        total += tl.sum(out * (after - before), axis=1)
        offset = row.to(tl.int64)[:, None] * channels + channel[None, :]
        tl.store(grad_z + offset, (out * (1 - weight)).to(grad_z.dtype.element_ty), mask=mask)
        tl.store(grad_y + offset, (out * weight).to(grad_y.dtype.element_ty), mask=mask)
    tl.store(grad_gate + row, tl.where(filled, total, 0.0).to(grad_gate.dtype.element_ty), mask=inside)


@triton.jit
def gather_norm_kernel(  # type: ignore[no-untyped-def]
    x,
    index,
    weight,
    bias,
    out,
    normed,
    mean,
    scale,
    rows,
    slots,
    channels,
    eps,
    x_image,
    x_token,
    x_channel,
    index_image,
    index_slot,
    CENTRED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Copy the selected rows and write them normalised; CHANNELS spans a row."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, CHANNELS).to(tl.int64)
    inside = row < rows
    across = channel < channels
    image, slot = _split(row, slots)
    token = tl.load(index + image * index_image + slot * index_slot, mask=inside, other=0).to(tl.int64)
    mask = inside[:, None] & across[None, :]
    value = load_float(x + (image * x_image + token * x_token)[:, None] + channel[None, :] * x_channel, mask)
    offset = row.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(out + offset, value.to(out.dtype.element_ty), mask=mask)
    if CENTRED:
        centre = tl.sum(value, axis=1) / channels
        # Channels past the end would add the square of the mean.
        value = tl.where(mask, value - centre[:, None], 0.0)
        tl.store(mean + row, centre, mask=inside)
    deviation = 1 / tl.sqrt(tl.sum(value * value, axis=1) / channels + eps)
    tl.store(scale + row, deviation, mask=inside)
    value = value * deviation[:, None]
    if HAS_WEIGHT:
        value = value * load_float(weight + channel, across)[None, :]
    if HAS_BIAS:
        value = value + load_float(bias + channel, across)[None, :]
    tl.store(normed + offset, value.to(normed.dtype.element_ty), mask=mask)


@triton.jit
def gather_norm_grad_kernel(  # type: ignore[no-untyped-def]
    grad_z,
    grad_normed,
    z,
    index,
    weight,
    mean,
    scale,
    grad_x,
    grad_weight,
    grad_bias,
    rows,
    tokens,
    slots,
    channels,
    CENTRED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Write the gradient of each named row to its row of grad_x, and sums over CHUNK rows for weight and bias."""
    channel = tl.arange(0, CHANNELS).to(tl.int64)
    across = channel < channels
    factor = load_float(weight + channel, across)[None, :] if HAS_WEIGHT else 1.0
    total_weight = tl.zeros([CHANNELS], dtype=tl.float32)
    total_bias = tl.zeros([CHANNELS], dtype=tl.float32)
    for start in range(0, CHUNK, ROWS):
        row = tl.program_id(0) * CHUNK + start + tl.arange(0, ROWS)
        inside = row < rows
        image = (row // slots).to(tl.int64)
        token = tl.load(index + row, mask=inside, other=0).to(tl.int64)
        mask = inside[:, None] & across[None, :]
        offset = row.to(tl.int64)[:, None] * channels + channel[None, :]
        value = load_float(z + offset, mask)
        outer = load_float(grad_normed + offset, mask)
        deviation = tl.load(scale + row, mask=inside, other=0.0)[:, None]
        if CENTRED:
            value = value - tl.load(mean + row, mask=inside, other=0.0)[:, None]
        value = tl.where(mask, value * deviation, 0.0)
        total_weight += tl.sum(outer * value, axis=0)
        total_bias += tl.sum(outer, axis=0)
        inner = outer * factor
        # The gradient of a norm: the part along the normalised row is taken out, and with a mean its mean.
        change = inner - value * (tl.sum(inner * value, axis=1) / channels)[:, None]
        if CENTRED:
            change = change - (tl.sum(inner, axis=1) / channels)[:, None]
        change = change * deviation + load_float(grad_z + offset, mask)
        offset = (image * tokens + token)[:, None] * channels + channel[None, :]
        tl.store(grad_x + offset, change.to(grad_x.dtype.element_ty), mask=mask)
    offset = tl.program_id(0).to(tl.int64) * channels + channel
    tl.store(grad_weight + offset, total_weight, mask=across)
    tl.store(grad_bias + offset, total_bias, mask=across)


def gather_rows(out: Tensor, x_BND: Tensor, index_BK: Tensor, inverse_BN: Tensor | None = None) -> None:
    """Copy the rows of x that the index names (B, K, D)."""
    images, slots, channels = out.shape
    rows = images * slots
    tile_rows, tile_channels = tile_of(channels)
    launch(
        gather_kernel,
        (triton.cdiv(rows, tile_rows), triton.cdiv(channels, tile_channels)),
        x_BND,
        index_BK,
        out,
        rows,
        slots,
        channels,
        *x_BND.stride(),
        *index_BK.stride(),
        ROWS=tile_rows,
        CHANNELS=tile_channels,
    )


def spread_rows(out: Tensor, y: Tensor, index: Tensor, inverse: Tensor | None, tokens: int) -> None:
    """Write y at the rows that the index names, and zeros at all others (B, N, D)."""
    merge_rows(out, None, index, None, y, None, None, inverse)


def blank_rows(out: Tensor, x: Tensor, index: Tensor, valid: Tensor | None, inverse: Tensor | None) -> None:
    """Write zeros at the rows that valid slots name, and x at all others."""
    merge_rows(out, x, index, None, None, None, valid, inverse)


def merge_rows(
    out: Tensor,
    x: Tensor | None,
    index: Tensor,
    z: Tensor | None,
    y: Tensor | None,
    gate: Tensor | None,
    valid: Tensor | None,
    inverse: Tensor | None,
) -> None:
    """Write lerp(z, y, gate) at the rows that valid slots name, and x at all others; zeros for an absent x or y."""
    images, tokens, channels = out.shape
    # The kernel walks over all rows, so it needs the slot of each row rather than the row of each slot.
    inverse = inverse_rows(index, tokens) if inverse is None else inverse.contiguous()
    # The kernel reads no tensor that is absent, but its argument must be one.
    x_ = out if x is None else x
    z_ = out if z is None else z
    y_ = out if y is None else y
    gate_ = out if gate is None else gate.contiguous()
    valid_ = inverse if valid is None else valid.contiguous().view(torch.uint8)
    rows = images * tokens
    tile_rows, tile_channels = tile_of(channels)
    launch(
        merge_kernel,
        (triton.cdiv(rows, tile_rows), triton.cdiv(channels, tile_channels)),
        x_,
        inverse,
        z_,
        y_,
        gate_,
        valid_,
        out,
        rows,
        tokens,
        index.shape[1],
        channels,
        *x_.stride(),
        *z_.stride(),
        *y_.stride(),
        HAS_X=x is not None,
        HAS_Y=y is not None,
        HAS_GATE=gate is not None,
        HAS_VALID=valid is not None,
        ROWS=tile_rows,
        CHANNELS=tile_channels,
    )


def merge_rows_grad(
    grads: tuple[Tensor, ...],
    grad_BND: Tensor,
    index_BK: Tensor,
    z_BKD: Tensor,
    y_BKD: Tensor,
    gate_BK: Tensor,
    valid_BK: Tensor | None,
) -> None:
    """Compute the gradients of z, y (B, K, D) and gate (B, K)."""
    images, slots, channels = z_BKD.shape
    valid = index_BK if valid_BK is None else valid_BK.contiguous().view(torch.uint8)
    rows = images * slots
    tile_rows, tile_channels = tile_of(channels)
    launch(
        merge_grad_kernel,
        (triton.cdiv(rows, tile_rows),),
        grad_BND,
        index_BK.contiguous(),
        z_BKD,
        y_BKD,
        gate_BK.contiguous(),
        valid,
        *grads,
        rows,
        slots,
        channels,
        *grad_BND.stride(),
        *z_BKD.stride(),
        *y_BKD.stride(),
        HAS_VALID=valid_BK is not None,
        ROWS=tile_rows,
        CHANNELS=tile_channels,
    )


def gather_norm(
    results: tuple[Tensor, ...],
    x_BND: Tensor,
    index_BK: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
) -> None:
    """Copy the named rows, normalise them (B, K, D), and compute their means and factors in fp32 (B, K)."""
    out, normed, mean, scale = results
    images, slots, channels = out.shape
    if not centred:
        # The kernel writes no means then, and uninitialized memory must not leave an operation.
        mean.zero_()
    rows = images * slots
    span = triton.next_power_of_2(channels)
    tile_rows = max(1, TILE // span)
    launch(
        gather_norm_kernel,
        (triton.cdiv(rows, tile_rows),),
        x_BND,
        index_BK,
        out if weight is None else weight,
        out if bias is None else bias,
        out,
        normed,
        mean,
        scale,
        rows,
        slots,
        channels,
        eps,
        *x_BND.stride(),
        *index_BK.stride(),
        CENTRED=centred,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        ROWS=tile_rows,
        CHANNELS=span,
        num_warps=_warps(span),
    )


def gather_norm_grad(
    grads: tuple[Tensor, ...],
    grad_z: Tensor,
    grad_normed: Tensor,
    z_BKD: Tensor,
    index_BK: Tensor,
    weight: Tensor | None,
    mean_BK: Tensor,
    scale_BK: Tensor,
    tokens: int,
    centred: bool,
) -> None:
    """Compute the gradients of x (B, N, D), and of weight and bias (D) in fp32."""
    images, slots, channels = z_BKD.shape
    rows = images * slots
    span = triton.next_power_of_2(channels)
    parts = triton.cdiv(rows, NORM_CHUNK)
    # Rows that nobody selected have no gradient.
    grad_x = grads[0].zero_()
    # Each program sums up its rows.
    partial_sums = [total.new_empty(parts, channels) for total in grads[1:]]
    launch(
        gather_norm_grad_kernel,
        (parts,),
        grad_z.contiguous(),
        grad_normed.contiguous(),
        z_BKD.contiguous(),
        index_BK.contiguous(),
        z_BKD if weight is None else weight,
        mean_BK,
        scale_BK,
        grad_x,
        *partial_sums,
        rows,
        tokens,
        slots,
        channels,
        CENTRED=centred,
        HAS_WEIGHT=weight is not None,
        CHUNK=NORM_CHUNK,
        ROWS=min(NORM_CHUNK, max(1, TILE // span)),
        CHANNELS=span,
        num_warps=_warps(span),
    )
    # In two steps, since atomic additions would make the sum depend on the order of programs.
    for total, partial_sum in zip(grads[1:], partial_sums):
        torch.sum(partial_sum, dim=0, out=total)


def tile_of(channels: int) -> tuple[int, int]:
    """Return rows and channels of a tile; channels divide D where they can, so that no lane idles."""
    widest = 256 if channels % 256 == 0 or channels > 1024 else 128
    span = min(triton.next_power_of_2(channels), widest)
    return min(128, TILE // span), span


def _warps(span: int) -> int:
    """Return the warps of a program that takes full rows."""
    if span <= 2048:
        return 4
    return 8 if span <= 8192 else 16
