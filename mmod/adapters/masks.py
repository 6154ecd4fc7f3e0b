"""Masks, biases and rotary embeddings of kept tokens.

Axes: B images, N tokens, K slots per image, T packed rows, H heads, E channels of an embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmod.ops import gather_rows
from mmod.ops.views import mask_bias


def narrow_queries(bias: Tensor, index_BK: Tensor, tokens: int) -> Tensor:
    """Return the rows (B, H or 1, K or 1, N) of kept queries.

    Args:
        bias: Mask or bias of shape (N, N), (H, N, N), (B, 1, N) or (B or 1, H or 1, N or 1, N).
    """
    if bias.shape[-1] != tokens or bias.shape[-2] not in (1, tokens) or bias.ndim > 4:
        raise ValueError(
            f"cannot narrow a mask of shape {tuple(bias.shape)} for {tokens} tokens; valid are (N, N), (H, N, N), "
            "(B, 1, N), (B, H, N, N) and (B, 1, 1, N)"
        )
    if bias.ndim == 3 and bias.shape[1] == 1 < tokens:
        # A mask of keys for each image.
        bias = bias.unsqueeze(1)
    bias = bias[(None,) * (4 - bias.ndim)].expand(index_BK.shape[0], -1, -1, -1)
    if bias.shape[2] == 1 and tokens > 1:
        return bias
    return query_rows(bias, index_BK)


def query_rows(mask: Tensor, index_BK: Tensor) -> Tensor:
    """Return some rows (B, H, K, L) of a mask (1 or B, H, N, L)."""
    rows = index_BK[:, None, :, None].expand(-1, mask.shape[1], -1, mask.shape[3])
    return mask.expand(index_BK.shape[0], -1, -1, -1).gather(2, rows)


def key_columns(mask: Tensor, index_BL: Tensor) -> Tensor:
    """Return some columns (B, H, K, L) of a mask (B, H, K, N)."""
    return mask.gather(3, index_BL[:, None, None, :].expand(-1, *mask.shape[1:3], -1))


def show_all_keys(mask: Tensor, valid_BK: Tensor) -> Tensor:
    """Let queries of empty slots, whose output is unused, see every key: a softmax over no keys is NaN."""
    unread = ~valid_BK[:, None, :, None]
    if mask.dtype == torch.bool:
        return mask | unread
    return mask.masked_fill(unread, 0.0)


def narrow_pairs(bias: Tensor, index_BK: Tensor, tokens: int) -> Tensor:
    """Return the rows and columns of kept tokens, of a mask or bias as in `narrow_queries`."""
    return key_columns(narrow_queries(bias, index_BK, tokens), index_BK)


def narrow_batch(rows: Tensor, index_BK: Tensor, prefix: int = 0) -> Tensor:
    """Return the rows of kept tokens (B, K, ...) of rows (B or 1, N - prefix, ...)."""
    position_BK = index_BK[:, prefix:] - prefix if prefix else index_BK
    if rows.shape[0] == 1:
        # One look-up for all images: their rows are the same.
        return rows[0].index_select(0, position_BK.flatten()).unflatten(0, position_BK.shape)
    if rows.ndim == 3:
        return gather_rows(rows, position_BK)
    position = position_BK.view(*position_BK.shape, *(1,) * (rows.ndim - 2))
    return rows.gather(1, position.expand(-1, -1, *rows.shape[2:]))


def pack_batch(rows: Tensor, row_T: Tensor, tokens: int) -> Tensor:
    """Return the rows (1, T, ...) of packed tokens, of rows (B or 1, N, ...) that images may share."""
    position_T = row_T if rows.shape[0] > 1 else row_T % tokens
    return rows.flatten(0, 1).index_select(0, position_T).unsqueeze(0)


def with_prefix(rope: Tensor, prefix: int) -> Tensor:
    """Return rotary embeddings (B or 1, N, H or 1, E) in which prefix tokens in front have the identity.

    Sines, which are 0 then, come before cosines, which are 1.
    """
    channels = rope.shape[-1]
    identity = (torch.arange(channels, device=rope.device) >= channels // 2).to(rope.dtype)
    return torch.cat([identity.expand(rope.shape[0], prefix, rope.shape[2], -1), rope], dim=1)


def hide_empty_slots(mask: Tensor | None, valid_BK: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask that hides empty slots.

    Every query keeps at least one key: a softmax over no keys is NaN, which would spread to the gradients of kept
    tokens. Outputs of empty slots are discarded.

    Args:
        mask: Mask or bias over pairs of slots (B, H or 1, K or 1, K), or None.
    """
    if valid_BK is None:
        return mask
    first_K = torch.arange(valid_BK.shape[1], device=valid_BK.device) == 0
    lowest = torch.finfo(dtype).min
    bias = torch.zeros(valid_BK.shape, dtype=dtype, device=valid_BK.device)
    bias = bias.masked_fill(~(valid_BK | first_K), lowest)[:, None, None, :]
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        pairs = mask_bias(mask, lowest, dtype)
    else:
        pairs = mask.to(dtype)
    if pairs.shape[2] > 1:
        # An empty slot may be padding, whose row may be masked completely.
        pairs = show_all_keys(pairs, valid_BK)
    # Halves, because two lowest values add up to -inf, and a row of these has a softmax of NaN.
    return torch.maximum(pairs, torch.full_like(pairs, lowest / 2)) + bias / 2


def weigh_groups(mask: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask to which the logarithms of the tokens per slot (B, 1, 1, K) are added; None leaves it unchanged.

    Source: proportional attention of ToMe, Bolya et al., arXiv 2210.09461, Eq. 1.
    """
    if bias is None:
        return mask
    # As one more channel of queries and keys, sizes would need no mask. Over plain attention of ViT-S on one CPU thread
    # that takes 1.10 to 1.28 of the time, a bias of keys 1.02 to 1.04 (118 and 1,000 rows, batch 1 and 8).
    bias = bias.to(dtype)
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        # Half of the lowest value leaves room for the logarithms.
        mask = mask_bias(mask, torch.finfo(dtype).min / 2, dtype)
    return bias + mask


def add_causal(mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return a mask that also hides later slots."""
    assert mask is not None
    slots = mask.shape[-1]
    later = torch.ones(slots, slots, dtype=torch.bool, device=mask.device).triu(1)
    return mask.masked_fill(later, torch.finfo(dtype).min)
