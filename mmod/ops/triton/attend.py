"""Launchers of the kernels for attention over sequences of any length.

Axes: T rows of all images, S sequences, H heads, E channels of a head.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from mmod.ops.triton.attention import choose_tiles, forward_kernel, key_gradient_kernel, query_gradient_kernel
from mmod.ops.triton.compat import launch, side_by_side


def attend_rows(
    results: tuple[Tensor, ...],
    q_THE: Tensor,
    k_THE: Tensor,
    v_THE: Tensor,
    start: Tensor,
    longest: int,
    valid: Tensor | None,
    is_causal: bool,
    scale: float,
) -> None:
    """Attend within sequences; no query attends to keys where `valid` is False.

    Computes the output, zero where a query sees no key (T, H, E), and the binary logarithm of each row's sum of
    exponentials, fp32 (H, T).
    """
    q_THE, k_THE, v_THE = map(side_by_side, (q_THE, k_THE, v_THE))
    out, lse = results
    heads, width = q_THE.shape[1:]
    tile = choose_tiles(width, q_THE.dtype, backward=False)
    blocks = triton.cdiv(longest, tile.queries)
    programs = 0
    # Without rows there is nothing to launch: an empty grid is skipped.
    if out.shape[0]:
        programs = blocks * heads * (start.shape[0] - 1)
    launch(
        forward_kernel,
        (programs,),
        q_THE,
        k_THE,
        v_THE,
        out,
        lse,
        start,
        valid,
        *_strides(q_THE, k_THE, v_THE),
        heads,
        heads // k_THE.shape[1],
        blocks,
        out.shape[0],
        scale,
        width=width,
        CAUSAL=is_causal,
        **tile.options(),
    )


def attend_rows_backward(
    grads: tuple[Tensor, ...],
    grad_out: Tensor,
    q_THE: Tensor,
    k_THE: Tensor,
    v_THE: Tensor,
    out: Tensor,
    lse: Tensor,
    start: Tensor,
    longest: int,
    valid: Tensor | None,
    is_causal: bool,
    scale: float,
) -> None:
    """Compute the gradients of `attend_rows`."""
    q_THE, k_THE, v_THE = map(side_by_side, (q_THE, k_THE, v_THE))
    grad_out = grad_out.contiguous()
    # Written by the first kernel and read by the second.
    delta = torch.empty_like(lse)
    heads, width = q_THE.shape[1:]
    shared = k_THE.shape[1]
    tile = choose_tiles(width, q_THE.dtype, backward=True)
    sequences = start.shape[0] - 1
    sources = (start, valid, *_strides(q_THE, k_THE, v_THE), heads, heads // shared)
    options: dict[str, object] = {"width": width, "CAUSAL": is_causal, **tile.options()}
    queries = out.shape[0]
    blocks_q = triton.cdiv(longest, tile.queries)
    blocks_k = triton.cdiv(longest, tile.keys)
    programs_q = blocks_q * heads * sequences if queries else 0
    # As many programs as key heads: one adds up what all queries of a group send, without atomics.
    programs_k = blocks_k * shared * sequences if k_THE.shape[0] else 0
    launch(
        query_gradient_kernel,
        (programs_q,),
        q_THE,
        k_THE,
        v_THE,
        out,
        lse,
        grad_out,
        delta,
        grads[0],
        *sources,
        blocks_q,
        queries,
        scale,
        **options,
    )
    launch(
        key_gradient_kernel,
        (programs_k,),
        q_THE,
        k_THE,
        v_THE,
        lse,
        grad_out,
        delta,
        *grads[1:],
        *sources,
        blocks_k,
        queries,
        scale,
        **options,
    )


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """Return the strides of rows and heads; channels lie side by side."""
    strides: list[int] = []
    for tensor in tensors:
        strides += tensor.stride()[:2]
    return tuple(strides)
