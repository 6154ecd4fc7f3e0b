"""Attention over sequences of any length as a torch operation: launches, shapes, gradient and FLOPs of the kernels.

Axes: T rows of all images, S sequences, H heads, E channels of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mmod.ops.triton.attention import forward_kernel, key_gradient_kernel, query_gradient_kernel, tiles
from mmod.ops.triton.compat import on_device


@torch.library.custom_op("mmod::attend_rows", mutates_args=())
def attend_rows(
    q_THE: Tensor,
    k_THE: Tensor,
    v_THE: Tensor,
    start_q: Tensor,
    start_k: Tensor,
    longest_q: int,
    longest_k: int,
    index_q: Tensor | None,
    index_k: Tensor | None,
    valid: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend within sequences.

    Args:
        q_THE: Queries (T, H, E).
        k_THE: Keys, of as many heads or of a divisor of that (T', H or fewer, E).
        v_THE: Values, like keys.
        start_q: Where each sequence of queries starts and, last, ends (S + 1).
        start_k: The same for keys.
        longest_q: Queries of the longest sequence, or more.
        longest_k: Keys of the longest sequence, or more.
        index_q: Rows of `q_THE` that `start_q` counts, unique, or None for all in order.
        index_k: The same for keys.
        valid: False for keys that nobody attends to, in the order `start_k` counts, or None.
        is_causal: A query sees keys of rows up to its own row.
        scale: Factor of the products.

    Returns:
        The output, in the order `start_q` counts, zero where a query sees no key (queries, H, E), and the binary
        logarithm of each row's sum of exponentials, fp32 (H, queries).
    """
    q_THE, k_THE, v_THE = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_THE, k_THE, v_THE))
    out, lse = _empty_results(q_THE, index_q)
    heads, width = q_THE.shape[1:]
    tile = tiles(width, q_THE.dtype, backward=False)
    blocks = triton.cdiv(longest_q, tile.queries)
    programs = blocks * heads * (start_q.shape[0] - 1)
    if programs and out.shape[0]:
        with on_device(q_THE):
            forward_kernel[(programs,)](
                q_THE, k_THE, v_THE, out, lse, start_q, start_k, index_q, index_k, valid,
                *_strides(q_THE, k_THE, v_THE), heads, heads // k_THE.shape[1], blocks, out.shape[0], scale,
                width=width, CAUSAL=is_causal, **tile.options(),
            )  # fmt: skip
    return out, lse


