"""Kept tokens of a decoder layer that attend to all tokens: their keys and values, once for every token.

The host's forward is called twice and never copied: on all tokens until it hands keys and values to its cache, where
the call ends, and on the kept ones, which are given those. Each call computes only its part of every projection.
Axes: B samples, H heads, N tokens, K slots per sample, L keys, E channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from mmod.ops import PartialProjections, Projection


class _Taken(Exception):
    """Ends a host's forward once its keys and values are known."""


class _TakingCache:
    """Stands in the place of a cache: takes keys and values, hands them on to the cache, and ends the call.

    Args:
        cache: The cache, if there is one.
    """

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.taken: tuple[Tensor, Tensor] | None = None

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take keys and values (B, H, N, E) of all tokens."""
        self.taken = (keys, values) if self.cache is None else self.cache.update(keys, values, *args, **kwargs)
        raise _Taken


class _GivingCache:
    """Stands in the place of a cache: gives kept queries the keys and values of all tokens.

    Args:
        given: Keys and values (B, H, L, E).
    """

    def __init__(self, given: tuple[Tensor, Tensor]) -> None:
        self.given = given

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Leave keys and values of the kept tokens, which were not computed."""
        return self.given


def attend_to_all(
    layer: nn.Module, forward: Callable[..., Any], arguments: Mapping[str, Any], narrowed: Mapping[str, Any],
    x_BND: Tensor, z_BKD: Tensor,
) -> Any:  # fmt: skip
    """Return what a host's forward makes of kept tokens, whose queries see the keys of all.

    Args:
        layer: The decoder layer.
        forward: The forward of the layer, or of its attention.
        arguments: Arguments of all tokens.
        narrowed: Those of the kept ones, with a mask between them and all keys.
        x_BND: All tokens.
        z_BKD: The kept ones; where there are none they are returned, and nothing runs behind keys and values.

    Source: ShortV, arXiv 2504.00502 (text reads keys and values of image tokens that are frozen).
    """
    projections = _projections(layer.get_submodule("self_attn"))
    taking = _TakingCache(arguments.get("past_key_values"))
    # The mask is not read; where there is none, hosts lay keys out in another way.
    whole = {**arguments, "past_key_values": taking, "attention_mask": narrowed["attention_mask"]}
    try:
        with PartialProjections(projections, own=False):
            forward(x_BND, **whole)
    except _Taken:
        pass
    if taking.taken is None:
        raise RuntimeError(
            f"context='all' found no keys and values on their way to the cache of {type(layer).__name__}"
        )
    if not z_BKD.shape[1]:
        return z_BKD
    with PartialProjections(projections, own=True):
        return forward(z_BKD, **{**narrowed, "past_key_values": _GivingCache(taking.taken)})


def _projections(attention: Any) -> list[Projection]:
    """Return the projections in front of attention; keys and values stand last where all three are one."""
    fused = getattr(attention, "qkv_proj", None)
    if fused is not None:
        return [Projection(fused.weight, own=int(attention.config.num_attention_heads) * int(attention.head_dim))]
    query, others = attention.q_proj, (attention.k_proj, attention.v_proj)
    return [Projection(query.weight, int(query.weight.shape[0])), *(Projection(each.weight, 0) for each in others)]
