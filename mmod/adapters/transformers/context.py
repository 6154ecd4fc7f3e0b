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


class _KeepingCache:
    """Stands in the place of a cache: hands keys and values on to it, and keeps what the layer attends to.

    Args:
        cache: The cache, if there is one.
    """

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.kept: tuple[Tensor, Tensor] | None = None

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take keys and values (B, H, N, E) of new tokens; return those of all."""
        self.kept = (keys, values) if self.cache is None else self.cache.update(keys, values, *args, **kwargs)
        return self.kept


class _TakingCache(_KeepingCache):
    """Does the same, and ends the call."""

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take keys and values (B, H, N, E) of all tokens."""
        super().update(keys, values, *args, **kwargs)
        raise _Taken


class OtherLayer:
    """Stands in the place of a cache for a layer that is applied several times: each has a place of its own in it.

    Args:
        cache: The cache.
        index: The place.
    """

    def __init__(self, cache: Any, index: int) -> None:
        self.cache = cache
        self.index = index

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take keys and values (B, H, N, E) of new tokens; return those that are attended to."""
        found: tuple[Tensor, Tensor] = self.cache.update(keys, values, self.index, *args, **kwargs)
        return found


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
    taking = _TakingCache(arguments.get("past_key_values"))
    # The mask is not read; where there is none, hosts lay keys out in another way.
    whole = {**arguments, "past_key_values": taking, "attention_mask": narrowed["attention_mask"]}
    try:
        with PartialProjections(_projections(layer.get_submodule("self_attn")), queries=False):
            forward(x_BND, **whole)
    except _Taken:
        pass
    return attend_to_given(layer, forward, narrowed, z_BKD, _found(taking.kept, layer))


def attend_and_keep(
    layer: nn.Module, forward: Callable[..., Any], arguments: Mapping[str, Any], x_BND: Tensor
) -> tuple[Any, tuple[Tensor, Tensor]]:
    """Return what a host's forward makes of all tokens, and the keys and values (B, H, L, E) that they attend to.

    Args:
        layer: The decoder layer.
        forward: Its forward.
        arguments: Arguments of all tokens.
        x_BND: The tokens.
    """
    keeping = _KeepingCache(arguments.get("past_key_values"))
    y = forward(x_BND, **{**arguments, "past_key_values": keeping})
    return y, _found(keeping.kept, layer)


def attend_to_given(
    layer: nn.Module, forward: Callable[..., Any], narrowed: Mapping[str, Any], z_BKD: Tensor,
    given: tuple[Tensor, Tensor],
) -> Any:  # fmt: skip
    """Return what a host's forward makes of tokens whose queries see keys that are given, and no keys of their own.

    Args:
        layer: The decoder layer.
        forward: The forward of the layer, or of its attention.
        narrowed: Arguments of the tokens, with a mask between them and the keys.
        z_BKD: The tokens; where there are none they are returned, and nothing runs.
        given: Keys and values (B, H, L, E).
    """
    if not z_BKD.shape[1]:
        return z_BKD
    with PartialProjections(_projections(layer.get_submodule("self_attn")), queries=True):
        return forward(z_BKD, **{**narrowed, "past_key_values": _GivingCache(given)})


def _found(taken: tuple[Tensor, Tensor] | None, layer: nn.Module) -> tuple[Tensor, Tensor]:
    if taken is None:
        raise RuntimeError(
            f"found no keys and values on their way to the cache of {type(layer).__name__}, which attention to other "
            "tokens than those that run needs; gradient checkpointing of single layers takes the cache away"
        )
    return taken


def _projections(attention: Any) -> list[Projection]:
    """Return the projections before attention; in a fused one, keys and values come last."""
    fused = getattr(attention, "qkv_proj", None)
    if fused is not None:
        features = int(attention.config.num_attention_heads) * int(attention.head_dim)
        return [Projection(fused.weight, features)]
    query, keys_values = attention.q_proj, (attention.k_proj, attention.v_proj)
    return [
        Projection(query.weight, int(query.weight.shape[0])),
        *(Projection(linear.weight, 0) for linear in keys_values),
    ]