@torch.library.custom_op("mmod::attend_rows_backward", mutates_args=())
def attend_rows_backward(
    grad_out: Tensor,
    q_THE: Tensor,
    k_THE: Tensor,
    v_THE: Tensor,
    out: Tensor,
    lse: Tensor,
    start_q: Tensor,
    start_k: Tensor,
    longest_q: int,
    longest_k: int,
    index_q: Tensor | None,
    index_k: Tensor | None,
    valid: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `attend_rows`; rows that no index names get zeros.

    Args:
        grad_out: Gradient of its output.
        q_THE: As there.
        k_THE: As there.
        v_THE: As there.
        out: What it returned.
        lse: What it returned.
        start_q: As there.
        start_k: As there.
        longest_q: As there.
        longest_k: As there.
        index_q: As there.
        index_k: As there.
        valid: As there.
        is_causal: As there.
        scale: As there.
    """
    q_THE, k_THE, v_THE = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_THE, k_THE, v_THE))
    grad_out = grad_out.contiguous()
    grads = _empty_gradients(q_THE, k_THE, v_THE, index_q, index_k)
    delta = torch.empty_like(lse)
    heads, width = q_THE.shape[1:]
    shared = k_THE.shape[1]
    tile = tiles(width, q_THE.dtype, backward=True)
    sequences = start_q.shape[0] - 1
    sources = (start_q, start_k, index_q, index_k, valid, *_strides(q_THE, k_THE, v_THE), heads, heads // shared)
    options: dict[str, Any] = {"width": width, "CAUSAL": is_causal, **tile.options()}
    queries = out.shape[0]
    blocks_q, blocks_k = triton.cdiv(longest_q, tile.queries), triton.cdiv(longest_k, tile.keys)
    with on_device(q_THE):
        if sequences and blocks_q and queries:
            query_gradient_kernel[(blocks_q * heads * sequences,)](
                q_THE, k_THE, v_THE, out, lse, grad_out, delta, grads[0], *sources, blocks_q, queries, scale, **options
            )
        if sequences and blocks_k and k_THE.shape[0]:
            key_gradient_kernel[(blocks_k * shared * sequences,)](
                q_THE, k_THE, v_THE, lse, grad_out, delta, *grads[1:], *sources, blocks_k, queries, scale, **options
            )
    return grads


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:2])


def _empty_results(q_THE: Tensor, index_q: Tensor | None) -> tuple[Tensor, Tensor]:
    rows, heads, width = q_THE.shape
    queries = rows if index_q is None else index_q.shape[0]
    return q_THE.new_empty(queries, heads, width), q_THE.new_empty(heads, queries, dtype=torch.float32)


def _empty_gradients(
    q_THE: Tensor, k_THE: Tensor, v_THE: Tensor, index_q: Tensor | None, index_k: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return room for the gradients, zeroed where an index leaves rows out."""
    return (
        q_THE.new_empty(q_THE.shape) if index_q is None else q_THE.new_zeros(q_THE.shape),
        k_THE.new_empty(k_THE.shape) if index_k is None else k_THE.new_zeros(k_THE.shape),
        v_THE.new_empty(v_THE.shape) if index_k is None else v_THE.new_zeros(v_THE.shape),
    )


@attend_rows.register_fake
def _(q_THE, k_THE, v_THE, start_q, start_k, longest_q, longest_k, index_q, *rest):  # type: ignore[no-untyped-def]
    return _empty_results(q_THE, index_q)


@attend_rows_backward.register_fake
def _(grad_out, q_THE, k_THE, v_THE, *rest):  # type: ignore[no-untyped-def]
    return _empty_gradients(q_THE, k_THE, v_THE, rest[6], rest[7])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_THE, k_THE, v_THE, start_q, start_k, longest_q, longest_k, index_q, index_k, valid, is_causal, scale = inputs
    ctx.save_for_backward(q_THE, k_THE, v_THE, *output, start_q, start_k, index_q, index_k, valid)
    ctx.settings = longest_q, longest_k, is_causal, scale


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    *saved, index_q, index_k, valid = ctx.saved_tensors
    longest_q, longest_k, is_causal, scale = ctx.settings
    grads = attend_rows_backward(grad_out, *saved, longest_q, longest_k, index_q, index_k, valid, is_causal, scale)
    return (*grads, *(None,) * 9)


attend_rows.register_autograd(_backward, setup_context=_save)


def _pairs(q_THE: Any, start_q: Any, start_k: Any, longest_k: int, index_q: Any) -> int:
    """Return the pairs of queries and keys: exact where the lengths are known, else at most that many."""
    queries = q_THE.shape[0] if index_q is None else index_q.shape[0]
    if isinstance(start_q, Tensor) and type(start_q) is Tensor and start_q.device.type != "meta":
        return int((start_q.diff() * start_k.diff()).sum())
    return int(queries * longest_k)


@register_flop_formula(torch.ops.mmod.attend_rows, get_raw=True)
def _forward_flops(q_THE, k_THE, v_THE, start_q, start_k, longest_q, longest_k, index_q, *rest, **kwargs):  # type: ignore[no-untyped-def]
    return 4 * _pairs(q_THE, start_q, start_k, longest_k, index_q) * q_THE.shape[1] * q_THE.shape[2]


@register_flop_formula(torch.ops.mmod.attend_rows_backward, get_raw=True)
def _backward_flops(grad_out, q_THE, k_THE, v_THE, *rest, **kwargs):  # type: ignore[no-untyped-def]
    _, _, start_q, start_k, _, longest_k, index_q, *_ = rest
    # Scores and their gradient are computed once more, then three products: five to the forward pass's two.
    return 10 * _pairs(q_THE, start_q, start_k, longest_k, index_q) * q_THE.shape[1] * q_THE.shape[2]
