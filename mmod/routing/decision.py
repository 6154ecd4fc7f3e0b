"""Values that routers take and return: which tokens may be skipped, and which are kept.

Axes: B images or samples, N tokens, K kept slots per image or sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# Groups of tokens that no router chooses among.
PADDING, KEPT = -1, 0


class TokenMarks(NamedTuple):
    """What a router must know of the tokens of images or captions.

    Args:
        valid_BN: False where a token is padding (B, N); None where none is.
        protect_BN: True where a token is always kept (B, N), as many in each image as the router's prefix at most; None
            where those are the leading ones.
    """

    valid_BN: Tensor | None = None
    protect_BN: Tensor | None = None


class TokenGroups(NamedTuple):
    """Which tokens of a batch may be skipped, for all routed layers of a forward pass.

    Counts stand beside the tensors as plain numbers, so that no layer waits for the device to learn its shapes.

    Args:
        group_BN: -1 for padding, 0 for tokens that are always kept, and the number of the group, from 1 on, for
            tokens that may be skipped; the top-k is taken within each group (B, N).
        gated_BN: True where the gate weighs a kept token's update (B, N).
        limit_BN: Upper bound on the ascending sort key (B, N): -inf where a token is always kept, inf where it may be
            skipped, NaN where it is padding.
        sizes: For each sample the sizes of its groups.
        always: For each sample the number of tokens that are always kept.
        strict: A capacity that keeps no token of a group is an error.
        alone: Every sample has one token, and a slot for it whether it is kept or not.
        causal: A token attends to all valid ones up to itself and to no other, whatever mask says so.
        importance: Returns the importance (B, N) that was computed elsewhere than in the layers; None where none was.
    """

    group_BN: Tensor
    gated_BN: Tensor
    limit_BN: Tensor
    sizes: tuple[tuple[int, ...], ...]
    always: tuple[int, ...]
    strict: bool = True
    alone: bool = False
    causal: bool = False
    importance: Callable[[], Tensor] | None = None

    @property
    def padded(self) -> bool:
        """Whether a token is padding."""
        return sum(map(sum, self.sizes)) + sum(self.always) < self.group_BN.numel()

    @property
    def skips(self) -> bool:
        """Whether any token may be skipped."""
        return any(map(any, self.sizes))

    @property
    def free_BN(self) -> Tensor:
        """True where a token may be skipped (B, N)."""
        return self.group_BN > KEPT


class Routing(NamedTuple):
    """One block's decision for a batch: made once by its router, then only applied.

    Args:
        score_BN: Raw scores, fp32 (B, N).
        index_BK: Kept tokens, ascending among the valid slots (B, K).
        gate_BK: Weight of the block's update for each slot, or None where it is 1.
        valid_BK: False where a slot is empty; None where every slot is filled.
        skip_weight_BN: Weight of a skipped token's state, or None where it is 1.
        importance_BN: Importance of the tokens where it was computed, else None.
        total: Number of valid slots in the batch where the host knows it, else None.
        groups: Which tokens may be skipped, in a language model, else None.
        predicted_BN: Logits of the network that predicts what is kept, where there is one.
        inverse_BN: Slot of each token, -1 where it has none, where the selection found it on the way, else None.
        real_BN: False where a token is padding, or None where none is, or groups say so.
        protect_BN: True where a token is always kept, or None where those are the leading ones, or groups say so.
        join_BN: Slot of the kept token whose update a token is given, its own where it is kept, -1 where it passes by
            (B, N); None where all skipped tokens pass by.
        size_BK: Number of tokens that were averaged into each slot (B, K), or None where each slot holds its own token.
        idle_BK: True where a token counts as skipped and fills a slot only so that the router learns from it, at a gate
            of 0 (B, K); None where there is none.
        image_S: Images that run, where images are kept or skipped as a whole, else None.
    """

    score_BN: Tensor
    index_BK: Tensor
    gate_BK: Tensor | None = None
    valid_BK: Tensor | None = None
    skip_weight_BN: Tensor | None = None
    importance_BN: Tensor | None = None
    total: int | None = None
    groups: TokenGroups | None = None
    predicted_BN: Tensor | None = None
    inverse_BN: Tensor | None = None
    real_BN: Tensor | None = None
    protect_BN: Tensor | None = None
    join_BN: Tensor | None = None
    size_BK: Tensor | None = None
    idle_BK: Tensor | None = None
    image_S: Tensor | None = None

    @property
    def all_join(self) -> bool:
        """Whether no token passes by, as far as can be told without looking."""
        return self.valid_BK is None and self.real_BN is None and self.protect_BN is None

    @property
    def keep_BN(self) -> Tensor:
        """True where a token is kept (B, N)."""
        valid_BK = torch.ones_like(self.index_BK, dtype=torch.bool) if self.valid_BK is None else self.valid_BK
        if self.idle_BK is not None:
            valid_BK = valid_BK & ~self.idle_BK
        empty_BN = torch.zeros(self.score_BN.shape, dtype=torch.bool, device=self.score_BN.device)
        return empty_BN.scatter(1, self.index_BK, valid_BK)

    def to(self, device: torch.device) -> Routing:
        """Return the same decision on another device.

        Args:
            device: The device.
        """
        if self.index_BK.device == device:
            return self
        return Routing(*(value.to(device) if isinstance(value, Tensor) else value for value in self))  # type: ignore[arg-type]

    def detach(self) -> Routing:
        """Return the same decision without its autograd graph."""
        return Routing(*(value.detach() if isinstance(value, Tensor) else value for value in self))  # type: ignore[arg-type]
