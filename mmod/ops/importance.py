"""Importance: the attention a token receives, without ever storing the map of all pairs.

Axes: B images, H heads, N tokens, E channels of a head.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmod.ops.backend import Backend, choose, exporting

Tile = tuple[slice, slice, slice]

# Probabilities held at once, in elements. 4 MB of fp32 stay within a core's cache: two CPU threads, ViT-S, map shared
# with the output: a block costs 1.015 of the plain one at N = 197 and batch 32, 1.06 to 1.07 at N = 1025; with 1 MB
# 1.013 and 1.09 to 1.12, with 16 MB 1.03 and 1.07 to 1.08. A GPU is filled by larger pieces only.
CHUNK_ELEMENTS = 1 << 20
GPU_CHUNK_ELEMENTS = 1 << 25
# Queries taken at once where they see earlier keys only: fewer waste less above the diagonal, more keep products large.
CAUSAL_QUERIES = 128


def attention_importance(
    q_BHNE: Tensor,
    k_BHNE: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    valid_BN: Tensor | None = None,
    chunk_elements: int | None = None,
) -> Tensor:
    """Return the mean attention each token receives, over heads and queries, without a gradient.

    Images, heads and queries are taken piece by piece, so memory grows with N and not with its square, in compiled
    graphs too. Exported graphs take all at once, since the number of pieces would fix their shapes.

    Args:
        q_BHNE: Queries (B, H, N, E).
        k_BHNE: Keys, of as many heads or of a divisor of that (grouped queries) (B, H or fewer, N, E).
        mask: True where a pair may attend, or a bias to add, broadcastable to (B, H, N, N).
        is_causal: A query sees keys up to its own position.
        scale: Factor of the products; None means 1 / sqrt(E).
        valid_BN: False where a token is padding: its query is not counted (B, N).
        chunk_elements: Probabilities held at once; None means what suits the device.

    Returns:
        Importance (B, N), fp32 or better; it sums to 1 over the tokens of an image.

    Source: A-MoD, Gadhikar et al., arXiv 2412.20875 (mean over heads and queries of the preceding layer's map).

    Example:
        >>> q = k = torch.zeros(1, 2, 4, 8)
        >>> attention_importance(q, k)
        tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """
    scale = 1 / math.sqrt(q_BHNE.shape[-1]) if scale is None else scale
    if chunk_elements is None:
        chunk_elements = GPU_CHUNK_ELEMENTS if q_BHNE.device.type == "cuda" else CHUNK_ELEMENTS
    with torch.no_grad():
        if exporting():
            everything = (slice(None), slice(None), slice(None))
            total_BN = _received(q_BHNE, _keys(q_BHNE, k_BHNE), mask, is_causal, scale, valid_BN, everything)
        elif torch.compiler.is_compiling():
            total_BN = received_attention(q_BHNE, k_BHNE, mask, is_causal, scale, valid_BN, chunk_elements)
        else:
            total_BN = _received_by_tiles(q_BHNE, k_BHNE, mask, is_causal, scale, valid_BN, chunk_elements)
        return _mean(total_BN, q_BHNE, valid_BN)


def attention_with_importance(
    q_BHNE: Tensor,
    k_BHNE: Tensor,
    v_BHNE: Tensor,
    mask: Tensor | None = None,
    *,
    dropout: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    valid_BN: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return attention's output and, beside it, the mean attention each token receives.

    The output is that of `scaled_dot_product_attention` and carries its gradient; importance carries none and is
    taken before dropout. On a CPU, plain fp32 attention computes the probabilities once for both, piece by piece; GPU
    kernels keep the rows' log-sum-exp and sum the map's columns in a second sweep.

    Args:
        q_BHNE: Queries (B, H, N, E).
        k_BHNE: Keys, of as many heads or of a divisor of that (grouped queries) (B, H or fewer, N, E).
        v_BHNE: Values, like keys.
        mask: True where a pair may attend, or a bias to add, broadcastable to (B, H, N, N).
        dropout: Share of probabilities dropped in the output.
        is_causal: A query sees keys up to its own position.
        scale: Factor of the products; None means 1 / sqrt(E).
        valid_BN: False where a token is padding: its query is not counted (B, N).

    Returns:
        The output (B, H, N, E) and importance (B, N).

    Raises:
        ValueError: A backend was forced that cannot serve these inputs.

    Example:
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8)
        >>> out, importance = attention_with_importance(q, k, v)
        >>> bool(torch.allclose(importance.sum(), torch.tensor(1.0)))
        True
    """
    pairwise = mask is not None and (mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[1:3] != (1, 1))
    backend = choose(
        "attention_with_importance", q_BHNE, head_dim=q_BHNE.shape[-1], dropout=int(dropout > 0), mask_of_pairs=pairwise
    )
    if backend is Backend.TRITON:
        return _with_kernels(q_BHNE, k_BHNE, v_BHNE, mask, is_causal, scale, valid_BN)
    plain = mask is None and valid_BN is None and not dropout
    if plain and _shares_probabilities(q_BHNE, k_BHNE, v_BHNE):
        return _shared_probabilities(q_BHNE, _keys(q_BHNE, k_BHNE), _keys(q_BHNE, v_BHNE), is_causal, scale)
    out = F.scaled_dot_product_attention(
        q_BHNE, k_BHNE, v_BHNE, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, scale=scale,
        enable_gqa=is_grouped(q_BHNE, k_BHNE),
    )  # fmt: skip
    return out, attention_importance(q_BHNE, k_BHNE, mask, is_causal=is_causal, scale=scale, valid_BN=valid_BN)


def importance_of_map(attention: Tensor, valid_BN: Tensor | None = None) -> Tensor:
    """Return the mean attention each token receives, from a map that a host has computed anyway.

    Args:
        attention: Probabilities after softmax, rows are queries (B, H, N, N).
        valid_BN: False where a token is padding (B, N).

    Returns:
        Importance (B, N), without a gradient.
    """
    attention = attention.detach()
    attention = attention.to(_accumulator(attention))
    if valid_BN is None:
        return attention.mean(dim=(1, 2))
    attention = torch.where(valid_BN[:, None, :, None], attention, 0.0)
    return attention.sum(dim=(1, 2)) / (attention.shape[1] * valid_BN.sum(dim=1, keepdim=True).clamp(min=1))


def _accumulator(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _mean(total_BN: Tensor, q_BHNE: Tensor, valid_BN: Tensor | None) -> Tensor:
    """Return column sums as a mean over heads and queries."""
    queries = q_BHNE.shape[2] if valid_BN is None else valid_BN.sum(dim=1, keepdim=True).clamp(min=1)
    return total_BN / (q_BHNE.shape[1] * queries)


def _tiles(images: int, heads: int, tokens: int, elements: int, is_causal: bool) -> Iterator[Tile]:
    """Cut rows of probabilities into pieces: whole images where they fit, else heads of one, else queries of one."""
    rows = min(tokens, CAUSAL_QUERIES) if is_causal else tokens
    steps = [max(1, elements // max(1, size)) for size in (heads * rows * tokens, rows * tokens, tokens)]
    rows = min(rows, steps[2])
    for image in range(0, images, steps[0]):
        for head in range(0, heads, steps[1]):
            for query in range(0, tokens, max(1, rows)):
                # Slices that end past the end are cut off by indexing.
                whole = slice(image, image + steps[0]), slice(head, head + steps[1])
                yield *whole, slice(query, min(query + rows, tokens))


def is_grouped(q: Tensor, k: Tensor) -> bool:
    """Return whether several heads of queries share one of keys; heads are the second axis."""
    # A choice between two, because a graph with symbolic shapes would pass a symbol on where a bool is needed.
    return True if q.shape[1] != k.shape[1] else False  # noqa: SIM210


def _keys(q_BHNE: Tensor, k_BHNE: Tensor) -> Tensor:
    """Return the keys of every head."""
    return k_BHNE.repeat_interleave(q_BHNE.shape[1] // k_BHNE.shape[1], dim=1) if is_grouped(q_BHNE, k_BHNE) else k_BHNE


def _received(
    q_BHNE: Tensor,
    k_BHNE: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    valid_BN: Tensor | None,
    tile: Tile,
) -> Tensor:
    """Return the attention that keys receive from one piece of the rows, summed (images of the piece, keys seen)."""
    images, heads, queries = tile
    keys = slice(queries.stop) if is_causal else slice(None)
    score = (q_BHNE[images, heads, queries] * scale) @ k_BHNE[images, heads, keys].transpose(-2, -1)
    score = _masked(score.to(_accumulator(score)), mask, is_causal, (*tile, keys))
    attention = torch.softmax(score, dim=-1)
    if valid_BN is not None:
        attention = attention.masked_fill_(~valid_BN[images, None, queries, None], 0.0)
    return attention.sum(dim=(1, 2))


def _received_by_tiles(
    q_BHNE: Tensor,
    k_BHNE: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    valid_BN: Tensor | None,
    chunk_elements: int,
) -> Tensor:
    images, heads, tokens, _ = q_BHNE.shape
    k_BHNE = _keys(q_BHNE, k_BHNE)
    total_BN = torch.zeros(images, tokens, dtype=_accumulator(q_BHNE), device=q_BHNE.device)
    for tile in _tiles(images, heads, tokens, chunk_elements, is_causal):
        received = _received(q_BHNE, k_BHNE, mask, is_causal, scale, valid_BN, tile)
        total_BN[tile[0], : received.shape[1]] += received
    return total_BN


def _masked(score: Tensor, mask: Tensor | None, is_causal: bool, part: tuple[slice, ...]) -> Tensor:
    """Hide pairs in the scores of some images, heads, queries and keys; the scores are written over."""
    if is_causal:
        _hide_later(score)
    if mask is None:
        return score
    mask = mask[(None,) * (4 - mask.ndim)]
    # An axis of one entry serves all of the piece's.
    mask = mask[tuple(some if size > 1 else slice(None) for some, size in zip(part, mask.shape))]
    if mask.dtype == torch.bool:
        return score.masked_fill_(~mask, -torch.inf)
    return score + mask


def _hide_later(score: Tensor) -> None:
    """Hide the keys behind each query from it, where the last key is the last query's own."""
    queries = score.shape[-2]
    later = torch.ones(queries, queries, dtype=torch.bool, device=score.device).triu(1)
    score[..., -queries:].masked_fill_(later, -torch.inf)


def _shares_probabilities(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether computing the map once for output and importance beats fused attention and a second pass.

    Measured on two CPU threads, ViT-S, fp32: at N = 197 it adds 1 to 2 % to a block against 7 % for the second pass,
    at N = 1025 6 to 7 % against 27 %.
    """
    alike = q.shape[2:] == k.shape[2:] == v.shape[2:]
    return q.device.type == "cpu" and q.dtype == torch.float32 and alike and not exporting()


def _shared_probabilities(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    keeps_lse = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if torch.compiler.is_compiling():
        out, total_BN, _ = shared_attention(q, k, v, scale, keeps_lse, is_causal)
    elif keeps_lse:
        out, total_BN, _ = _SharedAttention.apply(q, k, v, scale, is_causal)
    else:
        out, total_BN, _ = _attend_by_tiles(q, k, v, scale, keeps_lse, is_causal)
    return out, _mean(total_BN.detach(), q, None)


def _attend_by_tiles(
    q: Tensor, k: Tensor, v: Tensor, scale: float, keeps_lse: bool, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    images, heads, tokens, width = q.shape
    out, total_BN, lse = _empty_shared(q, keeps_lse)
    total_BN.zero_()
    room = torch.empty(min(max(CHUNK_ELEMENTS, tokens), images * heads * tokens * tokens))
    for tile in _tiles(images, heads, tokens, CHUNK_ELEMENTS, is_causal):
        seen = tile[2].stop if is_causal else tokens
        some, whole = q[tile], (*tile[:2], slice(seen))
        rows = some.reshape(-1, some.shape[2], width)
        attention = room[: rows.shape[0] * rows.shape[1] * seen].view(*rows.shape[:2], seen)
        keys = k[whole].reshape(-1, seen, width).transpose(1, 2)
        torch.baddbmm(attention, rows, keys, beta=0, alpha=scale, out=attention)
        if is_causal:
            _hide_later(attention)
        top = attention.amax(dim=-1) if keeps_lse else None
        torch.softmax(attention, dim=-1, out=attention)
        if top is not None:
            # The largest probability of a row is exp(its score - log-sum-exp), and never underflows.
            lse[tile] = (top - attention.amax(dim=-1).log()).view(some.shape[:3])
        out[tile] = torch.bmm(attention, v[whole].reshape(-1, seen, width)).view(some.shape)
        total_BN[tile[0], :seen] += attention.view(some.shape[0], -1, seen).sum(dim=1)
    return out, total_BN, lse


def _empty_shared(q: Tensor, keeps_lse: bool) -> tuple[Tensor, Tensor, Tensor]:
    images, heads, tokens, width = q.shape
    # Channels-last like fused attention's own result, so that the host's transpose and reshape stay free.
    out = q.new_empty(images, tokens, heads, width).transpose(1, 2)
    return out, q.new_empty(images, tokens), q.new_empty((images, heads, tokens) if keeps_lse else (0,))


@torch.library.custom_op("mmod::shared_attention", mutates_args=())
def shared_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, keeps_lse: bool, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend, sum the map's columns, and keep what the gradient needs; the map exists in pieces only.

    Args:
        q: Queries (B, H, N, E), fp32, on a CPU.
        k: Keys, of the same shape.
        v: Values, of the same shape.
        scale: Factor of the products.
        keeps_lse: A gradient will be asked for.
        is_causal: A query sees keys up to its own position.

    Returns:
        The output (B, H, N, E), column sums over heads and queries (B, N), and each row's log-sum-exp (B, H, N), empty
        without `keeps_lse`. The gradient is that of the output alone.
    """
    return _attend_by_tiles(q, k, v, scale, keeps_lse, is_causal)


@shared_attention.register_fake
def _(q, k, v, scale, keeps_lse, is_causal):  # type: ignore[no-untyped-def]
    register_flops()
    return _empty_shared(q, keeps_lse)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, ctx.scale, _, ctx.is_causal = inputs
    ctx.save_for_backward(q, k, v, output[0], output[2])


def _backward(ctx: Any, grad_out: Tensor, *unused: Tensor | None) -> tuple[Tensor | None, ...]:
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return (*backward(grad_out, *ctx.saved_tensors, 0.0, ctx.is_causal, scale=ctx.scale), None, None, None)


shared_attention.register_autograd(_backward, setup_context=_save)


class _SharedAttention(torch.autograd.Function):
    """The same outside compiled graphs, where torch's FLOP counter sees the products inside it."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> tuple[Tensor, Tensor, Tensor]:
        return _attend_by_tiles(q, k, v, scale, True, is_causal)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        _save(ctx, (*inputs[:4], True, inputs[4]), output)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, *unused: Tensor | None) -> tuple[Tensor | None, ...]:
        return _backward(ctx, grad_out, *unused)[:5]


@torch.library.custom_op("mmod::received_attention", mutates_args=())
def received_attention(
    q_BHNE: Tensor,
    k_BHNE: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    valid_BN: Tensor | None,
    chunk_elements: int,
) -> Tensor:
    """Return the attention each key receives, summed over heads and queries; see `attention_importance`.

    Args:
        q_BHNE: As there.
        k_BHNE: As there.
        mask: As there.
        is_causal: As there.
        scale: As there.
        valid_BN: As there.
        chunk_elements: As there.
    """
    return _received_by_tiles(q_BHNE, k_BHNE, mask, is_causal, scale, valid_BN, chunk_elements)


@received_attention.register_fake
def _(q_BHNE, *rest):  # type: ignore[no-untyped-def]
    register_flops()
    return q_BHNE.new_empty(q_BHNE.shape[0], q_BHNE.shape[2], dtype=_accumulator(q_BHNE))


@functools.cache
def register_flops() -> None:
    """Tell torch's FLOP counter what these ops cost; when a graph first has them, since importing it imports Triton."""
    from torch.utils.flop_counter import register_flop_formula

    def scores(q_shape, *rest, **kwargs):  # type: ignore[no-untyped-def]
        images, heads, tokens, width = q_shape
        return 2 * images * heads * tokens * tokens * width

    register_flop_formula(torch.ops.mmod.received_attention)(scores)
    register_flop_formula(torch.ops.mmod.shared_attention)(lambda *args, **kwargs: 2 * scores(*args, **kwargs))


def _with_kernels(
    q_BHNE: Tensor,
    k_BHNE: Tensor,
    v_BHNE: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    valid_BN: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attend by the fastest kernel that also returns the rows' log-sum-exp, then sum the map's columns."""
    from mmod.ops.triton.importance import attend_batch, column_sums

    scale = 1 / math.sqrt(q_BHNE.shape[-1]) if scale is None else scale
    seen_BN = None if mask is None else mask[:, 0, 0].expand(q_BHNE.shape[0], -1)
    out, lse_BHN = attend_batch(q_BHNE, k_BHNE, v_BHNE, seen_BN, is_causal, scale)
    rows = (x.detach() for x in (q_BHNE, k_BHNE, lse_BHN))
    return out, _mean(column_sums(*rows, valid_BN, seen_BN, is_causal, scale), q_BHNE, valid_BN)
