"""What cache layers of kept tokens have in common, whether their tensors grow or keep their shape.

Axes: B samples, N tokens and K slots of this step, L slots of the keys it attends to, D channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmod.routing import TokenGroups


class KeptTokens:
    """Mixin of a transformers cache layer that holds the keys and values of kept tokens alone.

    Attributes:
        seen: Logical length: tokens seen, kept or not; a tensor where the host is not to wait for the device.
        kept_B1: Tokens kept so far, also those a sliding window has forgotten (B, 1); 0 before the first.
        ragged: Whether a slot may be empty.
        chosen_B1: True where the best of a sample's tokens have been chosen (B, 1); None before the first.
    """

    seen: Tensor | int
    kept_B1: Tensor | int
    ragged: bool
    chosen_B1: Tensor | None = None
    _by_sample: tuple[str, ...]

    def begin_update(self, position_BK: Tensor, valid_BK: Tensor | None, tokens: int) -> None:
        """Say which tokens `update` is about to be given; without any slot, there is no such call.

        Args:
            position_BK: Where they stand among all tokens (B, K).
            valid_BK: False where a slot is empty (B, K), or None.
            tokens: Tokens seen in this step, kept or not.
        """
        raise NotImplementedError

    def begin_update_all(self, x_BND: Tensor) -> None:
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

    def remember(self, groups: TokenGroups | None) -> None:
        """Remember which samples had tokens to choose among, for tokens that come later.

        Args:
            groups: The groups of this step's tokens, where they have any.
        """
        # Text that may be skipped, too, decides for itself, and asks nothing of what came before.
        if groups is not None and groups.strict and groups.skips:
            new_B1 = torch.tensor([[any(sizes)] for sizes in groups.sizes], device=groups.group_BN.device)
            self.chosen_B1 = new_B1 if self.chosen_B1 is None else self.chosen_B1 | new_B1

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


def chosen_samples(cache: Any) -> Tensor | None:
    """Return for which samples (B) the best of some cached tokens have been chosen; None where that is none."""
    found = [layer.chosen_B1 for layer in getattr(cache, "layers", ()) if isinstance(layer, KeptTokens)]
    return next((chosen_B1[:, 0] for chosen_B1 in found if chosen_B1 is not None), None)
