"""Attention masks between kept tokens and the keys in a layer's cache.

Axes: B samples, H heads, N tokens, K slots per sample, L slots in a layer's cache and the new ones behind them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mmod.adapters.masks import key_columns, query_rows, show_all_keys
from mmod.adapters.transformers.cache import RoutedLayer
from mmod.adapters.transformers.cache_base import EMPTY, RoutedCacheLayer, with_empty_slots
from mmod.ops.views import is_visible
from mmod.routing import Routing


def mask_of_kept(
    mask: Tensor | None,
    x_BND: Tensor,
    routing: Routing | None,
    cache: RoutedCacheLayer | None,
    flash: bool,
    all_keys: bool = False,
) -> Tensor | None:
    """Return the mask between kept tokens and the keys that the layer's cache will hold.

    Args:
        mask: The mask of all tokens, bool or a bias (1 or B, H, N, columns); None where attention is causal.
        routing: The decision; None keeps all tokens.
        all_keys: The cache will hold all tokens of this step, not only the kept ones.

    Returns:
        A mask (B, H, K, L), or the keys' validity (B, L); None where causal attention is already correct.
    """
    past = 0 if cache is None else cache.length
    valid_BK = None if routing is None else routing.kept.valid_BK
    ragged = valid_BK is not None or (cache is not None and cache.ragged)
    if not ragged and not all_keys and (mask is None or flash):
        # Without a mask attention is causal, which is correct for kept tokens in order too.
        return None
    if routing is None and isinstance(cache, RoutedLayer) and not flash:
        written = _mask_of_all(mask, x_BND, cache)
        if written is not None:
            return written
    all_BN = torch.arange(x_BND.shape[1], device=x_BND.device).expand(x_BND.shape[0], -1)
    index_BK = all_BN if routing is None else routing.kept.index_BK
    query_BK = past + index_BK
    new_BL = past + all_BN if all_keys else with_empty_slots(query_BK, valid_BK)
    key_BL = new_BL if cache is None else cache.joined(new_BL)
    if flash:
        return key_BL != EMPTY
    if mask is None:
        earlier_BKL = key_BL.unsqueeze(1) <= query_BK.unsqueeze(2)
        pairs = (earlier_BKL & (key_BL != EMPTY).unsqueeze(1)).unsqueeze(1)
    else:
        pairs = _narrow(mask, index_BK, key_BL, past + x_BND.shape[1])
    if valid_BK is None:
        return pairs
    # A row that sees no key would be NaN; nobody reads what an empty slot computes.
    return show_all_keys(pairs, valid_BK)


def mask_of_queries(mask: Tensor | None, x_BND: Tensor, routing: Routing, keys: int) -> Tensor:
    """Return the mask between some queries and all keys.

    Args:
        mask: The mask of all tokens, bool or a bias (1 or B, H, N, L); None where attention is causal.
    """
    index_BK = routing.kept.index_BK
    tokens = x_BND.shape[1]
    if mask is None:
        # Hosts pass no mask if a single token sees all keys, or if the first key belongs to the first token.
        before = keys - 1 if tokens == 1 else 0
        position_L = torch.arange(keys, device=index_BK.device)
        pairs = (position_L <= (before + index_BK).unsqueeze(2)).unsqueeze(1)
    else:
        pairs = query_rows(mask, index_BK)
    if routing.kept.valid_BK is None:
        return pairs
    return show_all_keys(pairs, routing.kept.valid_BK)


def first_column(columns: int, length: Tensor | int) -> Tensor | int:
    """Return the position of the first column of an attention mask.

    It is above 0 with a sliding window. In a static cache, trailing columns belong to future tokens.
    """
    if isinstance(length, Tensor):
        return (length - columns).clamp(min=0)
    return max(length - columns, 0)


def _hide(pairs: Tensor, hidden: Tensor) -> Tensor:
    if pairs.dtype == torch.bool:
        return pairs & ~hidden
    return pairs.masked_fill(hidden, torch.finfo(pairs.dtype).min)


def _mask_of_all(mask: Tensor | None, x_BND: Tensor, cache: RoutedLayer) -> Tensor | None:
    """Return the mask of a step in which all tokens run, as in decoding; None if a sliding window dropped tokens.

    Only slots of routed steps are looked up; implicit positions are the mask's last columns.
    """
    tokens = x_BND.shape[1]
    recent = cache.implicit + tokens
    length = cache.length + tokens
    if cache.position_BL is None or (mask is not None and mask.shape[-1] != length):
        return None
    written = (cache.position_BL != EMPTY)[:, None, None, :]
    if mask is None and tokens == 1:
        return F.pad(written, (0, recent), value=True)
    if mask is None:
        # Recent tokens end with the new ones, of which each sees those up to itself.
        query_N = torch.ones(tokens, recent, dtype=torch.bool, device=x_BND.device).tril(recent - tokens)
        columns = written.expand(-1, -1, tokens, -1), query_N.expand(x_BND.shape[0], 1, -1, -1)
        return torch.cat(columns, dim=-1)
    mask = mask.expand(x_BND.shape[0], -1, -1, -1)
    pairs = key_columns(mask, cache.position_BL.clamp(min=0))
    return torch.cat([_hide(pairs, ~written), mask[..., length - recent :]], dim=-1)


def _narrow(mask: Tensor, index_BK: Tensor, key_BL: Tensor, length: Tensor | int) -> Tensor:
    """Return the rows and columns of a mask (1 or B, H, N, columns) that belong to kept queries and cached keys."""
    column_BL = key_BL - first_column(mask.shape[3], length)
    pairs = key_columns(query_rows(mask, index_BK), column_BL.clamp(min=0))
    return _hide(pairs, (column_BL < 0)[:, None, None, :])


def valid_tokens(mask: object, source: Tensor, past: Tensor | int) -> Tensor:
    """Return which tokens are not padding (B, N), from a mask (B, length) or (B, 1 or H, N, length); None for all."""
    samples, tokens = source.shape[:2]
    if mask is None:
        return torch.ones(samples, tokens, dtype=torch.bool, device=source.device)
    if not isinstance(mask, Tensor) or mask.ndim not in (2, 4):
        raise ValueError(
            f"cannot read padding from an attention mask of type {type(mask).__name__}: pass one of 2 or 4 axes"
        )
    query_N = torch.arange(tokens, device=mask.device)
    if isinstance(past, Tensor):
        past = past.to(mask.device)
    if mask.ndim == 2:
        columns = slice(past, past + tokens) if isinstance(past, int) else query_N + past
        return mask[:, columns].to(source.device).bool()
    row_BN = mask[:, 0, query_N, query_N + past - first_column(mask.shape[-1], past + tokens)]
    return is_visible(row_BN).expand(samples, -1).to(source.device)
