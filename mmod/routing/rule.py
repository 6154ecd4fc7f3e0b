"""How a router decides in the passes of one thread.

Axes: B images, N tokens, K slots per image.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from mmod.config import RoutingConfig
from mmod.ops.select import kept_count
from mmod.routing.decision import Routing, TokenMarks


class PartialSlots(NamedTuple):
    """A capacity between two others: tokens that only the larger one keeps run at reduced weight.

    Args:
        lower: The smaller capacity; the larger one is the router's.
        share: Weight of the tokens that the smaller one drops, in [0, 1]; a scalar that may carry a gradient.
    """

    lower: Fraction
    share: Tensor

    def weigh(self, routing: Routing, prefix: int) -> Routing:
        """Return a decision at the larger capacity with the weights of the capacity between."""
        score_BN = routing.score_BN
        kept = routing.kept
        tokens = routing.evidence.tokens
        assert isinstance(tokens, TokenMarks)
        level_BN = score_BN.detach().masked_fill(tokens.protected(score_BN, prefix), torch.inf)
        level_BK = level_BN.gather(1, kept.index_BK)
        if kept.valid_BK is not None:
            level_BK = level_BK.masked_fill(~kept.valid_BK, -torch.inf)
        rank_BK = level_BK.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        if tokens.valid_BN is None:
            whole_BK = rank_BK < kept_count(score_BN.shape[1], self.lower, prefix)
        else:
            count_B1 = tokens.valid_BN.sum(1, keepdim=True) * self.lower.numerator // self.lower.denominator
            whole_BK = rank_BK < count_B1.clamp(min=max(1, prefix))
        # Distributed training needs a gradient of every parameter, even 0.
        weight_BK = torch.where(whole_BK, 1 + 0 * self.share, self.share)
        gate_BK = routing.weights.gate_BK
        weights = routing.weights._replace(gate_BK=weight_BK if gate_BK is None else gate_BK * weight_BK)
        return routing._replace(weights=weights)


class Rule(NamedTuple):
    """What a router decides by.

    Args:
        config: How to score, select and gate; the score is the router's whatever the config says.
        capacity: Share of tokens kept.
        partial: Slots at a part of their weight, while the capacity is learned; None where every slot runs in full.
    """

    config: RoutingConfig
    capacity: Fraction
    partial: PartialSlots | None = None
