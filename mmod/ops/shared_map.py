"""Attention that computes its map once, for the output and for the attention that keys receive.

Axes: B images, H heads, N tokens, E channels of a head.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from mmod.ops import tiles
from mmod.ops.tiles import hide_later, tile_size


def attend_and_sum(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, weight_N: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return attention's output with its gradient, and the attention received, summed over heads and queries (B, N).

    `weight_N` is the weight of each query in the sums, or None for 1.
    """
    keeps_lse = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if torch.compiler.is_compiling():
        out, total_BN, _ = shared_attention(q, k, v, scale, keeps_lse, is_causal, weight_N)
        return out, total_BN.detach()
    attend = _SharedAttention.apply if keeps_lse else _attend_by_tiles
    out, total_BN, _ = attend(q, k, v, scale, keeps_lse, is_causal, weight_N)
    return out, total_BN


def _attend_by_tiles(
    q: Tensor, k: Tensor, v: Tensor, scale: float, keeps_lse: bool, is_causal: bool, weight_N: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    heads, tokens = q.shape[1:3]
    out, total_BN, lse = _empty_shared(q, keeps_lse)
    total_BN.zero_()
    _, together, rows = tile_size(heads, tokens, tiles.CHUNK_ELEMENTS, is_causal)
    # Image by image, whose heads are a view of the host's projection; those of several images would be a copy.
    batch = q, k.transpose(2, 3), v, out, lse
    for parts in zip(*(x.split(together, dim=1) for x in batch)) if together < heads else (batch,):
        for *image, total_N in zip(*(x.unbind(0) for x in parts), total_BN.unbind(0)):
            for first in range(0, tokens, rows):
                tile, weight = image, weight_N
                if rows < tokens:
                    queries, keys = slice(first, first + rows), slice(min(first + rows, tokens) if is_causal else None)
                    q_HNE, k_HEN, v_HNE, out_HNE, lse_HN = image
                    tile = [
                        q_HNE[:, queries],
                        k_HEN[..., keys],
                        v_HNE[:, keys],
                        out_HNE[:, queries],
                        lse_HN[:, queries],
                    ]
                    weight = None if weight_N is None else weight_N[queries]
                _attend_tile(*tile, total_N=total_N, scale=scale, is_causal=is_causal, weight_Q=weight)
    return out, total_BN, lse


def _attend_tile(
    q_HQE: Tensor, k_HEN: Tensor, v_HNE: Tensor, out_HQE: Tensor, lse_HQ: Tensor, *, total_N: Tensor,
    scale: float, is_causal: bool, weight_Q: Tensor | None,
) -> None:  # fmt: skip
    """Write the output of a tile, its log-sum-exp unless that has no elements, and add to the sums."""
    keys = k_HEN.shape[2]
    attention = q_HQE.new_empty(*q_HQE.shape[:2], keys)
    torch.baddbmm(attention, q_HQE, k_HEN, beta=0, alpha=scale, out=attention)
    if is_causal:
        hide_later(attention)
    top = attention.amax(dim=-1) if lse_HQ.numel() else None
    torch.softmax(attention, dim=-1, out=attention)
    if top is not None:
        # The largest probability of a row is exp(top score - log-sum-exp), and never underflows.
        torch.sub(top, attention.amax(dim=-1).log(), out=lse_HQ)
    out_HQE.copy_(torch.bmm(attention, v_HNE))
    received = attention.sum(dim=(0, 1)) if weight_Q is None else (weight_Q @ attention).sum(dim=0)
    total_N[:keys].add_(received)


def _empty_shared(q: Tensor, keeps_lse: bool) -> tuple[Tensor, Tensor, Tensor]:
    images, heads, tokens, width = q.shape
    # Channels-last like the result of fused attention, so that the host's transpose and reshape copy nothing.
    out = q.new_empty(images, tokens, heads, width).transpose(1, 2)
    return out, q.new_empty(images, tokens), q.new_empty(images, heads, tokens if keeps_lse else 0)


@torch.library.custom_op("mmod::shared_attention", mutates_args=())
def shared_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, keeps_lse: bool, is_causal: bool, weight_N: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return attention's output, the map's column sums and the rows' log-sum-exp, empty without `keeps_lse`.

    The map is never stored. The gradient is that of the output alone.
    """
    return _attend_by_tiles(q, k, v, scale, keeps_lse, is_causal, weight_N)


@shared_attention.register_fake
def _(q, k, v, scale, keeps_lse, is_causal, weight_N):  # type: ignore[no-untyped-def]
    register_flops()
    return _empty_shared(q, keeps_lse)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, ctx.scale, _, ctx.is_causal, _ = inputs
    ctx.save_for_backward(q, k, v, output[0], output[2])


def _backward(ctx: Any, grad_out: Tensor, *unused: Tensor | None) -> tuple[Tensor | None, ...]:
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return (*backward(grad_out, *ctx.saved_tensors, 0.0, ctx.is_causal, scale=ctx.scale), None, None, None, None)


shared_attention.register_autograd(_backward, setup_context=_save)


class _SharedAttention(torch.autograd.Function):
    """`shared_attention` for eager mode, where torch's FLOP counter sees the products inside it."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, scale: float, keeps_lse: bool, is_causal: bool, weight_N: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _attend_by_tiles(q, k, v, scale, keeps_lse, is_causal, weight_N)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        _save(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, *unused: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            q, k, v = ctx.saved_tensors[:3]
            return (*_second_order(grad_out, q, k, v, ctx.scale, ctx.is_causal), None, None, None, None)
        return _backward(ctx, grad_out, *unused)


def _second_order(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v by differentiable operations over the full map."""
    score = q @ k.transpose(-2, -1) * scale
    if is_causal:
        score = score.masked_fill(torch.ones_like(score, dtype=torch.bool).triu(1), -torch.inf)
    share = torch.softmax(score, dim=-1)
    change = grad_out @ v.transpose(-2, -1)
    change = share * (change - (change * share).sum(dim=-1, keepdim=True)) * scale
    return change @ k, change.transpose(-2, -1) @ q, share.transpose(-2, -1) @ grad_out


@functools.cache
def register_flops() -> None:
    """Register FLOP formulas with torch; delayed until a graph contains the ops, because it imports Triton."""
    from torch.utils.flop_counter import register_flop_formula

    def scores(q_shape, *unused, **kwargs):  # type: ignore[no-untyped-def]
        images, heads, tokens, width = q_shape
        return 2 * images * heads * tokens * tokens * width

    register_flop_formula(torch.ops.mmod.received_attention)(scores)
    register_flop_formula(torch.ops.mmod.shared_attention)(lambda *args, **kwargs: 2 * scores(*args, **kwargs))
