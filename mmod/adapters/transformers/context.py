"""Attention of a decoder layer's kept tokens over all tokens, as in `mmod.ops.context`, by the layer's cache.

The first call of the host's forward stops when keys and values reach the cache; in the second, the cache returns them.
Axes: B samples, H heads, N tokens, K slots per sample, L keys, E channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mmod.adapters.transformers.cache_base import with_cache
from mmod.blocks import Arguments
from mmod.ops import Projection, project_part
from mmod.ops.context import Captured


@dataclass
class KeepingCache:
    """Cache proxy: forwards keys and values to the cache, if any, and keeps those that the layer attends to.

    Args:
        kept: Keys and values (B, H, L, E) that are known before: those passed in were not computed, and are ignored.
        ends: End the call of the host's forward then.
    """

    cache: Any = None
    kept: tuple[Tensor, Tensor] | None = None
    ends: bool = False

    def update(self, keys: Tensor, values: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Store keys and values (B, H, N, E) of new tokens; return those of all tokens."""
        if self.kept is None:
            if self.cache is None:
                self.kept = (keys, values)
            else:
                self.kept = self.cache.update(keys, values, *args, **kwargs)
        # Attention and MLP of all tokens would follow, and nobody reads them.
        if self.ends:
            raise Captured
        return self.kept


def attend_to_captured(
    projections: Sequence[Projection],
    forward: Callable[..., object],
    narrowed: Arguments,
    z_BKD: Tensor,
    captured: tuple[Tensor, Tensor],
) -> object:
    """Return the host forward's output for tokens that attend to captured keys only."""
    # Hosts take no empty sequence.
    if not z_BKD.shape[1]:
        return z_BKD
    with project_part(projections, queries=True):
        return forward(z_BKD, **with_cache(narrowed, KeepingCache(kept=captured)))


def checked_keys(captured: tuple[Tensor, Tensor] | None, layer: nn.Module) -> tuple[Tensor, Tensor]:
    """Return keys and values; raise a RuntimeError if a layer's attention has passed none to its cache."""
    if captured is None:
        raise RuntimeError(
            f"{type(layer).__name__} passed no keys and values to its cache, which context='all' needs: turn off "
            "gradient checkpointing of single layers, which removes the cache"
        )
    return captured
