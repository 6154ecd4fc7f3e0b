"""Visibility counts, which make the attention that tokens receive comparable where queries see different keys.

In causal attention the first token is seen by every query and the last by itself alone, and a query that sees few keys
gives each of them much. A plain column mean therefore ranks tokens by position. It is corrected by weighing each
query's row by the number of keys it sees, and dividing what a key received by the number of queries that see it:
attention spread evenly then gives every token the same importance.
Axes: B images, H heads, N tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Views(NamedTuple):
    """Numbers of keys that each query sees and of queries that see each key; an axis of one entry serves all.

    Args:
        keys_BHN: Keys that a query sees (B or 1, H or 1, N).
        viewers_BHN: Queries that see a key, those of padding left out, at least 1 (B or 1, H or 1, N).
    """

    keys_BHN: Tensor
    viewers_BHN: Tensor


def count_views(
    mask: Tensor | None, is_causal: bool, tokens: int, valid_BN: Tensor | None, device: torch.device
) -> Views | None:
    """Return who sees whom in one attention call, or None where all queries see the same keys.

    Args:
        mask: True where a pair may attend, or a bias to add, broadcastable to (B, H, N, N).
        is_causal: A query sees keys up to its own position.
        tokens: N.
        valid_BN: False where a token is padding: its query is not counted (B, N).
        device: Where the counts are made.

    Example:
        >>> count_views(None, True, 3, None, torch.device("cpu"))
        Views(keys_BHN=tensor([[[1, 2, 3]]]), viewers_BHN=tensor([[[3, 2, 1]]]))
    """
    counted = torch.ones(1, 1, tokens, dtype=torch.bool, device=device) if valid_BN is None else valid_BN[:, None]
    if mask is not None and mask.ndim > 1 and mask.shape[-2] > 1:
        return _views_of_pairs(visible(mask), counted)
    if not is_causal:
        return None
    seen = torch.ones(1, 1, tokens, dtype=torch.bool, device=device)
    if mask is not None:
        # A mask of keys alone (B, 1, 1, N).
        seen = visible(mask)[(None,) * (4 - mask.ndim)][..., 0, :].expand(-1, -1, tokens)
    return Views(seen.cumsum(-1), counted.flip(-1).cumsum(-1).flip(-1).clamp(min=1))


def visible(mask: Tensor) -> Tensor:
    """Return True where a mask or bias lets a pair attend.

    Args:
        mask: True where a pair may attend, or a bias to add; half of the type's lowest value and less hides.
    """
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def _views_of_pairs(seen: Tensor, counted_B1N: Tensor) -> Views:
    seen = seen[(None,) * (4 - seen.ndim)]
    viewers = (seen & counted_B1N.unsqueeze(-1)).sum(dim=-2)
    return Views(seen.sum(dim=-1), viewers.clamp(min=1))


def views_of_scores(score: Tensor, valid_BN: Tensor | None) -> Views:
    """Return who sees whom from the products that a host's softmax is given.

    Args:
        score: Masked products of queries and keys (B, H, N, N).
        valid_BN: False where a token is padding (B, N), or None.
    """
    counted = torch.ones_like(score[:1, :1, :, 0], dtype=torch.bool) if valid_BN is None else valid_BN[:, None]
    return _views_of_pairs(visible(score), counted)
