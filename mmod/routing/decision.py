"""Values that routers take and return: which tokens may be skipped, which are kept, and how they are weighed.

Axes: B images or samples, N tokens, M rows of the decision before, K kept slots per image or sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import register_constant, tree_map_only

from mmod.config import RoutingConfig
from mmod.ops.select import Kept, short_repr

# Groups of tokens that no router chooses among.
PADDING, KEPT = -1, 0


class TokenMasks(NamedTuple):
    """Which tokens of images or captions are padding, and which are always kept.

    Args:
        valid_BN: False at padding (B, N); None without padding.
        protect_BN: True at tokens that are always kept, at most the router's prefix per image; None for the leading.
    """

    valid_BN: Tensor | None = None
    protect_BN: Tensor | None = None

    @property
    def queries_BN(self) -> Tensor | None:
        """True at tokens whose attention counts as importance (B, N); None for all."""
        return self.valid_BN

    def protected(self, score_BN: Tensor, prefix: int) -> Tensor:
        """Return which tokens are always kept (B, N), for a router's prefix."""
        if self.protect_BN is not None:
            return self.protect_BN
        return (torch.arange(score_BN.shape[1], device=score_BN.device) < prefix).expand_as(score_BN)

    def free(self, score_BN: Tensor, prefix: int) -> Tensor:
        """Return which tokens may be skipped (B, N): neither padding nor protected ones."""
        free_BN = ~self.protected(score_BN, prefix)
        if self.valid_BN is None:
            return free_BN
        return free_BN & self.valid_BN

    def counted(self, score_BN: Tensor) -> Tensor:
        """Return the tokens of which a share is kept (B, N): all that exist."""
        if self.valid_BN is None:
            return torch.ones_like(score_BN, dtype=torch.bool)
        return self.valid_BN

    def gated(self, score_BN: Tensor, prefix: int) -> Tensor:
        """Return the tokens whose update the gate weighs if they are kept (B, N)."""
        return self.free(score_BN, prefix)


class PackedSamples(NamedTuple):
    """Where the tokens of packed samples stand, if each sample gets a row of its own.

    Args:
        token_SL: Index of each sample's tokens among all tokens of the batch (S, L).
        valid_SL: False at empty slots and at padding (S, L).
        slot_BN: Index of every token among the slots of all samples (B, N).
        share_BN: Of the tokens of a row whose attention counts as importance, the share that is the sample's (B, N).
    """

    token_SL: Tensor
    valid_SL: Tensor
    slot_BN: Tensor
    share_BN: Tensor

    def split(self, rows: Tensor) -> Tensor:
        """Return the rows (S, L, ...) of samples from rows (B, N, ...) that pack them."""
        return rows.flatten(0, 1)[self.token_SL]

    def pack(self, values_SL: Tensor) -> Tensor:
        """Return the values (B, N) of packed tokens from those of samples."""
        return values_SL.flatten()[self.slot_BN]


