"""A score without parameters: how unlike a token is to those before it in an evenly spread order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmod.config import Placement, Score, register_score
from mmod.ops import signed_sums
from mmod.routing.score.stride import spread_evenly
from mmod.values import check_fields


@register_score("redundancy")
@dataclass(frozen=True, kw_only=True)
class Redundancy(Score):
    """How unlike a token is to those that would be kept before it, see `RedundancyScore`.

    Consecutive routed blocks share it.

    Args:
        channels: Compare tokens by so many sums of their channels, which costs less; see `mmod.ops.signed_sums`. None
            compares all channels.
    """

    shared: ClassVar[bool] = True
    compares: ClassVar[bool] = True
    channels: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, "router", channels="[1, inf)")

    def make(self, place: Placement) -> nn.Module:
        """Return the module that scores tokens."""
        return RedundancyScore(place.prefix, self.channels)

    def compared(self, x_BND: Tensor) -> Tensor:
        """Return by what tokens are compared; see `Score.compared`."""
        return signed_sums(x_BND, self.channels)


class RedundancyScore(nn.Module):
    """Score tokens so that those which another token can stand for come last.

    Tokens are ordered as `StrideScore` ranks them, evenly spread at any length. The score of a token is the smallest
    cosine distance to one before it, in [0, 2], so that of several that are alike the first alone has a high one.

    Args:
        prefix: Leading tokens, which can stand for no other; they have the score 2.
        channels: As for `Redundancy`.

    Example:
        >>> x = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.1], [1.0, 0.0]]])
        >>> RedundancyScore()(x)
        tensor([[2.0000, 0.9005, 0.0050, 0.0000]])
    """

    def __init__(self, prefix: int = 0, channels: int | None = None) -> None:
        super().__init__()
        self.prefix = prefix
        self.channels = channels

    def forward(self, x_BND: Tensor, valid_BN: Tensor | None = None) -> Tensor:
        """Return the scores (B, N) for tokens (B, N, D); padding, where `valid_BN` is False, stands for nothing."""
        with torch.no_grad():
            unit_BND = F.normalize(signed_sums(x_BND[:, self.prefix :], self.channels), dim=-1)
            order_BN = spread_evenly(unit_BND.shape[1], x_BND.device).unsqueeze(0)
            if valid_BN is not None:
                # By rank among the tokens that count, so that neither padding nor text moves the order.
                order_BN = order_BN[0, (valid_BN[:, self.prefix :].cumsum(1) - 1).clamp(min=0)]
            later_BNN = order_BN.unsqueeze(1) <= order_BN.unsqueeze(2)
            alike_BNN = (unit_BND @ unit_BND.transpose(1, 2)).masked_fill(later_BNN, -1.0)
            if valid_BN is not None:
                alike_BNN = alike_BNN.masked_fill(~valid_BN[:, None, self.prefix :], -1.0)
            return F.pad(1 - alike_BNN.amax(dim=-1), (self.prefix, 0), value=2.0)
