"""Packed rows: the kept tokens of a whole batch in one sequence, without padding.

Only attention knows where one image ends and the next begins.
Axes: B images, K slots per image, T packed rows, H heads, E channels of a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mmod.ops.seam import AttentionSeam


class Packing(NamedTuple):
    """Where packed rows come from.

    Args:
        row_T: Their place among all tokens of the batch, image by image (T).
        slot_T: Their place among all slots of the batch (T).
        valid_BK: False where a slot is empty (B, K).
    """

    row_T: Tensor
    slot_T: Tensor
    valid_BK: Tensor


def pack_rows(index_BK: Tensor, valid_BK: Tensor, total: int, tokens: int) -> Packing:
    """Lay the valid slots of a batch out one after the other, without a synchronisation.

    Args:
        index_BK: Kept tokens (B, K).
        valid_BK: False where a slot is empty (B, K).
        total: Number of valid slots T.
        tokens: All tokens N of an image.

    Example:
        >>> index, valid = torch.tensor([[0, 2], [1, 0]]), torch.tensor([[True, True], [True, False]])
        >>> pack_rows(index, valid, total=3, tokens=4).row_T.tolist()
        [0, 2, 5]
    """
    slot_T = torch.nonzero_static(valid_BK.flatten(), size=total).squeeze(1)
    first_B1 = torch.arange(index_BK.shape[0], device=index_BK.device).unsqueeze(1) * tokens
    return Packing((index_BK + first_B1).flatten()[slot_T], slot_T, valid_BK)


def packed_attention(
    q_HTE: Tensor,
    k_HTE: Tensor,
    v_HTE: Tensor,
    packing: Packing,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Attend within each image of a packed sequence.

    Rows are padded for attention alone, which is 4 to 15 % of a block's work; projections and MLP see no padding.

    Args:
        q_HTE: Queries (H, T, E).
        k_HTE: Keys (H, T, E).
        v_HTE: Values (H, T, E).
        packing: Which rows belong together.
        dropout: Share of probabilities dropped.
        scale: Factor of the products; None means 1 / sqrt(E).

    Returns:
        The output (H, T, E).

    Example:
        >>> q, k, v = torch.randn(3, 2, 3, 8)
        >>> packing = pack_rows(torch.tensor([[0, 1], [0, 1]]), torch.tensor([[True, True], [True, False]]), 3, 4)
        >>> out = packed_attention(q, k, v, packing)
        >>> bool(torch.allclose(out[:, 2], v[:, 2], atol=1e-6))
        True
    """
    images, slots = packing.valid_BK.shape
    heads = q_HTE.shape[0]

    def pad(x_HTE: Tensor) -> Tensor:
        empty = x_HTE.new_zeros(heads, images * slots, x_HTE.shape[-1])
        return empty.index_copy(1, packing.slot_T, x_HTE).unflatten(1, (images, slots)).transpose(0, 1)

    # An image that keeps nothing still needs a key: a softmax over nothing is NaN.
    seen_BK = packing.valid_BK | (torch.arange(slots, device=q_HTE.device) == 0)
    out_BHKE = F.scaled_dot_product_attention(
        pad(q_HTE), pad(k_HTE), pad(v_HTE), attn_mask=seen_BK[:, None, None, :], dropout_p=dropout, scale=scale
    )
    return out_BHKE.transpose(0, 1).flatten(1, 2).index_select(1, packing.slot_T)


class attend_within(AttentionSeam):
    """Context manager in which `scaled_dot_product_attention` over a packed sequence stays within its images.

    Args:
        packing: Which rows belong together.

    Attributes:
        calls: Number of attention calls seen.
    """

    def __init__(self, packing: Packing) -> None:
        super().__init__()
        self.packing = packing
        self.calls = 0

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attend within images."""
        if attn_mask is not None or is_causal or enable_gqa or query.shape[0] != 1:
            raise RuntimeError("packed rows take plain attention over one sequence: no mask, no grouped queries")
        self.calls += 1
        return packed_attention(query[0], key[0], value[0], self.packing, dropout=dropout_p, scale=scale)[None]
