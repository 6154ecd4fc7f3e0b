"""The rows that remain where tokens leave a span for good, and how all tokens are restored from them.

Axes: B images, N tokens, or rows before a step; K rows that remain, D channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mmod.ops import gather_rows, held_slots


class Reduced(NamedTuple):
    """What remains of a block's rows.

    Args:
        z_BKD: The rows that remain, prefix first.
        index_BK: The row before the step that each stands for: the first or most important of several.
        size_BK: Number of tokens that each row represents; None for one each.
        joined_BR: Rows that left, and the slots of those that they joined; None where they are dropped.
        fuses: The last row that remains is a sum of dropped ones.
    """

    z_BKD: Tensor
    index_BK: Tensor
    size_BK: Tensor | None = None
    joined_BR: tuple[Tensor, Tensor] | None = None
    fuses: bool = False

    def slots(self, tokens: int) -> Tensor:
        """Return the slot of each row before the step (B, N), -1 for a dropped one."""
        index_BK = self.index_BK[:, :-1] if self.fuses else self.index_BK
        slot_BN = held_slots(index_BK, tokens, None)
        if self.joined_BR is None:
            return slot_BN
        return slot_BN.scatter(1, *self.joined_BR)


class Remaining:
    """The rows that remain in a forward pass. Those that left have their old state, or that of the row they joined.

    Args:
        restores: All tokens are restored after some block.

    Attributes:
        token_BK: The token that each row stands for; None before the first step.
        size_BK: Number of tokens that each row represents; None for one each.
        slot_BN: Slot of each token, -1 for a dropped one; None before the first step, or where no token is restored.
        drops: Tokens were dropped.
    """

    def __init__(self, restores: bool) -> None:
        self.restores = restores
        self.token_BK: Tensor | None = None
        self.size_BK: Tensor | None = None
        self.slot_BN: Tensor | None = None
        self.drops = False
        # All tokens, in which those that were dropped have their last state.
        self._old_BND: Tensor | None = None
        # The rows after the block before, if that returned all tokens.
        self._after_BKD: Tensor | None = None

    def gather(self, x: Tensor) -> Tensor:
        """Return the rows of a block's input: all tokens, or the rows that the block before passed on."""
        after_BKD = self._after_BKD
        if after_BKD is None:
            return x
        assert self.token_BK is not None
        assert self.slot_BN is not None
        self._old_BND = x
        self._after_BKD = None
        z_BKD = gather_rows(x, self.token_BK)
        if not self.drops:
            return z_BKD
        # A fused row is no token. Dropped tokens have the slot -1, for which there is a place in front.
        stands_BK = torch.zeros_like(self.token_BK, dtype=torch.bool)
        with_dropped = F.pad(stands_BK, (1, 0)).scatter(1, self.slot_BN + 1, True)
        stands_BK = with_dropped[:, 1:]
        return torch.where(stands_BK.unsqueeze(-1), z_BKD, after_BKD)

    def take(self, step: Reduced, z_BND: Tensor) -> Tensor:
        """Return the rows after a step, from those before it."""
        if self.token_BK is None:
            self.token_BK = step.index_BK
        else:
            self.token_BK = self.token_BK.gather(1, step.index_BK)
        self.size_BK = step.size_BK
        if not self.restores:
            return step.z_BKD
        if step.joined_BR is None:
            self._old_BND = self._spread(z_BND)
            self.drops = True
        slot_BN = step.slots(z_BND.shape[1])
        if self.slot_BN is not None:
            # A token goes where its row went; dropped ones have no row.
            now_BN = slot_BN.gather(1, self.slot_BN.clamp(min=0))
            slot_BN = torch.where(self.slot_BN >= 0, now_BN, -1)
        self.slot_BN = slot_BN
        return step.z_BKD

    def restore(self, y_BKD: Tensor) -> Tensor:
        """Return all tokens after a block (B, N, D), from its rows."""
        y_BND = self._spread(y_BKD)
        if self.slot_BN is not None:
            # A pass must not hold a tensor that is handed on, as the block's input was.
            self._old_BND = None
            self._after_BKD = y_BKD
        return y_BND

    def _spread(self, y_BKD: Tensor) -> Tensor:
        """Return the row of each token's slot; a token without one has its last state."""
        if self.slot_BN is None:
            return y_BKD
        # Tokens share slots, so the gradient of a gather must add up.
        index_BN1 = self.slot_BN.clamp(min=0).unsqueeze(-1)
        y_BND = y_BKD.gather(1, index_BN1.expand(-1, -1, y_BKD.shape[-1]))
        if not self.drops:
            return y_BND
        assert self._old_BND is not None
        return torch.where((self.slot_BN >= 0).unsqueeze(-1), y_BND, self._old_BND)
