"""Kernels that select: from scores to ascending indices, inverse map and gates in one launch, one program per image.

Scores become integers whose ascending order is that of selection: always kept, then scores from high to low, then NaN,
then padding. The K-th smallest is found bit by bit; among those that equal it, the lowest indices are taken.

Axes: B images, N tokens, K slots per image.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmod.ops.triton.compat import launch, load_float

GATES = {"identity": 0, "linear": 1, "sigmoid": 2, "tanh": 3}
# Keys of what is always kept, of NaN and of padding; no bits of a score come out as one of them.
_FIRST = tl.constexpr(-(2**31))
_NAN = tl.constexpr(2**31 - 2)
_LAST = tl.constexpr(2**31 - 1)


@triton.jit
def _tanh(value):  # type: ignore[no-untyped-def]
    small = tl.exp(-2 * tl.abs(value))
    return tl.where(value < 0, -1.0, 1.0) * (1 - small) / (1 + small)


@triton.jit
def _first(key, count):  # type: ignore[no-untyped-def]
    """Return True for the `count` smallest keys, the lowest indices among equal ones."""
    # 64 bits, so that keys count from 0.
    key = key.to(tl.int64) + 2147483648
    level = tl.full((), 0, tl.int64)
    step = tl.full((), 2147483648, tl.int64)
    # Bit by bit from the highest: the largest level with fewer than `count` keys below it is the last key taken.
    for _ in range(32):
        below = tl.sum((key < level + step).to(tl.int32), axis=0)
        level = tl.where(below < count, level + step, level)
        step = step // 2
    less = key < level
    equal = key == level
    missing = count - tl.sum(less.to(tl.int32), axis=0)
    # Of keys equal to the last one taken, the lowest indices fill what is missing.
    return less | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= missing))


@triton.jit
def select_kernel(  # type: ignore[no-untyped-def]
    score,
    valid,
    protect,
    index,
    filled,
    inverse,
    gate,
    tokens,
    slots,
    prefix,
    numerator,
    denominator,
    factor,
    score_image,
    score_token,
    valid_image,
    valid_token,
    protect_image,
    protect_token,
    HAS_VALID: tl.constexpr,
    HAS_PROTECT: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Select the tokens of one image."""
    image = tl.program_id(0).to(tl.int64)
    # In 64 bits, since strides multiply it.
    token = tl.arange(0, BLOCK).to(tl.int64)
    inside = token < tokens
    value = load_float(score + image * score_image + token * score_token, inside)
    # Minus zero equals zero, but has other bits.
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    # Bits of a float sort like an integer if negative ones are flipped; the complement puts the highest first.
    key = ~(bits ^ ((bits >> 31) & 0x7FFFFFFF))
    key = tl.where(value != value, _NAN, key)
    real = inside
    if HAS_VALID:
        real = tl.load(valid + image * valid_image + token * valid_token, mask=inside, other=0) != 0
    key = tl.where(real, key, _LAST)
    if HAS_PROTECT:
        always = tl.load(protect + image * protect_image + token * protect_token, mask=inside, other=0) != 0
    else:
        always = token < prefix
    key = tl.where(always & inside, _FIRST, key)
    chosen = _first(key, slots)
    if HAS_VALID:
        number = tl.sum(real.to(tl.int32), axis=0)
        least = tl.maximum(prefix, 1)
        wanted = (number.to(tl.int64) * numerator // denominator).to(tl.int32)
        wanted = tl.minimum(tl.maximum(wanted, least), number)
        kept = _first(key, wanted)
        dropped = chosen & ~kept
        # Valid slots ascend first, then the empty ones, as `ascending_valid` orders them.
        place_kept = tl.cumsum(kept.to(tl.int32), axis=0)
        place_dropped = wanted + tl.cumsum(dropped.to(tl.int32), axis=0)
        slot = tl.where(kept, place_kept, place_dropped) - 1
        tl.store(filled + image * slots + slot, kept.to(tl.uint8), mask=chosen)
    else:
        slot = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(index + image * slots + slot, token, mask=chosen)
    tl.store(inverse + image * tokens + token, tl.where(chosen, slot, -1), mask=inside)
    if GATE != 0:
        weight = value * factor
        if GATE == 2:
            weight = tl.sigmoid(value) * factor
        elif GATE == 3:
            weight = 1 + _tanh(value) * factor
        tl.store(gate + image * slots + slot, weight.to(gate.dtype.element_ty), mask=chosen)


@triton.jit
def gate_grad_kernel(  # type: ignore[no-untyped-def]
    grad,
    score,
    inverse,
    out,
    total,
    tokens,
    slots,
    factor,
    score_image,
    score_token,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Bring the gradients of gates back to the scores of their tokens; all others have none."""
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = position < total
    image = (position // tokens).to(tl.int64)
    token = (position % tokens).to(tl.int64)
    slot = tl.load(inverse + position, mask=inside, other=-1)
    change = load_float(grad + image * slots + slot, slot >= 0) * factor
    if GATE != 1:
        value = load_float(score + image * score_image + token * score_token, inside)
        if GATE == 2:
            share = tl.sigmoid(value)
            change = change * share * (1 - share)
        else:
            share = _tanh(value)
            change = change * (1 - share * share)
    tl.store(out + position, tl.where(slot >= 0, change, 0.0).to(out.dtype.element_ty), mask=inside)


def select_topk(
    results: tuple[Tensor, ...],
    score_BN: Tensor,
    count: int,
    prefix: int,
    valid_BN: Tensor | None,
    protect_BN: Tensor | None,
    numerator: int,
    denominator: int,
    gate: str,
    scale: float,
) -> None:
    """Compute gates, indices, filled slots (B, K) and inverse map (B, N); those that are not requested are empty."""
    weight, index, filled, inverse = results
    images, tokens = score_BN.shape
    # The kernel reads no mask that is absent, but its argument must be a tensor.
    valid = inverse if valid_BN is None else valid_BN.view(torch.uint8)
    protect = inverse if protect_BN is None else protect_BN.view(torch.uint8)
    block = triton.next_power_of_2(tokens)
    launch(
        select_kernel,
        (images,),
        score_BN,
        valid,
        protect,
        index,
        filled.view(torch.uint8),
        inverse,
        weight,
        tokens,
        count,
        prefix,
        numerator,
        denominator,
        scale,
        *score_BN.stride(),
        *valid.stride(),
        *protect.stride(),
        HAS_VALID=valid_BN is not None,
        HAS_PROTECT=protect_BN is not None,
        GATE=GATES[gate],
        BLOCK=block,
        num_warps=_warps(block),
    )


def _warps(block: int) -> int:
    """Return the warps of a program that sorts the tokens of one image."""
    if block <= 256:
        return 1
    return 4 if block <= 2048 else 8


def gate_grad(out: Tensor, grad_BK: Tensor, score_BN: Tensor, inverse_BN: Tensor, gate: str, scale: float) -> None:
    """Compute the gradient of the scores (B, N)."""
    total = score_BN.numel()
    block = 1024
    launch(
        gate_grad_kernel,
        (triton.cdiv(total, block),),
        grad_BK.contiguous(),
        score_BN,
        inverse_BN,
        out,
        total,
        score_BN.shape[1],
        grad_BK.shape[1],
        scale,
        *score_BN.stride(),
        GATE=GATES[gate],
        BLOCK=block,
    )
