"""Attention within sequences of any length.

All images lie one after the other in one tensor of rows; `start` says where each begins. One program takes one block of
rows of one head, and sums over blocks in a fixed order: no atomics, so results are the same bit by bit.
Axes: T rows of all images, S sequences, H heads, E channels of a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_rows(base, row, stride, inside, width: tl.constexpr, BLOCK_E: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load rows of one head; rows outside are zero."""
    channel = tl.arange(0, BLOCK_E)
    mask = inside[:, None]
    # Known when the kernel is compiled: powers of two need no mask of channels.
    if width < BLOCK_E:
        mask = mask & (channel < width)[None, :]
    return tl.load(base + row[:, None] * stride + channel[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(base, row, stride, inside, value, width: tl.constexpr, BLOCK_E: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store rows of one head, without those outside."""
    channel = tl.arange(0, BLOCK_E)
    mask = inside[:, None]
    if width < BLOCK_E:
        mask = mask & (channel < width)[None, :]
    tl.store(base + row[:, None] * stride + channel[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _hide(score, row_m, row_n, inside_n, valid, CAUSAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Give pairs that may not attend the score minus infinity: padding, later tokens, positions past the end."""
    if valid is not None:
        inside_n = inside_n & (tl.load(valid + row_n, mask=inside_n, other=0) != 0)
    visible = inside_n[None, :]
    if CAUSAL:
        visible = visible & (row_m[:, None] >= row_n[None, :])
    return tl.where(visible, score, -float("inf"))


@triton.jit
def _locate(start, blocks, heads, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the head, rows and sequence of this program: blocks of one head are neighbours and share its keys."""
    program = tl.program_id(0)
    sequence = program // blocks // heads
    head = ((program // blocks) % heads).to(tl.int64)
    offset = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(start + sequence).to(tl.int64)
    length = tl.load(start + sequence + 1) - first
    return head, offset, first, length


@triton.jit
def _softmax_step(  # type: ignore[no-untyped-def]
    top,
    total,
    mixed,
    x_q,
    row_m,
    k,
    v,
    k_row,
    v_row,
    valid,
    first,
    length,
    begin,
    scale,
    width: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CAUSAL: tl.constexpr,
    HIDE: tl.constexpr,
):
    """Take one more block of keys into the running softmax; without HIDE, every query sees all of them."""
    offset_n = begin + tl.arange(0, BLOCK_N)
    inside_n = offset_n < length
    row_n = first + offset_n
    x_k = load_rows(k, row_n, k_row, inside_n, width, BLOCK_E)
    score = tl.dot(x_q, tl.trans(x_k), input_precision="ieee")
    if HIDE:
        score = _hide(score, row_m, row_n, inside_n, valid, CAUSAL)
    highest = tl.maximum(top, tl.max(score, 1) * scale)
    base = highest
    if HIDE:
        # For a row without a visible key so far, -inf - (-inf) is NaN.
        base = tl.where(highest == -float("inf"), 0.0, highest)
    share = tl.exp2(score * scale - base[:, None])
    decay = tl.exp2(top - base)
    total = total * decay + tl.sum(share, 1)
    x_v = load_rows(v, row_n, v_row, inside_n, width, BLOCK_E)
    mixed = mixed * decay[:, None] + tl.dot(share.to(x_v.dtype), x_v, input_precision="ieee")
    return highest, total, mixed


@triton.jit
def forward_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    out,
    lse,
    start,
    valid,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    heads,
    group,
    blocks,
    queries,
    scale,
    width: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Attend: one block of queries of one head against all keys of its sequence, keeping a running softmax."""
    head, offset_m, first, length = _locate(start, blocks, heads, BLOCK_M)
    inside_m = offset_m < length
    row_m = first + offset_m
    # A program past the end of its sequence loops over nothing.
    end = tl.where(tl.program_id(0) % blocks * BLOCK_M < length, length, 0)
    if CAUSAL:
        end = tl.minimum(end, (tl.program_id(0) % blocks + 1) * BLOCK_M)
    # Blocks of keys that all queries see whole need no mask.
    full_end = end // BLOCK_N * BLOCK_N
    if CAUSAL or valid is not None:
        # Times zero rather than 0: the loop's bound keeps its type.
        full_end = end * 0
    x_q = load_rows(q + head * q_head, row_m, q_row, inside_m, width, BLOCK_E)
    k += head // group * k_head
    v += head // group * v_head
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    for begin in range(0, full_end, BLOCK_N):
        top, total, mixed = _softmax_step(
            top,
            total,
            mixed,
            x_q,
            row_m,
            k,
            v,
            k_row,
            v_row,
            valid,
            first,
            length,
            begin,
            # In base 2, because `exp2` is one instruction of a GPU.
            scale * LOG2_E,
            width,
            BLOCK_N,
            BLOCK_E,
            CAUSAL,
            False,
        )
    for begin in range(full_end, end, BLOCK_N):
        top, total, mixed = _softmax_step(
            top,
            total,
            mixed,
            x_q,
            row_m,
            k,
            v,
            k_row,
            v_row,
            valid,
            first,
            length,
            begin,
            scale * LOG2_E,
            width,
            BLOCK_N,
            BLOCK_E,
            CAUSAL,
            True,
        )
    # A query that sees no key keeps minus infinity, and zeros.
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(lse + head * queries + row_m, top + tl.log2(total), mask=inside_m)
    mixed = mixed / total[:, None]
    store_rows(out + head * width, row_m, heads * width, inside_m, mixed, width, BLOCK_E)


@triton.jit
def query_gradient_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    out,
    lse,
    grad_out,
    delta,
    grad_q,
    start,
    valid,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    heads,
    group,
    blocks,
    queries,
    scale,
    width: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Gradient of one block of queries; leaves `delta`, each row's gradient times output, to the other kernel."""
    head, offset_m, first, length = _locate(start, blocks, heads, BLOCK_M)
    inside_m = offset_m < length
    row_m = first + offset_m
    end = tl.where(tl.program_id(0) % blocks * BLOCK_M < length, length, 0)
    if CAUSAL:
        end = tl.minimum(end, (tl.program_id(0) % blocks + 1) * BLOCK_M)
    x_q = load_rows(q + head * q_head, row_m, q_row, inside_m, width, BLOCK_E)
    x_out = load_rows(out + head * width, row_m, heads * width, inside_m, width, BLOCK_E)
    x_grad = load_rows(grad_out + head * width, row_m, heads * width, inside_m, width, BLOCK_E)
    k += head // group * k_head
    v += head // group * v_head
    norm = tl.load(lse + head * queries + row_m, mask=inside_m, other=float("inf"))
    # A row that sees no key has no shares: all of them become exp2(-inf), which is 0.
    norm = tl.where(norm == -float("inf"), float("inf"), norm)
    inner = tl.sum(x_out.to(tl.float32) * x_grad.to(tl.float32), 1)
    tl.store(delta + head * queries + row_m, inner, mask=inside_m)
    gradient = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    for begin in range(0, end, BLOCK_N):
        offset_n = begin + tl.arange(0, BLOCK_N)
        inside_n = offset_n < length
        row_n = first + offset_n
        x_k = load_rows(k, row_n, k_row, inside_n, width, BLOCK_E)
        x_v = load_rows(v, row_n, v_row, inside_n, width, BLOCK_E)
        score = tl.dot(x_q, tl.trans(x_k), input_precision="ieee") * (scale * LOG2_E)
        score = _hide(score, row_m, row_n, inside_n, valid, CAUSAL)
        share = tl.exp2(score - norm[:, None])
        change = share * (tl.dot(x_grad, tl.trans(x_v), input_precision="ieee") - inner[:, None])
        gradient += tl.dot(change.to(x_k.dtype), x_k, input_precision="ieee")
    store_rows(grad_q + head * width, row_m, heads * width, inside_m, gradient * scale, width, BLOCK_E)


@triton.jit
def key_gradient_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    lse,
    grad_out,
    delta,
    grad_k,
    grad_v,
    start,
    valid,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    heads,
    group,
    blocks,
    queries,
    scale,
    width: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Gradients of one block of keys and values of one key head, over all queries of all heads that share it."""
    shared, offset_n, first, length = _locate(start, blocks, heads // group, BLOCK_N)
    inside_n = offset_n < length
    row_n = first + offset_n
    end = tl.where(tl.program_id(0) % blocks * BLOCK_N < length, length, 0)
    begin_m = 0
    if CAUSAL:
        # Earlier queries see none of these keys.
        begin_m = tl.program_id(0) % blocks * BLOCK_N // BLOCK_M * BLOCK_M
    x_k = load_rows(k + shared * k_head, row_n, k_row, inside_n, width, BLOCK_E)
    x_v = load_rows(v + shared * v_head, row_n, v_row, inside_n, width, BLOCK_E)
    gradient_k = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    gradient_v = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    for member in range(group):
        head = shared * group + member
        for begin in range(begin_m, end, BLOCK_M):
            offset_m = begin + tl.arange(0, BLOCK_M)
            inside_m = offset_m < length
            row_m = first + offset_m
            x_q = load_rows(q + head * q_head, row_m, q_row, inside_m, width, BLOCK_E)
            x_grad = load_rows(grad_out + head * width, row_m, heads * width, inside_m, width, BLOCK_E)
            norm = tl.load(lse + head * queries + row_m, mask=inside_m, other=float("inf"))
            norm = tl.where(norm == -float("inf"), float("inf"), norm)
            inner = tl.load(delta + head * queries + row_m, mask=inside_m, other=0.0)
            score = tl.dot(x_q, tl.trans(x_k), input_precision="ieee") * (scale * LOG2_E)
            score = _hide(score, row_m, row_n, inside_n, valid, CAUSAL)
            share = tl.exp2(score - norm[:, None])
            gradient_v += tl.dot(tl.trans(share.to(x_grad.dtype)), x_grad, input_precision="ieee")
            change = share * (tl.dot(x_grad, tl.trans(x_v), input_precision="ieee") - inner[:, None])
            gradient_k += tl.dot(tl.trans(change.to(x_q.dtype)), x_q, input_precision="ieee")
    row = heads // group * width
    store_rows(grad_k + shared * width, row_n, row, inside_n, gradient_k * scale, width, BLOCK_E)
    store_rows(grad_v + shared * width, row_n, row, inside_n, gradient_v, width, BLOCK_E)


class Tiles(NamedTuple):
    """Tile sizes: the part of a head that one program takes at a time.

    Args:
        channels: Channels, a power of two.
        warps: Warps of a program.
        stages: Loads in flight.
    """

    queries: int
    keys: int
    channels: int
    warps: int
    stages: int

    def options(self) -> dict[str, int]:
        """Return the arguments that all attention kernels take."""
        return {
            "BLOCK_M": self.queries,
            "BLOCK_N": self.keys,
            "BLOCK_E": self.channels,
            "num_warps": self.warps,
            "num_stages": self.stages,
            "enable_fp_fusion": True,
        }


def choose_tiles(width: int, dtype: torch.dtype, backward: bool) -> Tiles:
    """Choose tiles that fit the shared memory of every GPU since sm_80 (99 KiB on the smallest).

    They are the customary ones for attention and not yet tuned by measurement: no GPU was at hand.
    """
    channels = max(16, triton.next_power_of_2(width))
    wide = channels > 64
    if dtype == torch.float32:
        # Exact fp32 products run outside the tensor cores and hold their operands in registers.
        if backward or wide:
            return Tiles(queries=32, keys=32, channels=channels, warps=4, stages=1)
        return Tiles(queries=64, keys=32, channels=channels, warps=4, stages=2)
    warps = 8 if wide else 4
    # A stage is one more tile of what a loop loads, in shared memory.
    if backward:
        stages = 1 if wide else 2
        return Tiles(queries=64, keys=64, channels=channels, warps=warps, stages=stages)
    stages = 2 if wide else 3
    return Tiles(queries=128, keys=64, channels=channels, warps=warps, stages=stages)
