"""Importance: the attention a token receives, without storing the N x N map.

Axes: B images, H heads, N tokens, E channels of a head.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mmod.ops import tiles
from mmod.ops.backend import Kernel, exporting, kernel_op, op, torch_op, transforming
from mmod.ops.casting import cast_alike, is_grouped
from mmod.ops.intercept import SDPA
from mmod.ops.shared_map import attend_and_sum, flops_of_scores
from mmod.ops.tiles import Tile, cut_map, hide_later
from mmod.ops.views import Views, count_views

# Channels of a head that kernels take at most.
_WIDEST = 128


def attention_importance(
    q_BHNE: Tensor,
    k_BHNE: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    valid_BN: Tensor | None = None,
    per_viewer: bool = False,
) -> Tensor:
    """Return the mean attention each token receives, over heads and queries, without a gradient.

    The map is computed in tiles of images, heads and queries, so memory grows linearly with N, in compiled graphs too.
    Exported graphs compute it at once, because a number of tiles would make their shapes static. So do `torch.func`
    transforms, which do not support the in-place sum over tiles.

    Args:
        q_BHNE: Queries (B, H, N, E).
        k_BHNE: Keys (B, H, N, E); with grouped queries, their number of heads is a divisor of H.
        mask: True where a pair may attend, or a bias to add, broadcastable to (B, H, N, N).
        is_causal: A query sees keys up to its own position.
        scale: Factor of the products; None means 1 / sqrt(E).
        valid_BN: False where a token is padding: its query is not counted (B, N).
        per_viewer: Average over the queries that can see a token, weighted by the number of keys that they see. Causal
            attention then does not rank tokens by position. Equal to the plain mean if all queries see the same keys.

    Returns:
        Importance (B, N), fp32 or better; the plain mean sums to 1 over the tokens of an image.

    Source: A-MoD, Gadhikar et al., arXiv 2412.20875 (mean over heads and queries of the preceding layer's map).

    Example:
        >>> q = k = torch.zeros(1, 2, 4, 8)
        >>> attention_importance(q, k)
        tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """
    if scale is None:
        scale = 1 / math.sqrt(q_BHNE.shape[-1])
    _, heads, tokens, _ = q_BHNE.shape
    with torch.no_grad():
        views = None
        if per_viewer:
            views = count_views(mask, is_causal, tokens, valid_BN, q_BHNE.device)
        # One operation in a graph, in place of a loop over tiles.
        if torch.compiler.is_compiling() and not exporting():
            # An operation takes tensors and no tuples of them.
            counts = (None, None) if views is None else views
            total_BN = received_attention(q_BHNE, k_BHNE, mask, is_causal, scale, valid_BN, *counts)
        else:
            attention = _Map(q_BHNE, _keys(q_BHNE, k_BHNE), mask, is_causal, scale, valid_BN, views)
            if exporting() or transforming():
                # One tile for all: an export and a transform could not cut by lengths that they do not know.
                total_BN = attention.received((slice(None), slice(None), slice(None)))
            else:
                total_BN = attention.received_by_tiles()
        return _mean(total_BN, heads, tokens, valid_BN)


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
    per_viewer: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return attention's output, and the mean attention each token receives.

    The output equals `scaled_dot_product_attention`'s and carries its gradient. Importance has no gradient and is
    computed before dropout. On a CPU, plain fp32 attention computes the probabilities once for both, in tiles. GPU
    kernels store the rows' log-sum-exp and sum the map's columns in a second pass.

    Args:
        v_BHNE: Values, like keys; other arguments are those of `attention_importance`.
        dropout: Share of probabilities dropped in the output.

    Returns:
        The output (B, H, N, E) and importance (B, N).

    Raises:
        ValueError: A forced backend does not support these inputs, or their dtypes differ outside autocast.

    Example:
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8)
        >>> out, importance = attention_with_importance(q, k, v)
        >>> bool(torch.allclose(importance.sum(), torch.tensor(1.0)))
        True
    """
    q_BHNE, k_BHNE, v_BHNE = cast_alike(q_BHNE, k_BHNE, v_BHNE)
    if scale is None:
        scale = 1 / math.sqrt(q_BHNE.shape[-1])
    return _attend(q_BHNE, k_BHNE, v_BHNE, mask, dropout, is_causal, scale, valid_BN, per_viewer)


def _alike(q_BHNE: Tensor, k_BHNE: Tensor, v_BHNE: Tensor) -> bool:
    """Return whether queries, keys and values have one length and width; a plain bool, see `is_grouped`."""
    return True if q_BHNE.shape[2:] == k_BHNE.shape[2:] == v_BHNE.shape[2:] else False  # noqa: SIM210


def class_token_importance(
    q_BHNE: Tensor, k_BHNE: Tensor, mask: Tensor | None = None, *, scale: float | None = None
) -> Tensor:
    """Return the attention of the first token to all tokens, averaged over heads, with its gradient.

    The arguments are those of `attention_importance`; the result (B, N) sums to 1 over the tokens of an image.

    Source: EViT, Liang et al., arXiv 2202.07800, section 3.2.

    Example:
        >>> q = torch.tensor([1.0, 0.0]).view(1, 1, 2, 1)
        >>> class_token_importance(q, 5 * q)
        tensor([[0.9933, 0.0067]])
    """
    if scale is None:
        scale = 1 / math.sqrt(q_BHNE.shape[-1])
    # The query is scaled rather than the scores, which are many more.
    score_BH1N = (q_BHNE[:, :, :1] * scale) @ _keys(q_BHNE, k_BHNE).transpose(-2, -1)
    # A softmax in half precision would round small shares to equal ones, and ties go by position.
    score_BH1N = score_BH1N.to(_accumulator(score_BH1N))
    if mask is not None:
        if mask.ndim > 1:
            # The row of the first token.
            mask = mask[..., :1, :]
        if mask.dtype == torch.bool:
            score_BH1N = score_BH1N.masked_fill(~mask, -torch.inf)
        else:
            score_BH1N = score_BH1N + mask
    return score_BH1N.softmax(dim=-1).mean(dim=1)[:, 0]


def importance_of_map(attention: Tensor, valid_BN: Tensor | None = None, views: Views | None = None) -> Tensor:
    """Return the mean attention each token receives (B, N), from a map that the host computed, without a gradient.

    Args:
        attention: Probabilities after softmax, rows are queries (B, H, N, N).
        valid_BN: False where a token is padding (B, N).
        views: Visibility counts for importance per viewer; None takes the plain mean.
    """
    attention = attention.detach()
    attention = attention.to(_accumulator(attention))
    if valid_BN is not None:
        # Queries of padding attend too, and do not count.
        attention = torch.where(valid_BN[:, None, :, None], attention, 0.0)
    return _mean(_column_sums(attention, views), attention.shape[1], attention.shape[2], valid_BN)


def _accumulator(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _mean(total_BN: Tensor, heads: int, queries: int, valid_BN: Tensor | None) -> Tensor:
    """Return column sums as a mean over heads and queries."""
    if valid_BN is None:
        return total_BN / (heads * queries)
    counted_B1 = valid_BN.sum(dim=1, keepdim=True).clamp(min=1)
    return total_BN / (heads * counted_B1)


def _column_sums(attention: Tensor, views: Views | None) -> Tensor:
    """Return what the keys of a map (B, H, queries, keys) receive, per viewer where counts are passed."""
    if views is None:
        return attention.sum(dim=(1, 2))
    # The product weighs rows by the keys that they see and adds them up at once, without a weighted copy of the map.
    received = views.keys_BHN.to(attention.dtype).unsqueeze(-2) @ attention
    return (received.squeeze(-2) / views.viewers_BHN).sum(dim=1)


def _keys(q_BHNE: Tensor, k_BHNE: Tensor) -> Tensor:
    """Return the keys of every head."""
    if not is_grouped(q_BHNE, k_BHNE):
        return k_BHNE
    return k_BHNE.repeat_interleave(q_BHNE.shape[1] // k_BHNE.shape[1], dim=1)


class _Map(NamedTuple):
    """An attention map whose columns are summed; the keys are those of every head."""

    q_BHNE: Tensor
    k_BHNE: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float
    valid_BN: Tensor | None
    views: Views | None

    def received(self, tile: Tile) -> Tensor:
        """Return the attention that keys receive from one tile of rows, summed (images of the tile, visible keys)."""
        images, heads, queries = tile
        # No query of the tile sees later keys, so that half of a causal map is never computed.
        keys = slice(queries.stop if self.is_causal else None)
        query = self.q_BHNE[images, heads, queries] * self.scale
        score = query @ self.k_BHNE[images, heads, keys].transpose(-2, -1)
        score = _masked(score.to(_accumulator(score)), self.mask, self.is_causal, (*tile, keys))
        attention = torch.softmax(score, dim=-1)
        views = self.views
        if self.valid_BN is not None:
            attention = attention.masked_fill_(~self.valid_BN[images, None, queries, None], 0.0)
        if views is not None:
            views = Views(_slice(views.keys_BHN, tile), _slice(views.viewers_BHN, (images, heads, keys)))
        return _column_sums(attention, views)

    def received_by_tiles(self) -> Tensor:
        """Return the attention that keys receive from all rows (B, N)."""
        elements = tiles.CHUNK_ELEMENTS
        if self.q_BHNE.is_cuda:
            elements = tiles.GPU_CHUNK_ELEMENTS
        images, heads, tokens, _ = self.q_BHNE.shape
        total_BN = torch.zeros(images, tokens, dtype=_accumulator(self.q_BHNE), device=self.q_BHNE.device)
        for tile in cut_map(images, heads, tokens, tokens, elements, self.is_causal):
            received = self.received(tile)
            # A causal tile returns sums of the keys that it sees alone.
            total_BN[tile[0], : received.shape[1]] += received
        return total_BN


def _slice(values: Tensor, slices: tuple[slice, ...]) -> Tensor:
    """Slice the leading axes; an axis of size 1 is broadcast."""
    axes = []
    for axis, size in zip(slices, values.shape):
        if size <= 1:
            axis = slice(None)
        axes.append(axis)
    return values[tuple(axes)]


def _masked(score: Tensor, mask: Tensor | None, is_causal: bool, slices: tuple[slice, ...]) -> Tensor:
    """Mask the scores of a tile (images, heads, queries, keys), in place where possible."""
    if is_causal:
        hide_later(score)
    if mask is None:
        return score
    mask = _slice(mask[(None,) * (4 - mask.ndim)], slices)
    if mask.dtype == torch.bool:
        return score.masked_fill_(~mask, -torch.inf)
    return score + mask


def _received_by_tiles(
    q_BHNE: Tensor,
    k_BHNE: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    valid_BN: Tensor | None,
    keys_BHN: Tensor | None,
    viewers_BHN: Tensor | None,
) -> Tensor:
    views = None
    if keys_BHN is not None and viewers_BHN is not None:
        views = Views(keys_BHN, viewers_BHN)
    attention = _Map(q_BHNE, _keys(q_BHNE, k_BHNE), mask, is_causal, scale, valid_BN, views)
    return attention.received_by_tiles()


# The attention each key receives, summed over heads and queries (B, N). The arguments are those of
# `attention_importance`, with the fields of its `Views`, or None for the plain mean.
received_attention = torch_op(
    "received_attention",
    "(Tensor q, Tensor k, Tensor? mask, bool is_causal, float scale, Tensor? valid, Tensor? keys, "
    "Tensor? viewers) -> Tensor",
    _received_by_tiles,
    lambda q, *_: q.new_empty(q.shape[0], q.shape[2], dtype=_accumulator(q)),
    flops=flops_of_scores,
)
column_sums = kernel_op(
    "importance.column_sums",
    "(Tensor q, Tensor k, Tensor lse, Tensor? valid_q, Tensor? valid_k, bool is_causal, float scale) -> Tensor",
    lambda q, *_: q.new_empty(q.shape[0], q.shape[2], dtype=torch.float32),
    flops=flops_of_scores,
)


def _with_kernels(
    q_BHNE: Tensor,
    k_BHNE: Tensor,
    v_BHNE: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float,
    valid_BN: Tensor | None,
    per_viewer: bool,
    fused: bool,
) -> tuple[Tensor, Tensor]:
    """Attend by a kernel that also returns the rows' log-sum-exp, then sum the map's columns."""
    from mmod.ops.triton.importance import attend_batch, attend_fused

    _, heads, tokens, _ = q_BHNE.shape
    visible_BN = None
    if mask is not None:
        # A mask of keys is the same for all heads and queries, see `_fits_own`.
        visible_BN = mask[:, 0, 0].expand(q_BHNE.shape[0], -1)
    if fused:
        out, lse_BHN = attend_fused(q_BHNE, k_BHNE, v_BHNE, is_causal, scale)
    else:
        out, lse_BHN = attend_batch(q_BHNE, k_BHNE, v_BHNE, visible_BN, is_causal, scale)
    q_BHNE = q_BHNE.detach()
    k_BHNE = k_BHNE.detach()
    lse_BHN = lse_BHN.detach()
    views = None
    if per_viewer:
        views = count_views(mask, is_causal, tokens, valid_BN, q_BHNE.device)
    if views is not None:
        # A probability is exp(score - log-sum-exp): subtracting log(w) from log-sum-exp weighs the row by w. Torch's
        # kernel pads the rows.
        lse_BHN = lse_BHN[..., :tokens] - views.keys_BHN.log()
    total_BN = column_sums(q_BHNE, k_BHNE, lse_BHN, valid_BN, visible_BN, is_causal, scale)
    if views is not None:
        total_BN = total_BN / views.viewers_BHN[:, 0]
    return out, _mean(total_BN, heads, tokens, valid_BN)


def _fits_fused(
    q_BHNE: Tensor, k_BHNE: Tensor, v_BHNE: Tensor, mask: Tensor | None, dropout: float, *_: object
) -> bool:
    """Return whether torch's fused attention on a GPU takes these inputs, and the kernel that sums columns."""
    width = q_BHNE.shape[-1]
    fits = q_BHNE.is_cuda and width <= _WIDEST and width % 8 == 0
    alike = _alike(q_BHNE, k_BHNE, v_BHNE) and not is_grouped(q_BHNE, k_BHNE)
    return fits and alike and mask is None and not dropout


def _fits_own(q_BHNE: Tensor, k_BHNE: Tensor, v_BHNE: Tensor, mask: Tensor | None, dropout: float, *_: object) -> bool:
    """Return whether our own kernel of attention takes these inputs."""
    of_pairs = False
    if mask is not None:
        of_pairs = mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[1:3] != (1, 1)
    fits = q_BHNE.shape[-1] <= _WIDEST and _alike(q_BHNE, k_BHNE, v_BHNE)
    return fits and not dropout and not of_pairs


def _with_shared_map(
    q_BHNE: Tensor, k_BHNE: Tensor, v_BHNE: Tensor, is_causal: bool, scale: float, per_viewer: bool
) -> tuple[Tensor, Tensor]:
    _, heads, tokens, _ = q_BHNE.shape
    views = None
    if per_viewer:
        views = count_views(None, is_causal, tokens, None, q_BHNE.device)
    weight_N = None
    if views is not None:
        # Without a mask, all images and heads see the same keys.
        weight_N = views.keys_BHN[0, 0].to(q_BHNE.dtype)
    out, total_BN = attend_and_sum(q_BHNE, _keys(q_BHNE, k_BHNE), _keys(q_BHNE, v_BHNE), is_causal, scale, weight_N)
    if views is not None:
        total_BN = total_BN / views.viewers_BHN[:, 0]
    return out, _mean(total_BN, heads, tokens, None)


_kernel = partial(Kernel, why="not yet measured; reason: probabilities stay on chip")


@op(
    _kernel(
        partial(_with_kernels, fused=True),
        "torch's fused attention, which returns log-sum-exps, and a kernel that sums columns",
        takes=_fits_fused,
        where="a GPU, head_dim <= 128 and divisible by 8, keys and values like queries, no mask, no dropout",
    ),
    _kernel(
        partial(_with_kernels, fused=False),
        "a kernel that attends, and one that sums columns",
        takes=_fits_own,
        where="head_dim <= 128, keys and values of the queries' length and width, no mask of pairs, no dropout",
    ),
    how="fused attention, and the map again in tiles; on a CPU in fp32 one map in tiles for output and importance",
    name="attention_with_importance",
)
def _attend(
    q_BHNE: Tensor,
    k_BHNE: Tensor,
    v_BHNE: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float,
    valid_BN: Tensor | None,
    per_viewer: bool,
) -> tuple[Tensor, Tensor]:
    # Measured on two CPU threads, ViT-S, fp32: at N = 197 a shared map adds 1 to 2 % to a block, a second pass 7 %; at
    # N = 1025 6 to 7 % and 27 %.
    plain = mask is None and valid_BN is None and not dropout and _alike(q_BHNE, k_BHNE, v_BHNE)
    in_place = q_BHNE.is_cpu and not exporting() and not transforming()
    # Its gradient is that of torch's fused attention, which has no second derivative, and can be turned off.
    fuses = torch.compiler.is_compiling() or torch.backends.cuda.flash_sdp_enabled()
    if plain and in_place and fuses and q_BHNE.dtype == torch.float32:
        return _with_shared_map(q_BHNE, k_BHNE, v_BHNE, is_causal, scale, per_viewer)
    out = SDPA(
        q_BHNE,
        k_BHNE,
        v_BHNE,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=is_grouped(q_BHNE, k_BHNE),
    )
    return out, attention_importance(
        q_BHNE, k_BHNE, mask, is_causal=is_causal, scale=scale, valid_BN=valid_BN, per_viewer=per_viewer
    )
