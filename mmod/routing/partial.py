"""Slots that run at a part of their weight, so that a capacity has a gradient.

Axes: B images, N tokens, K slots per image.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from mmod.ops.select import kept_count
from mmod.routing.decision import Routing


class PartialSlots(NamedTuple):
    """A capacity between two others: tokens that only the larger one keeps run at a part of their weight.

    Args:
        lower: The smaller capacity; the larger one is the router's.
        share: Weight of what the smaller one leaves out, in [0, 1], a scalar that may carry a gradient.
    """

    lower: Fraction
    share: Tensor

    def weigh(self, routing: Routing, prefix: int) -> Routing:
        """Return a decision at the larger capacity with the weights of the one between.

        Args:
            routing: The decision.
            prefix: Number of tokens that are always kept.

        Example:
            >>> scores, kept = torch.tensor([[0.1, 0.9, 0.5, 0.2]]), torch.tensor([[1, 2]])
            >>> PartialSlots(Fraction(1, 4), torch.tensor(0.3)).weigh(Routing(scores, kept), prefix=0).gate_BK
            tensor([[1.0000, 0.3000]])
        """
        tokens = routing.score_BN.shape[1]
        always_BN = routing.protect_BN
        if always_BN is None:
            always_BN = (torch.arange(tokens, device=routing.score_BN.device) < prefix).expand_as(routing.score_BN)
        level_BK = routing.score_BN.detach().masked_fill(always_BN, torch.inf).gather(1, routing.index_BK)
        if routing.valid_BK is not None:
            level_BK = level_BK.masked_fill(~routing.valid_BK, -torch.inf)
        rank_BK = level_BK.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        if routing.real_BN is None:
            whole_BK = rank_BK < kept_count(tokens, self.lower, prefix)
        else:
            count_B1 = routing.real_BN.sum(1, keepdim=True) * self.lower.numerator // self.lower.denominator
            whole_BK = rank_BK < count_B1.clamp(min=max(1, prefix))
        # Distributed training waits for a gradient of every parameter, one that is 0 too.
        weight_BK = torch.where(whole_BK, 1 + 0 * self.share, self.share)
        return routing._replace(gate_BK=weight_BK if routing.gate_BK is None else routing.gate_BK * weight_BK)
