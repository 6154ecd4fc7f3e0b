"""The KV cache of a routed layer: keys and values of kept tokens, with their positions.

A layer's logical length counts all tokens so far, kept or not, because transformers derives positions and mask sizes
from it.
Axes: B samples, H heads, K slots of this step, L slots in the cache, E channels of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from mmod.adapters.transformers.cache_base import EMPTY, RoutedCacheLayer, with_empty_slots
from mmod.adapters.transformers.cache_static import StaticRoutedLayer, StaticRoutedWindow


class RoutedLayer(RoutedCacheLayer, DynamicLayer):
    """A dynamic cache layer of kept tokens, whose number may differ between samples.

    If all tokens of a step run, as in decoding, positions are implicit and are only materialised when needed.

    Attributes:
        position_BL: Positions of the slots' tokens, -1 in an empty slot (B, L); None before the first.
        implicit: Number of trailing slots with implicit, consecutive positions, see `_materialise`.
        slot_T: Slots of announced tokens that arrive packed as one sequence; else None.
    """

    length: int
    position_BL: Tensor | None
    implicit: int
    slot_T: Tensor | None
    _by_sample = ("keys", "values", "position_BL", "kept_B1")

    def __init__(self, sliding_window: int | None = None) -> None:
        super().__init__()
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.record_past = False
        self.reset()

    def adopt(self, filled: Any) -> None:
        """Start with the cache of a dense layer, whose tokens all count as kept."""
        self.lazy_initialization(filled.keys, filled.values)
        self.keys = filled.keys
        self.values = filled.values
        self.length = self.kept_B1 = filled.get_seq_length()
        self.implicit = filled.keys.shape[2]

    def begin_update(
        self, position_BK: Tensor, valid_BK: Tensor | None, tokens: int, slot_T: Tensor | None = None
    ) -> None:
        """Announce the tokens of the next `update`; see `RoutedCacheLayer`. `slot_T`: slots of a packed prompt."""
        # The rows of a packed prompt stand in one sequence, and the cache stores them by sample.
        self.slot_T = slot_T
        self.position_BL = self.joined(with_empty_slots(position_BK, valid_BK))
        self.implicit = 0
        if valid_BK is None:
            self.kept_B1 = self.kept_B1 + position_BK.shape[1]
        else:
            self.kept_B1 = self.kept_B1 + valid_BK.sum(1, keepdim=True)
        self.ragged = self.ragged or valid_BK is not None
        self.length += tokens

    def begin_update_all(self, x_BND: Tensor) -> None:
        """Announce that the next `update` receives all tokens of this step, see `RoutedCacheLayer`."""
        tokens = x_BND.shape[1]
        self.kept_B1 = self.kept_B1 + tokens
        # Positions of a step in which all tokens run are consecutive: writing them out would cost each step of
        # decoding.
        self.implicit += tokens
        self.length += tokens

    def joined(self, position_BK: Tensor) -> Tensor:
        """Return the positions of cached slots, then new ones, see `RoutedCacheLayer`."""
        self._materialise(position_BK)
        if self.position_BL is None:
            return position_BK
        return torch.cat([self.position_BL, position_BK], dim=1)

    def _materialise(self, like: Tensor) -> None:
        """Make implicit positions explicit, for the samples and on the device of `like`."""
        if not self.implicit:
            return
        new_L = torch.arange(self.length - self.implicit, self.length, device=like.device)
        new_BL = new_L.expand(like.shape[0], -1)
        self.implicit = 0
        self.position_BL = self.joined(new_BL)

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values (B, H, K, E) of the announced tokens and return all of them (B, H, L, E).

        A prompt may be packed as one sequence (1, H, T, E), which is returned unchanged.
        """
        if self.slot_T is not None:
            samples = self._by_slot(key_states), self._by_slot(value_states)
            self.slot_T = None
            self.update(*samples, *args, **kwargs)
            return key_states, value_states
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        announced = self.implicit
        if self.position_BL is not None:
            announced += self.position_BL.shape[1]
        # Keys without positions would be masked as other tokens are.
        if keys.shape[2] != announced:
            raise RuntimeError(f"a routed layer's cache expected {announced} tokens, got {keys.shape[2]}")
        if self.sliding_window is not None and not self.record_past and keys.shape[2] >= self.sliding_window:
            self._materialise(keys)
            self._forget()
        return keys, values

    def _by_slot(self, packed_1HTE: Tensor) -> Tensor:
        """Unpack rows into slots (B, H, K, E); empty slots are zero."""
        assert self.position_BL is not None
        assert self.slot_T is not None
        slots_SHE = packed_1HTE.new_zeros(self.position_BL.numel(), packed_1HTE.shape[1], packed_1HTE.shape[3])
        slots_SHE = slots_SHE.index_copy(0, self.slot_T, packed_1HTE[0].transpose(0, 1))
        return slots_SHE.unflatten(0, self.position_BL.shape).transpose(1, 2)

    def _forget(self) -> None:
        """Drop leading slots outside the sliding window of all samples."""
        assert self.position_BL is not None
        assert self.sliding_window is not None
        needed_L = (self.position_BL > self.length - self.sliding_window).any(0)
        first = int(needed_L.int().argmax()) if bool(needed_L.any()) else needed_L.numel()
        self._select_slots(slice(first, None))

    def _select_slots(self, slots: slice) -> None:
        if self.position_BL is not None:
            self.position_BL = self.position_BL[:, slots]
        if self.keys is not None and self.values is not None:
            self.keys = self.keys[:, :, slots]
            self.values = self.values[:, :, slots]

    def get_seq_length(self) -> int:
        """Return the logical length."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and the offset of a dense layer's mask."""
        if self.sliding_window is None or self.length < self.sliding_window:
            return self.length + query_length, 0
        return self.sliding_window - 1 + query_length, self.length - self.sliding_window + 1

    def get_max_length(self) -> int:
        """Return the number of tokens visible to a query, -1 for all."""
        if self.sliding_window is None:
            return -1
        return self.sliding_window

    def activate_past_recording(self) -> None:
        """Keep tokens outside the sliding window until `crop`."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, kept or not; the number is passed as a negative one."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a negative number of tokens to remove, got {tokens_to_remove}")
        if self.keys is not None:
            self._materialise(self.keys)
        self.length += tokens_to_remove
        if self.position_BL is None:
            return
        removed_BL = self.position_BL >= self.length
        self.kept_B1 = self.kept_B1 - removed_BL.sum(1, keepdim=True)
        self.position_BL = self.position_BL.masked_fill(removed_BL, EMPTY)
        remaining_L = (self.position_BL != EMPTY).any(0).int()
        slots = 0
        if bool(remaining_L.any()):
            slots = int(remaining_L.numel() - remaining_L.flip(0).argmax())
        # Slots of removed tokens stay, masked, before kept tokens of other samples.
        self.ragged = self.ragged or bool((self.position_BL[:, :slots] == EMPTY).any())
        self._select_slots(slice(0, slots))
        if self.sliding_window is not None and slots >= self.sliding_window:
            self._forget()

    def reset(self) -> None:
        """Clear the cache."""
        super().reset()
        self.length = self.implicit = self.kept_B1 = 0
        self.position_BL = self.slot_T = None
        self.ragged = self.chosen = False


def open_routed_layer(cache: object, layer: int) -> None:
    """Replace a dense cache layer by one of kept tokens, unless it was replaced before.

    Tokens that the dense layer holds, such as a prefix tuned by peft or a prompt read before routing, count as kept.
    """
    layers = getattr(cache, "layers", ())
    if layer < len(layers) and isinstance(layers[layer], RoutedCacheLayer):
        return
    if not isinstance(cache, Cache) or isinstance(cache, EncoderDecoderCache):
        raise ValueError(
            f"a routed model caches in a transformers DynamicCache or StaticCache, got {type(cache).__name__}"
        )
    # A dynamic cache makes its layers when they are first written, and earlier ones may be dense.
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= layer:
            cache.layers.append(cache.layer_class_to_replicate())
    cache.layers[layer] = _routed_layer(cache.layers[layer])


def _routed_layer(dense: Any) -> RoutedLayer | StaticRoutedLayer:
    """Return a cache layer of kept tokens in place of a dense one."""
    if type(dense) in (DynamicLayer, DynamicSlidingWindowLayer):
        routed = RoutedLayer(getattr(dense, "sliding_window", None))
        # Assisted generation makes an empty cache record tokens that it may remove.
        routed.record_past = getattr(dense, "record_past", False)
        if dense.get_seq_length():
            routed.adopt(dense)
        return routed
    if type(dense) not in (StaticLayer, StaticSlidingWindowLayer):
        raise ValueError(
            f"routed layers keep different tokens, which a {type(dense).__name__} does not support: use the default "
            "cache (a DynamicCache) or a StaticCache, offloaded or not, instead of a quantized one"
        )
    if dense.get_seq_length():
        raise ValueError("this static cache was filled by a dense model: start with an empty one")
    is_window = type(dense) is StaticSlidingWindowLayer
    if is_window:
        return StaticRoutedWindow(dense.max_cache_len)
    return StaticRoutedLayer(dense.max_cache_len)
