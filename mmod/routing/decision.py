"""Values that routers take and return: which tokens may be skipped, and which are kept.

Axes: B images or samples, N tokens, K kept slots per image or sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

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

    def protected(self, score_BN: Tensor, prefix: int) -> Tensor:
        """Return where a token is always kept, for tokens with these scores (B, N) and a router's prefix."""
        if self.protect_BN is not None:
            return self.protect_BN
        return (torch.arange(score_BN.shape[1], device=score_BN.device) < prefix).expand_as(score_BN)

    def free(self, score_BN: Tensor, prefix: int) -> Tensor:
        """Return where a token may be skipped: it is neither padding nor protected."""
        free_BN = ~self.protected(score_BN, prefix)
        return free_BN if self.valid_BN is None else free_BN & self.valid_BN

    def gated(self, score_BN: Tensor, prefix: int) -> Tensor:
        """Return where the gate weighs a kept token's update: where it may be skipped."""
        return self.free(score_BN, prefix)

    @property
    def counted_BN(self) -> Tensor | None:
        """True where a token counts towards a capacity (B, N); None where all do."""
        return self.valid_BN


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
    def valid_BN(self) -> Tensor | None:
        """False where a token is padding (B, N); None where none is."""
        padded = sum(map(sum, self.sizes)) + sum(self.always) < self.group_BN.numel()
        return self.group_BN > PADDING if padded else None

    @property
    def skips(self) -> bool:
        """Whether any token may be skipped."""
        return any(map(any, self.sizes))

    @property
    def free_BN(self) -> Tensor:
        """True where a token may be skipped (B, N)."""
        return self.group_BN > KEPT

    @property
    def counted_BN(self) -> Tensor:
        """True where a token counts towards a capacity (B, N)."""
        return self.gated_BN

    def free(self, score_BN: Tensor, prefix: int) -> Tensor:
        """Return where a token may be skipped (B, N)."""
        return self.free_BN

    def gated(self, score_BN: Tensor, prefix: int) -> Tensor:
        """Return where the gate weighs a kept token's update (B, N)."""
        return self.gated_BN


class Kept(NamedTuple):
    """The tokens that run.

    Args:
        index_BK: Kept tokens, ascending among the valid slots (B, K).
        valid_BK: False where a slot is empty (B, K); None where every slot is filled.
        total: Number of valid slots in the batch where the host knows it, else None.
        inverse_BN: Slot of each token, -1 for none (B, N), where the selection computed it, else None.
        idle_BK: True where a skipped token fills a slot at gate 0, so that the router learns from it (B, K); None where
            none does.
        image_S: Images that run, where images are kept or skipped as a whole, else None.
    """

    index_BK: Tensor
    valid_BK: Tensor | None = None
    total: int | None = None
    inverse_BN: Tensor | None = None
    idle_BK: Tensor | None = None
    image_S: Tensor | None = None

    def among(self, tokens: int) -> Tensor:
        """Return where one of N tokens is kept (B, N)."""
        valid_BK = torch.ones_like(self.index_BK, dtype=torch.bool) if self.valid_BK is None else self.valid_BK
        if self.idle_BK is not None:
            valid_BK = valid_BK & ~self.idle_BK
        none_BN = valid_BK.new_zeros(len(valid_BK), tokens)
        return none_BN.scatter(1, self.index_BK, valid_BK)


class Weights(NamedTuple):
    """How updates and states are weighed.

    Args:
        gate_BK: Weight of the block's update for each slot (B, K), or None where it is 1.
        skipped_BN: Weight of a skipped token's state (B, N), or None where it is 1.
    """

    gate_BK: Tensor | None = None
    skipped_BN: Tensor | None = None


class Joined(NamedTuple):
    """Which kept tokens the skipped ones join.

    Args:
        slot_BN: Slot of the kept token whose update a token receives, its own where it is kept, -1 where it passes by
            (B, N); None where all skipped tokens pass by.
        size_BK: Number of tokens averaged into each slot (B, K), or None where each slot holds its own token.
        all: No token passes by, as far as shapes tell.
    """

    slot_BN: Tensor | None = None
    size_BK: Tensor | None = None
    all: bool = False


class Evidence(NamedTuple):
    """What a decision is based on; auxiliary losses, traces and audits read it.

    Args:
        score_BN: Raw scores, fp32 (B, N).
        tokens: Which tokens are padding, and which may be skipped.
        importance_BN: Importance of the tokens where it was computed, else None.
        predicted_BN: Logits of the network that predicts what is kept, where there is one.
    """

    score_BN: Tensor
    tokens: TokenMarks | TokenGroups = TokenMarks()
    importance_BN: Tensor | None = None
    predicted_BN: Tensor | None = None

    @property
    def logit_BN(self) -> Tensor:
        """What says of a token alone whether it is kept: the prediction, or else the score (B, N)."""
        return self.score_BN if self.predicted_BN is None else self.predicted_BN


class Routing(NamedTuple):
    """One block's decision for a batch: made once by its router, then only applied.

    Args:
        kept: Which tokens run.
        evidence: What was known of the tokens.
        weights: How updates and states are weighed.
        joined: Which kept tokens the skipped ones join.
    """

    kept: Kept
    evidence: Evidence
    weights: Weights = Weights()
    joined: Joined = Joined()

    @property
    def score_BN(self) -> Tensor:
        """Raw scores, fp32 (B, N)."""
        return self.evidence.score_BN

    @property
    def keep_BN(self) -> Tensor:
        """True where a token is kept (B, N)."""
        return self.kept.among(self.evidence.score_BN.shape[1])

    def to(self, device: torch.device) -> Routing:
        """Return the same decision on another device."""
        if self.kept.index_BK.device == device:
            return self
        return tree_map_only(Tensor, lambda value: value.to(device), self)

    def detach(self) -> Routing:
        """Return the same decision without its autograd graph."""
        return tree_map_only(Tensor, lambda value: value.detach(), self)
