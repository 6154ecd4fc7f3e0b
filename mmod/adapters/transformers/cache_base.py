"""Base of the cache layers of kept tokens, dynamic and static.

Axes: B samples, N tokens and K slots of this step, L slots of the keys it attends to, D channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from mmod.blocks import Arguments
from mmod.routing import TokenGroups, TokenMasks

# transformers 5.24 renamed the cache of models and layers, and takes the old keyword until 5.40.
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__annotations__ else "past_key_values"
CACHE_NAMES = (CACHE, "past_key_values")
# The position of an empty slot.
EMPTY = -1


def cache_of(arguments: Arguments) -> Any:
    """Return the cache among a model's or layer's arguments or outputs, or None."""
    return next((arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None), None)


def with_cache(arguments: Arguments, cache: object) -> dict[str, object]:
    """Return the arguments of a model or layer with another cache."""
    return {**{name: value for name, value in arguments.items() if name not in CACHE_NAMES}, CACHE: cache}


class RoutedCacheLayer:
    """Mixin of a transformers cache layer that holds the keys and values of kept tokens only.

    Attributes:
        length: Logical length: tokens so far, kept or not; a tensor avoids a host synchronisation.
        kept_B1: Kept tokens so far, including those outside a sliding window (B, 1); 0 before the first.
        ragged: Slots may be empty.
        chosen: Tokens competed for selection.
    """

    length: Tensor | int
    kept_B1: Tensor | int
    ragged: bool
    chosen: bool = False
    _by_sample: tuple[str, ...]

    def begin_update(self, position_BK: Tensor, valid_BK: Tensor | None, tokens: int) -> None:
        """Announce the tokens of the next `update`; without slots, no such call follows."""

    def begin_update_all(self, x_BND: Tensor) -> None:
        """Announce that the next `update` receives all tokens of this step."""

    def joined(self, position_BK: Tensor) -> Tensor:
        """Return the positions (B, L) of the keys that `update` will return, -1 in empty slots."""
        raise NotImplementedError

    def remember(self, tokens: TokenMasks | TokenGroups) -> None:
        """Store whether tokens competed for selection, for later tokens."""
        # Where text may be skipped too, tokens are decided independently of earlier ones.
        self.chosen = self.chosen or (isinstance(tokens, TokenGroups) and tokens.strict and tokens.skips)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select the samples of the surviving beams."""
        self._select_samples(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sample."""
        self._select_samples(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select samples."""
        self._select_samples(lambda tensor: tensor[indices.to(tensor.device)])

    def _select_samples(self, select: Callable[[Tensor], Tensor]) -> None:
        for name in self._by_sample:
            tensor: object = getattr(self, name)
            if isinstance(tensor, Tensor):
                setattr(self, name, select(tensor))


def with_empty_slots(position_BK: Tensor, valid_BK: Tensor | None) -> Tensor:
    """Return positions of slots, -1 where a slot is empty."""
    if valid_BK is None:
        return position_BK
    return position_BK.masked_fill(~valid_BK, EMPTY)


def has_chosen(cache: object) -> bool:
    """Return whether cached tokens competed for selection."""
    return any(isinstance(layer, RoutedCacheLayer) and layer.chosen for layer in getattr(cache, "layers", ()))
