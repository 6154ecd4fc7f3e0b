"""The cache of a routed layer: keys and values of kept tokens alone, with the places they were taken from.

A layer's logical length is the number of tokens it has seen, kept or not: transformers takes positions and mask sizes
from it, whichever layer it asks.
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

from mmod.adapters.transformers.cache_base import KeptTokens
from mmod.adapters.transformers.cache_static import StaticRoutedLayer, StaticRoutedWindow


class RoutedLayer(KeptTokens, DynamicLayer):
    """A cache layer of the tokens that one routed layer kept, of different number in every sample.

    Args:
        sliding_window: Tokens that a query sees, itself included, or None for all.

    Where all tokens of a step run, as in decoding, their places are counted and only written down when asked for.

    Attributes:
        position_BL: Where each slot's token stands among the seen ones (B, L); None before the first.
        valid_BL: False where a slot is empty (B, L); None before the first.
        counted: Trailing slots with implicit, consecutive positions, which `_write_down` makes explicit.
        slot_T: Places among all slots of the announced tokens, which come packed as one sequence; else None.
    """

    seen: int
    _by_sample = ("keys", "values", "position_BL", "valid_BL", "kept_B1", "chosen_B1")

    def __init__(self, sliding_window: int | None = None) -> None:
        super().__init__()
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.record_past = False
        self.seen = 0
        self.position_BL: Tensor | None = None
        self.valid_BL: Tensor | None = None
        self.kept_B1 = 0
        self.ragged = False
        self.counted = 0
        self.slot_T: Tensor | None = None

    def adopt(self, filled: Any) -> None:
        """Begin with what a dense layer has cached: all of its tokens are kept ones."""
        self.lazy_initialization(filled.keys, filled.values)
        self.keys, self.values = filled.keys, filled.values
        self.seen = self.kept_B1 = filled.get_seq_length()
        self.counted = filled.keys.shape[2]

    def begin_update(
        self, position_BK: Tensor, valid_BK: Tensor | None, tokens: int, slot_T: Tensor | None = None
    ) -> None:
        """Say which tokens `update` is about to be given, see `KeptTokens`.

        Args:
            position_BK: As there.
            valid_BK: As there.
            tokens: As there.
            slot_T: Where `update` is given the first tokens packed as one sequence: their places among all slots.
        """
        self.slot_T = slot_T
        self.position_BL, self.valid_BL = self.joined(position_BK, valid_BK)
        self.counted = 0
        self.kept_B1 = self.kept_B1 + (position_BK.shape[1] if valid_BK is None else valid_BK.sum(1, keepdim=True))
        self.ragged = self.ragged or valid_BK is not None
        self.seen += tokens

    def begin_update_all(self, x_BND: Tensor) -> None:
        """Say that `update` is about to be given all tokens of this step, see `KeptTokens`."""
        tokens = x_BND.shape[1]
        self.kept_B1 = self.kept_B1 + tokens
        self.counted += tokens
        self.seen += tokens

    def joined(self, position_BK: Tensor, valid_BK: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return positions and validity of the cached slots followed by new ones, see `KeptTokens`."""
        valid_BK = torch.ones_like(position_BK, dtype=torch.bool) if valid_BK is None else valid_BK
        self._write_down(position_BK)
        if self.position_BL is None or self.valid_BL is None:
            return position_BK, valid_BK
        return torch.cat([self.position_BL, position_BK], dim=1), torch.cat([self.valid_BL, valid_BK], dim=1)

    def _write_down(self, like: Tensor) -> None:
        """Turn counted tokens into positions, for as many samples and on the device of `like`."""
        if not self.counted:
            return
        new_L = torch.arange(self.seen - self.counted, self.seen, device=like.device)
        new_BL = new_L.expand(like.shape[0], -1)
        self.counted = 0
        self.position_BL, self.valid_BL = self.joined(new_BL, None)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values (B, H, K, E) of the announced tokens and return all of them (B, H, L, E).

        The first tokens may come as one sequence (1, H, T, E), and are returned as they came.
        """
        if self.slot_T is not None:
            samples = self._by_slot(key_states), self._by_slot(value_states)
            self.slot_T = None
            self.update(*samples, *args, **kwargs)
            return key_states, value_states
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        told = self.counted + (0 if self.position_BL is None else self.position_BL.shape[1])
        if keys.shape[2] != told:
            raise RuntimeError(f"a routed layer's cache was told of {told} tokens and given {keys.shape[2]}")
        if self.sliding_window is not None and not self.record_past and keys.shape[2] >= self.sliding_window:
            self._write_down(keys)
            self._forget()
        return keys, values

    def _by_slot(self, packed_1HTE: Tensor) -> Tensor:
        """Give every packed row its slot (B, H, K, E); empty ones hold zeros."""
        assert self.position_BL is not None
        assert self.slot_T is not None
        slots_SHE = packed_1HTE.new_zeros(self.position_BL.numel(), packed_1HTE.shape[1], packed_1HTE.shape[3])
        slots_SHE = slots_SHE.index_copy(0, self.slot_T, packed_1HTE[0].transpose(0, 1))
        return slots_SHE.unflatten(0, self.position_BL.shape).transpose(1, 2)

    def _forget(self) -> None:
        """Drop leading slots that no later query of any sample sees."""
        assert self.position_BL is not None
        assert self.valid_BL is not None
        assert self.sliding_window is not None
        needed_BL = self.valid_BL & (self.position_BL > self.seen - self.sliding_window)
        needed_L = needed_BL.any(0)
        first = int(needed_L.int().argmax()) if bool(needed_L.any()) else needed_L.numel()
        self._select_slots(slice(first, None))

    def _select_slots(self, slots: slice) -> None:
        if self.position_BL is not None and self.valid_BL is not None:
            self.position_BL, self.valid_BL = self.position_BL[:, slots], self.valid_BL[:, slots]
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[:, :, slots], self.values[:, :, slots]

    def get_seq_length(self) -> int:
        """Return the logical length."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the mask a dense layer would need."""
        if self.sliding_window is None or self.seen < self.sliding_window:
            return self.seen + query_length, 0
        return self.sliding_window - 1 + query_length, self.seen - self.sliding_window + 1

    def get_max_length(self) -> int:
        """Return the tokens a query can see, -1 for all."""
        return -1 if self.sliding_window is None else self.sliding_window

    def activate_past_recording(self) -> None:
        """Keep what a sliding window would forget until `crop`."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens seen, kept or not; their number is given as a negative one."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a negative number of tokens to remove, got {tokens_to_remove}")
        if self.keys is not None:
            self._write_down(self.keys)
        self.seen += tokens_to_remove
        if self.position_BL is None or self.valid_BL is None:
            return
        taken_BL = self.valid_BL & (self.position_BL >= self.seen)
        self.kept_B1 = self.kept_B1 - taken_BL.sum(1, keepdim=True)
        self.valid_BL = self.valid_BL & ~taken_BL
        # The next mask has no column for what was taken back.
        self.position_BL = self.position_BL.clamp(max=max(self.seen - 1, 0))
        left_L = self.valid_BL.any(0).int()
        slots = int(left_L.numel() - left_L.flip(0).argmax()) if bool(left_L.any()) else 0
        # Slots of tokens taken back stay, hidden, where another sample's kept token stands behind them.
        self.ragged = self.ragged or bool((~self.valid_BL[:, :slots]).any())
        self._select_slots(slice(0, slots))
        if self.sliding_window is not None and slots >= self.sliding_window:
            self._forget()

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.seen, self.counted, self.position_BL, self.valid_BL = 0, 0, None, None
        self.kept_B1, self.ragged, self.slot_T, self.chosen_B1 = 0, False, None, None


def open_routed_layer(cache: Any, layer: int) -> None:
    """Put a cache layer of kept tokens in the place of a dense one, unless one is there.

    What a dense layer holds by then, as a prefix that peft has tuned or a prompt read before the model was routed,
    counts as kept.

    Args:
        cache: The cache of a forward pass.
        layer: Index of the layer.

    Raises:
        ValueError: A kind of cache whose layers cannot hold different tokens, or a static one that was filled before
            the model was routed.
    """
    layers = getattr(cache, "layers", ())
    if layer < len(layers) and isinstance(layers[layer], KeptTokens):
        return
    if not isinstance(cache, Cache) or isinstance(cache, EncoderDecoderCache):
        raise ValueError(
            f"a routed model caches in a transformers DynamicCache or StaticCache, got {type(cache).__name__}"
        )
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= layer:
            cache.layers.append(cache.layer_class_to_replicate())
    found: Any = cache.layers[layer]
    routed: RoutedLayer | StaticRoutedLayer
    if type(found) in (DynamicLayer, DynamicSlidingWindowLayer):
        routed = RoutedLayer(getattr(found, "sliding_window", None))
        # Assisted generation asks an empty cache to be ready to take tokens back.
        routed.record_past = getattr(found, "record_past", False)
        if found.get_seq_length():
            routed.adopt(found)
    elif type(found) is StaticLayer:
        routed = StaticRoutedLayer(found.max_cache_len)
    elif type(found) is StaticSlidingWindowLayer:
        routed = StaticRoutedWindow(found.max_cache_len)
    else:
        raise ValueError(
            f"a routed layer keeps other tokens than its neighbours, which a {type(found).__name__} cannot hold: use "
            "the default cache (a DynamicCache) or a StaticCache, offloaded or not, instead of a quantized one"
        )
    if found.get_seq_length() and not isinstance(routed, RoutedLayer):
        raise ValueError("this static cache was filled by a dense model: start with an empty one")
    cache.layers[layer] = routed
