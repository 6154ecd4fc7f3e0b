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
from mmod.ops.triton.compat import launch


@torch.library.custom_op("mmod::attend_rows", mutates_args=())
def attend_rows(
    q_THE: Tensor,
    k_THE: Tensor,
    v_THE: Tensor,
    start: Tensor,
    longest: int,
    valid: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend within sequences; keys where `valid` is False are attended to by nobody.

    Returns the output, zero where a query sees no key (T, H, E), and the binary logarithm of each row's sum of
    exponentials, fp32 (H, T).
    """
    q_THE, k_THE, v_THE = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_THE, k_THE, v_THE))
    out, lse = _empty_results(q_THE)
    heads, width = q_THE.shape[1:]
    tile = tiles(width, q_THE.dtype, backward=False)
    blocks = triton.cdiv(longest, tile.queries)
    programs = blocks * heads * (start.shape[0] - 1) * (out.shape[0] > 0)
    launch(
        forward_kernel, (programs,),
        q_THE, k_THE, v_THE, out, lse, start, valid,
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
    start: Tensor,
    longest: int,
    valid: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `attend_rows`."""
    q_THE, k_THE, v_THE = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_THE, k_THE, v_THE))
    grad_out = grad_out.contiguous()
    grads = q_THE.new_empty(q_THE.shape), k_THE.new_empty(k_THE.shape), v_THE.new_empty(v_THE.shape)
    delta = torch.empty_like(lse)
    heads, width = q_THE.shape[1:]
    shared = k_THE.shape[1]
    tile = tiles(width, q_THE.dtype, backward=True)
    sequences = start.shape[0] - 1
    sources = (start, valid, *_strides(q_THE, k_THE, v_THE), heads, heads // shared)
    options: dict[str, Any] = {"width": width, "CAUSAL": is_causal, **tile.options()}
    queries = out.shape[0]
    blocks_q, blocks_k = triton.cdiv(longest, tile.queries), triton.cdiv(longest, tile.keys)
    launch(
        query_gradient_kernel, (blocks_q * heads * sequences * (queries > 0),),
        q_THE, k_THE, v_THE, out, lse, grad_out, delta, grads[0], *sources, blocks_q, queries, scale, **options,
    )  # fmt: skip
    launch(
        key_gradient_kernel, (blocks_k * shared * sequences * (k_THE.shape[0] > 0),),
        q_THE, k_THE, v_THE, lse, grad_out, delta, *grads[1:], *sources, blocks_k, queries, scale, **options,
    )  # fmt: skip
    return grads


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:2])


def _empty_results(q_THE: Tensor) -> tuple[Tensor, Tensor]:
    rows, heads, _ = q_THE.shape
    return q_THE.new_empty(q_THE.shape), q_THE.new_empty(heads, rows, dtype=torch.float32)


@attend_rows.register_fake
def _(q_THE, *unused):  # type: ignore[no-untyped-def]
    return _empty_results(q_THE)


@attend_rows_backward.register_fake
def _(grad_out, *others):  # type: ignore[no-untyped-def]
    return tuple(x.new_empty(x.shape) for x in others[:3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_THE, k_THE, v_THE, start, longest, valid, is_causal, scale = inputs
    ctx.save_for_backward(q_THE, k_THE, v_THE, *output, start, valid)
    ctx.settings = longest, is_causal, scale


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    *saved, valid = ctx.saved_tensors
    longest, is_causal, scale = ctx.settings
    return (*attend_rows_backward(grad_out, *saved, longest, valid, is_causal, scale), *(None,) * 5)


attend_rows.register_autograd(_backward, setup_context=_save)


def _pairs(q_THE: Any, start: Any, longest: int) -> int:
    """Return the pairs of queries and keys: exact where the lengths are known, else at most that many."""
    if isinstance(start, Tensor) and type(start) is Tensor and start.device.type != "meta":
        return int(start.diff().square().sum())
    return int(q_THE.shape[0] * longest)


@register_flop_formula(torch.ops.mmod.attend_rows, get_raw=True)
def _forward_flops(q_THE, k_THE, v_THE, start, longest, *unused, **kwargs):  # type: ignore[no-untyped-def]
    return 4 * _pairs(q_THE, start, longest) * q_THE.shape[1] * q_THE.shape[2]


@register_flop_formula(torch.ops.mmod.attend_rows_backward, get_raw=True)
def _backward_flops(grad_out, q_THE, k_THE, v_THE, out, lse, start, longest, *unused, **kwargs):  # type: ignore[no-untyped-def]
    # Scores and their gradient are computed once more, then three products: five to the forward pass's two.
    return 10 * _pairs(q_THE, start, longest) * q_THE.shape[1] * q_THE.shape[2]
