"""Visibility counts, which make importance comparable where queries see different keys.

In causal attention every query sees the first token, and only the last query sees the last one. A query that sees few
keys gives each of them much attention. A plain column mean therefore ranks tokens by position. The correction weighs
each query's row by the number of keys it sees, and divides the column sum by the number of queries that see the key.
Uniform attention then gives every token the same importance.
Axes: B images, H heads, N tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Views(NamedTuple):
    """Number of keys that each query sees, and of queries that see each key; an axis of size 1 is broadcast.

    Args:
        keys_BHN: Keys that a query sees (B or 1, H or 1, N).
        viewers_BHN: Queries that see a key, without padding, at least 1 (B or 1, H or 1, N).
    """

    keys_BHN: Tensor
    viewers_BHN: Tensor


def count_views(
    mask: Tensor | None, is_causal: bool, tokens: int, valid_BN: Tensor | None, device: torch.device
) -> Views | None:
    """Return the visibility counts of an attention call, or None where all queries see the same keys.

    Args:
        mask: True where a pair may attend, or a bias to add, broadcastable to (B, H, N, N); scores with a bias will do.

    Example:
        >>> count_views(None, True, 3, None, torch.device("cpu"))
        Views(keys_BHN=tensor([[[1, 2, 3]]]), viewers_BHN=tensor([[[3, 2, 1]]]))
    """
    pairs = None
    if mask is not None and mask.ndim > 1 and mask.shape[-2] > 1:
        pairs = mask
    if pairs is None and not is_causal:
        return None
    counted = torch.ones(1, 1, tokens, dtype=torch.bool, device=device)
    if valid_BN is not None:
        counted = valid_BN[:, None]
    if pairs is not None:
        visible_pairs = is_visible(pairs)[(None,) * (4 - pairs.ndim)]
        # A key that nobody sees is divided by 1, and receives nothing.
        viewers = (visible_pairs & counted.unsqueeze(-1)).sum(dim=-2)
        return Views(visible_pairs.sum(dim=-1), viewers.clamp(min=1))
    # Causal: a query sees the keys up to its own, and a key is seen by its own query and all later ones.
    visible_pairs = torch.ones(1, 1, tokens, dtype=torch.bool, device=device)
    if mask is not None:
        # A mask of keys alone (B, 1, 1, N).
        visible_keys = is_visible(mask)[(None,) * (4 - mask.ndim)]
        visible_pairs = visible_keys[..., 0, :].expand(-1, -1, tokens)
    # Counted from the last query backwards.
    viewers = counted.flip(-1).cumsum(-1).flip(-1)
    return Views(visible_pairs.cumsum(-1), viewers.clamp(min=1))


def is_visible(mask: Tensor) -> Tensor:
    """Return True where a mask or bias lets a pair attend.

    Args:
        mask: True where a pair may attend, or a bias to add; half of the dtype's lowest value and less masks.
    """
    # Half the lowest number, because hosts add several masks, or the lowest of another dtype.
    if mask.dtype == torch.bool:
        return mask
    return mask > torch.finfo(mask.dtype).min / 2


def mask_bias(mask: Tensor, lowest: float, dtype: torch.dtype) -> Tensor:
    """Return a bias to add: 0 where a mask lets a pair attend, else the lowest value."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, lowest)
