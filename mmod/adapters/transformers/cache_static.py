"""The static KV cache of a routed layer, for compiled decoding: shapes and addresses are fixed after prefill.

Axes: B samples, H heads, N tokens and K slots of this step, L keys it attends to, S slots in the cache, E channels of a
head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from mmod.adapters.transformers.cache_base import EMPTY, RoutedCacheLayer, with_empty_slots


class StaticRoutedLayer(RoutedCacheLayer, StaticLayer):
    """A static cache layer of kept tokens.

    Prefill allocates it. A prompt of N tokens needs K slots, the largest kept count of a sample, and every later token
    at most one. That makes `max_cache_len - N + K` slots; a dense layer has `max_cache_len`. Tokens cannot be removed.

    Args:
        max_cache_len: Maximum number of tokens, kept or not.

    Attributes:
        position_BS: Positions of the slots' tokens, -1 in an empty slot (B, S); None before prefill.
    """

    supports_early_init = False
    is_croppable = False
    keys: Any
    values: Any
    _by_sample = ("keys", "values", "position_BS", "kept_B1")

    def __init__(self, max_cache_len: int, **kwargs: object) -> None:
        super().__init__(max_cache_len=max_cache_len, **kwargs)
        self.position_BS: Tensor | None = None
        self.kept_B1 = 0
        self._written = torch.tensor(0)
        self._announced: tuple[Tensor, bool, int] | None = None

    @property
    def length(self) -> Tensor | int:  # type: ignore[override]
        """Logical length; a tensor after prefill, to avoid a host synchronisation."""
        return 0 if self.position_BS is None else self.cumulative_length

    @property
    def ragged(self) -> bool:  # type: ignore[override]
        """Whether slots may be empty: those of future tokens are."""
        return self.position_BS is not None

    def begin_update(self, position_BK: Tensor, valid_BK: Tensor | None, tokens: int) -> None:
        """Announce the tokens of the next `update`, see `RoutedCacheLayer`."""
        position_BK = with_empty_slots(position_BK, valid_BK)
        self._announced = position_BK, valid_BK is not None, tokens
        # A layer that keeps no token calls no attention, so no `update` would count the step.
        if not position_BK.shape[1]:
            self._count(position_BK, tokens)

    def begin_update_all(self, x_BND: Tensor) -> None:
        """Announce that the next `update` receives all tokens of this step, see `RoutedCacheLayer`."""
        samples, tokens = x_BND.shape[:2]
        position_BN = self.length + torch.arange(tokens, device=x_BND.device).expand(samples, -1)
        self.begin_update(position_BN, None, tokens)

    def joined(self, position_BK: Tensor) -> Tensor:
        """Return the positions of the keys that `update` will return, see `RoutedCacheLayer`."""
        slots = position_BK.shape[1]
        if self.position_BS is None:
            return position_BK
        if self._displaces(slots):
            return torch.cat([self.position_BS, position_BK], dim=1)
        return self.position_BS.index_copy(1, self._next_slots(slots), position_BK)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values (B, H, K, E) of the announced tokens and return the visible ones (B, H, L, E).

        These are the prompt's in prefill, and all slots in decoding.
        """
        if self._announced is None:
            raise RuntimeError("a routed layer's cache got tokens that were not announced")
        position_BK, may_be_empty, tokens = self._announced
        self._announced = None
        is_first = self.position_BS is None
        self._count(position_BK, tokens)
        # A first step may have kept no token.
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        attended = None
        if is_first:
            attended = key_states, value_states
        elif self._displaces(key_states.shape[2]):
            attended = torch.cat([self.keys, key_states], dim=2), torch.cat([self.values, value_states], dim=2)
        order_BK = self._newest(position_BK, may_be_empty)
        if order_BK is not None:
            position_BK = position_BK.gather(1, order_BK)
            key_states = _ordered(key_states, order_BK)
            value_states = _ordered(value_states, order_BK)
        self._write(position_BK, key_states, value_states)
        if attended is None:
            return self.keys, self.values
        return attended

    def _count(self, position_BK: Tensor, tokens: int) -> None:
        """Count the tokens of a step; allocate slots in the first step."""
        device = position_BK.device
        if self.position_BS is None:
            shape = position_BK.shape[0], self._slots(position_BK.shape[1], tokens)
            self.position_BS = torch.full(shape, EMPTY, device=device)
            self.kept_B1 = torch.zeros(position_BK.shape[0], 1, dtype=torch.long, device=device)
            self.cumulative_length = self.cumulative_length.to(device)
            self._written = self._written.to(device)
            # Captured graphs hold their addresses, so they are updated in place from here on.
            _mark_static(self.position_BS, self.kept_B1, self.cumulative_length, self._written)
        assert isinstance(self.kept_B1, Tensor)
        self.kept_B1.add_((position_BK != EMPTY).sum(1, keepdim=True))
        self.cumulative_length.add_(tokens)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate keys and values."""
        assert self.position_BS is not None
        self.dtype = key_states.dtype
        self.device = key_states.device
        self.batch_size = len(key_states)
        slots = self.position_BS.shape[1]
        self.keys = key_states.new_zeros(*key_states.shape[:2], slots, key_states.shape[3])
        self.values = value_states.new_zeros(*value_states.shape[:2], slots, value_states.shape[3])
        self.is_initialized = True
        _mark_static(self.keys, self.values)

    def _write(self, position_BK: Tensor, key_states: Tensor, value_states: Tensor) -> None:
        assert self.position_BS is not None
        slot_K = self._next_slots(position_BK.shape[1])
        self.position_BS.index_copy_(1, slot_K, position_BK)
        self.keys.index_copy_(2, slot_K, key_states)
        self.values.index_copy_(2, slot_K, value_states)
        self._written.add_(position_BK.shape[1])

    def _slots(self, slots: int, tokens: int) -> int:
        """Return the number of slots to allocate, from the prompt's slots and tokens."""
        return self.max_cache_len - tokens + slots

    def _displaces(self, slots: int) -> bool:
        """Whether new slots overwrite slots that the first new tokens still attend to."""
        return False

    def _newest(self, position_BK: Tensor, may_be_empty: bool) -> Tensor | None:
        """Return which new slots are written, in order; None for all."""
        return None

    def _next_slots(self, slots: int) -> Tensor:
        """Return the slots (K) to write."""
        return self._written + torch.arange(slots, device=self._written.device)

    def get_seq_length(self) -> Tensor | int:  # type: ignore[override]
        """Return the logical length."""
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to remove tokens: slots are written one behind the other."""
        raise ValueError("a static cache of a routed layer cannot be cropped: use the default cache")

    def reset(self) -> None:
        """Clear the cache; the next prompt may need another number of slots."""
        self.keys = None
        self.values = None
        self.is_initialized = False
        self.position_BS = None
        self.kept_B1 = 0
        self._announced = None
        self.chosen = False
        self._written.zero_()
        super().reset()

    def _select_samples(self, select: Callable[[Tensor], Tensor]) -> None:
        for name in self._by_sample:
            tensor: object = getattr(self, name)
            if not isinstance(tensor, Tensor):
                continue
            selected = select(tensor)
            # In place where it fits: a graph knows the cache by its memory.
            if selected.shape == tensor.shape:
                selected = tensor.copy_(selected)
            setattr(self, name, selected)


class StaticRoutedWindow(StaticRoutedLayer, StaticSlidingWindowLayer):
    """A static cache layer of kept tokens with a sliding window: a ring buffer of the dense layer's size.

    Args:
        max_cache_len: Visible tokens of a query, including itself, or fewer if the sequence is shorter.
    """

    def __init__(self, max_cache_len: int) -> None:
        super().__init__(max_cache_len=max_cache_len, sliding_window=max_cache_len)

    def _count(self, position_BK: Tensor, tokens: int) -> None:
        super()._count(position_BK, tokens)
        # The mask's shape depends on it, as in transformers' layers.
        self.cumulative_length_int += tokens

    def get_seq_length(self) -> int:
        """Return the logical length as a number, on which the shape of a sliding window's mask depends."""
        return int(self.cumulative_length_int)

    def _slots(self, slots: int, tokens: int) -> int:
        return int(self.max_cache_len)

    def _displaces(self, slots: int) -> bool:
        return slots > 1

    def _newest(self, position_BK: Tensor, may_be_empty: bool) -> Tensor | None:
        if not may_be_empty and position_BK.shape[1] <= self.max_cache_len:
            return None
        # Empty slots come first, so that they do not overwrite visible tokens.
        order_BK = torch.sort((position_BK != EMPTY).to(torch.uint8), dim=1, stable=True).indices
        return order_BK[:, -self.max_cache_len :]

    def _next_slots(self, slots: int) -> Tensor:
        return super()._next_slots(slots) % self.max_cache_len


def _ordered(states: Tensor, order_BK: Tensor) -> Tensor:
    return states.gather(2, order_BK[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3]))


def _mark_static(*tensors: Tensor) -> None:
    """Mark tensors as having a fixed address, for CUDA graphs; not possible while tracing."""
    if not torch.compiler.is_compiling():
        for tensor in tensors:
            torch._dynamo.mark_static_address(tensor)