class TokenGroups(NamedTuple):
    """Which tokens of texts may be skipped, for all routed layers of a forward pass.

    Counts are plain numbers, so that no layer synchronises with the device to know its shapes.

    Args:
        group_BN: -1 for padding, 0 for tokens that are always kept, and from 1 on the group of tokens that may be
            skipped (B, N). Top-k is taken within each group.
        gated_BN: True where the gate weighs a kept token's update (B, N).
        limit_BN: Bounds negated scores before they are sorted (B, N). -inf puts tokens that are always kept first, and
            NaN puts padding last; inf leaves those that may be skipped as they are.
        sizes: Sizes of the groups of every sample.
        always: Number of tokens that are always kept, per sample.
        strict: A capacity that keeps no token of a group is an error.
        alone: Every sample has one token, and a slot for it, kept or not.
        causal: Attention is causal over the valid tokens, whatever the mask.
        importance: Returns importance, or scores of pixels, from outside the layers (B, N); None without.
        segments: The packed samples, if rows pack several; each is routed as if it were alone.
        earlier_BN: Index in its row of the token at the same position one frame earlier, -1 for none (B, N); None if no
            score reads frames.
        prompt_BN: True at tokens of prompts, before the labelled answers (B, N); None if all are.
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
    segments: PackedSamples | None = None
    earlier_BN: Tensor | None = None
    prompt_BN: Tensor | None = None

    @property
    def queries_BN(self) -> Tensor | None:
        """True at tokens whose attention counts as importance (B, N); None for all."""
        return self.valid_BN if self.prompt_BN is None else self.prompt_BN

    @property
    def valid_BN(self) -> Tensor | None:
        """False at padding (B, N); None without padding."""
        # From counts on the host, so that no layer waits for the device.
        there = sum(map(sum, self.sizes)) + sum(self.always)
        if there >= self.group_BN.numel():
            return None
        return self.group_BN > PADDING

    @property
    def skips(self) -> bool:
        """Whether any token may be skipped."""
        return any(map(any, self.sizes))

    @property
    def free_BN(self) -> Tensor:
        """True at tokens that may be skipped (B, N)."""
        return self.group_BN > KEPT

    def free(self, score_BN: Tensor, prefix: int) -> Tensor:
        """Return which tokens may be skipped (B, N)."""
        return self.free_BN

    def counted(self, score_BN: Tensor) -> Tensor:
        """Return the tokens of which a share is kept (B, N): those that may be skipped."""
        return self.free_BN

    def gated(self, score_BN: Tensor, prefix: int) -> Tensor:
        """Return the tokens whose update the gate weighs if they are kept (B, N)."""
        return self.gated_BN


class Joined(NamedTuple):
    """Which kept tokens the skipped ones join.

    Args:
        slot_BN: Slot whose update a token receives, -1 for none (B, N); None if only kept tokens receive one.
        size_BK: Number of tokens averaged into each slot (B, K); None if every slot holds one token.
        all: Every token receives an update, as far as shapes tell.
        bias: Bias by which a key of attention counts as the tokens of its slot (B, 1, 1, K), with `size_BK`.
        slot_BM: Slot of each row of the decision before, where it is known of rows and not of tokens alone (B, M).
    """

    slot_BN: Tensor | None = None
    size_BK: Tensor | None = None
    all: bool = False
    bias: Tensor | None = None
    slot_BM: Tensor | None = None


@dataclass(frozen=True)
class Rule:
    """What a router decides by. It has no leaves in a decision's pytree, which are tensors and numbers.

    Args:
        config: How to score, select and gate; the score is the router's whatever the config says.
        capacity: Share of tokens kept.
    """

    # Left out of the hash, as configs may hold mappings, and of the text, as they are long.
    config: RoutingConfig = field(repr=False, hash=False)
    capacity: Fraction

    def matches(self, other: Rule | None) -> bool:
        """Return whether both decide alike on the same scores."""
        if other is None:
            return False
        # Blocks are routed by one config, so that the slow comparison of fields is rare.
        if self.config is not other.config and self.config != other.config:
            return False
        return self.capacity is other.capacity or self.capacity == other.capacity


# Not as the tuple of its values, which would be leaves that compiling, exporting and checkpointing take for inputs.
register_constant(Rule)


class Routing(NamedTuple):
    """The decision of a block for a batch: which tokens run, with what weight, and the scores behind it.

    Attributes:
        kept: Which rows run, in which slots.
        score_BN: Raw scores, fp32 (B, N).
        gate_BK: Weights of the block's updates (B, K); None for 1.
        skipped_BN: Weights of skipped tokens' states (B, N); None for 1.
        joined: Which kept token a skipped one joined, if any.
        tokens: Which tokens are padding, and which may be skipped.
        importance_BN: Importance of the tokens, where it was computed (B, N).
        predicted_BN: Logits of the network that predicts the kept tokens, if there is one (B, N).
        rule: What the router decided by; None if no router decided.
    """

    kept: Kept
    score_BN: Tensor
    gate_BK: Tensor | None = None
    skipped_BN: Tensor | None = None
    joined: Joined = Joined()
    tokens: TokenMasks | TokenGroups = TokenMasks()
    importance_BN: Tensor | None = None
    predicted_BN: Tensor | None = None
    rule: Rule | None = None

    def __repr__(self) -> str:
        # Whole tensors would flood a screen.
        return short_repr(self)

    @property
    def keep_BN(self) -> Tensor:
        """True at kept tokens (B, N)."""
        return self.kept.among(self.score_BN.shape[1])

    @property
    def logit_BN(self) -> Tensor:
        """Logits that decide each token independently: predicted ones, or else the scores (B, N)."""
        return self.score_BN if self.predicted_BN is None else self.predicted_BN

    @property
    def counted_BN(self) -> Tensor:
        """True at the tokens that capacities and kept shares refer to (B, N)."""
        return self.tokens.counted(self.score_BN)

    def free(self, prefix: int) -> Tensor:
        """Return which tokens may be skipped (B, N), for a router's prefix."""
        return self.tokens.free(self.score_BN, prefix)

    def to(self, device: torch.device) -> Routing:
        """Return the same decision on another device."""
        if self.kept.index_BK.device == device:
            return self
        return tree_map_only(Tensor, lambda value: value.to(device), self)

    def detach(self) -> Routing:
        """Return the same decision without its autograd graph."""
        return tree_map_only(Tensor, lambda value: value.detach(), self)


def only_free(value_BN: Tensor, free_BN: Tensor) -> Tensor:
    """Return values of the tokens that may be skipped, in order, and 0 after the last one of a sample (B, F).

    Example:
        >>> only_free(torch.tensor([[5, 6, 7]]), torch.tensor([[False, True, True]]))
        tensor([[6, 7]])
    """
    # A stable sort of zeros and ones: those that may be skipped come first, in their order.
    most = int(free_BN.sum(1).max())
    first_BN = (~free_BN).to(torch.uint8).sort(dim=1, stable=True).indices[:, :most]
    return value_BN.gather(1, first_BN).masked_fill(~free_BN.gather(1, first_BN), 0)
