"""Attention that computes its map once, for the output and for the attention that keys receive.

Axes: B images, H heads, N tokens, E channels of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmod.ops import tiles
from mmod.ops.backend import torch_op
from mmod.ops.tiles import cut_map, hide_later, tile_size


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
    if keeps_lse:
        out, total_BN, _ = _SharedAttention.apply(q, k, v, scale, True, is_causal, weight_N)
        return out, total_BN
    return _attend_by_tiles(q, k, v, scale, None, is_causal, weight_N)


def _attend_by_tiles(
    q: Tensor, k: Tensor, v: Tensor, scale: float, lse: Tensor | None, is_causal: bool, weight_N: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return attention's output and the attention that keys receive; write the rows' log-sum-exp if it is passed."""
    heads, tokens = q.shape[1:3]
    out = _channels_last(q)
    totals = []
    size = tile_size(heads, tokens, tokens, tiles.CHUNK_ELEMENTS, is_causal)
    fits_one_tile = size.heads == heads and size.queries == tokens
    batch = q.unbind(0), k.transpose(2, 3).unbind(0), v.unbind(0), out.unbind(0)
    # Image by image, whose heads are a view of the host's projection; those of several images would be a copy.
    for image, (q_HNE, k_HEN, v_HNE, out_HNE) in enumerate(zip(*batch)):
        lse_HN = None if lse is None else lse[image]
        if fits_one_tile:
            received = _attend_tile(q_HNE, k_HEN, v_HNE, out_HNE, lse_HN, scale, is_causal, weight_N)
            totals.append(received.sum(dim=0, keepdim=True))
            continue
        total_1N = q.new_zeros(1, tokens)
        for _, head, queries in cut_map(1, heads, tokens, tokens, tiles.CHUNK_ELEMENTS, is_causal):
            # Later keys are left out of the product, not only hidden.
            keys = slice(queries.stop if is_causal else None)
            lse_HQ = None
            if lse_HN is not None:
                lse_HQ = lse_HN[head, queries]
            weight_Q = None
            if weight_N is not None:
                weight_Q = weight_N[queries]
            received = _attend_tile(
                q_HNE[head, queries],
                k_HEN[head, :, keys],
                v_HNE[head, keys],
                out_HNE[head, queries],
                lse_HQ,
                scale,
                is_causal,
                weight_Q,
            )
            total_1N[:, keys] += received.sum(dim=0)
        totals.append(total_1N)
    if len(totals) == 1:
        return out, totals[0]
    # A first part without images, so that an empty batch has a result too.
    return out, torch.cat([q.new_empty(0, tokens), *totals])


def _attend_with_lse(
    q: Tensor, k: Tensor, v: Tensor, scale: float, keeps_lse: bool, is_causal: bool, weight_N: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    lse = _empty_lse(q, keeps_lse)
    written = lse if keeps_lse else None
    out, total_BN = _attend_by_tiles(q, k, v, scale, written, is_causal, weight_N)
    return out, total_BN, lse


def _attend_tile(
    q_HQE: Tensor,
    k_HEN: Tensor,
    v_HNE: Tensor,
    out_HQE: Tensor,
    lse_HQ: Tensor | None,
    scale: float,
    is_causal: bool,
    weight_Q: Tensor | None,
) -> Tensor:
    """Write the output of a tile, and its log-sum-exp if it is passed.

    Returns:
        Rows whose sum is the attention that keys receive.
    """
    attention = q_HQE.new_empty(*q_HQE.shape[:2], k_HEN.shape[2])
    # `beta=0` ignores what `attention` holds: scaled product and memory in one call.
    torch.baddbmm(attention, q_HQE, k_HEN, beta=0, alpha=scale, out=attention)
    if is_causal:
        hide_later(attention)
    if lse_HQ is None:
        torch.softmax(attention, dim=-1, out=attention)
    else:
        top_HQ = attention.amax(dim=-1)
        torch.softmax(attention, dim=-1, out=attention)
        # The largest probability of a row is exp(top score - log-sum-exp), and never underflows.
        torch.sub(top_HQ, attention.amax(dim=-1).log(), out=lse_HQ)
    out_HQE.copy_(torch.bmm(attention, v_HNE))
    if weight_Q is not None:
        return weight_Q @ attention
    # Measured on a CPU, ViT-S at 224: one axis after the other takes half the time of both in one sum.
    return attention.sum(dim=0)


def _empty_lse(q: Tensor, keeps_lse: bool) -> Tensor:
    """Return room for log-sum-exps; none where they are not asked for, because an operation returns tensors alone."""
    queries = q.shape[2] if keeps_lse else 0
    return q.new_empty(*q.shape[:2], queries)


def _channels_last(q: Tensor) -> Tensor:
    """Return an empty result, in memory like that of fused attention: the host's transpose and reshape copy nothing."""
    images, heads, tokens, width = q.shape
    return q.new_empty(images, tokens, heads, width).transpose(1, 2)


def _save(ctx: Any, inputs: tuple[object, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, ctx.scale, _, ctx.is_causal, _ = inputs
    ctx.save_for_backward(q, k, v, output[0], output[2])


def _backward(ctx: Any, grad_out: Tensor, *unused: Tensor | None) -> tuple[Tensor | None, ...]:
    # The kernel of torch's own attention, which needs the output and the log-sum-exps alone.
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return (*backward(grad_out, *ctx.saved_tensors, 0.0, ctx.is_causal, scale=ctx.scale), None, None, None, None)


def _empty_results(q: Tensor, k: Tensor, v: Tensor, scale: float, keeps_lse: bool, *_: object) -> tuple[Tensor, ...]:
    return _channels_last(q), q.new_empty(q.shape[0], q.shape[2]), _empty_lse(q, keeps_lse)


def flops_of_scores(q_BHNE: Tensor, *unused: object, **options: object) -> int:
    """Return the FLOPs of the products of all queries and keys."""
    return 2 * q_BHNE.numel() * q_BHNE.shape[2]


# Attention's output, the map's column sums and the rows' log-sum-exp, empty without `keeps_lse`. The map is never
# stored. The gradient is that of the output alone.
shared_attention = torch_op(
    "shared_attention",
    "(Tensor q, Tensor k, Tensor v, float scale, bool keeps_lse, bool is_causal, Tensor? weight) -> "
    "(Tensor, Tensor, Tensor)",
    _attend_with_lse,
    _empty_results,
    _save,
    _backward,
    flops=lambda q, *_, **__: 2 * flops_of_scores(q),
)


class _SharedAttention(torch.autograd.Function):
    """`shared_attention` for eager mode, where torch's FLOP counter sees the products inside it."""

    forward = staticmethod(_attend_with_lse)
    backward = staticmethod(_backward)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[object, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        _save(ctx, inputs, output)
