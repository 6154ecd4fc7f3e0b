"""What cache layers of kept tokens have in common, whether their tensors grow or keep their shape.

Axes: B samples, N tokens and K slots of this step, L slots of the keys it attends to, D channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


class KeptTokens:
    """Mixin of a transformers cache layer that holds the keys and values of kept tokens alone.

    Attributes:
        seen: Logical length: tokens seen, kept or not; a tensor where the host is not to wait for the device.
        kept_B1: Tokens kept so far, also those a sliding window has forgotten (B, 1); 0 before the first.
        ragged: Whether a slot may be empty.
    """

    seen: Tensor | int
    kept_B1: Tensor | int
    ragged: bool
    _by_sample: tuple[str, ...]

    def announce(self, position_BK: Tensor, valid_BK: Tensor | None, tokens: int) -> None:
        """Say which tokens `update` is about to be given; without any slot, there is no such call.

        Args:
            position_BK: Where they stand among all tokens (B, K).
            valid_BK: False where a slot is empty (B, K), or None.
            tokens: Tokens seen in this step, kept or not.
        """
        raise NotImplementedError

    def announce_all(self, x_BND: Tensor) -> None:
        """Say that `update` is about to be given all tokens of this step.

        Args:
            x_BND: The tokens (B, N, D).
        """
        raise NotImplementedError

    def joined(self, position_BK: Tensor, valid_BK: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return positions and validity of the keys that `update` will return for new slots (B, L).

        Args:
            position_BK: Positions of the new slots (B, K).
            valid_BK: False where a new slot is empty (B, K), or None.
        """
        raise NotImplementedError

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the samples of the beams that go on."""
        self._select_samples(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sample."""
        self._select_samples(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take some samples."""
        self._select_samples(lambda tensor: tensor[indices.to(tensor.device)])

    def _select_samples(self, select: Callable[[Tensor], Tensor]) -> None:
        for name in self._by_sample:
            tensor: Any = getattr(self, name)
            if isinstance(tensor, Tensor):
                setattr(self, name, select(tensor))
