"""A score without parameters: how unlike a token is to those before it in an evenly spread order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor, nn

from mmod.config import Placement, Score, register_score
from mmod.ops import redundancy_scores, unit_rows


@register_score("redundancy")
@dataclass(frozen=True, kw_only=True)
class Redundancy(Score):
    """How unlike a token is to those before it in an evenly spread order, which consecutive routed blocks share.

    Args:
        channels: Compare tokens by this many signed sums of their channels, which costs less. None compares all
            channels.
    """

    shared: ClassVar[bool] = True
    compares: ClassVar[bool] = True
    channels: Annotated[int | None, "[1, inf)"] = None  # type: ignore[misc]  # other scores compare all channels

    def make(self, placement: Placement) -> nn.Module:
        """Return the module that scores tokens."""
        return RedundancyScore(placement.prefix, self.channels)


class RedundancyScore(nn.Module):
    """Score tokens by `redundancy_scores`, so that those which another token can stand for come last."""

    def __init__(self, prefix: int = 0, channels: int | None = None) -> None:
        super().__init__()
        self.prefix = prefix
        self.channels = channels

    def forward(self, x_BND: Tensor, valid_BN: Tensor | None = None, unit_BNE: Tensor | None = None) -> Tensor:
        """Return the scores (B, N) for tokens (B, N, D); `unit_BNE` are their `unit_rows`, if computed before."""
        if unit_BNE is None:
            unit_BNE = unit_rows(x_BND, self.channels)
        return redundancy_scores(unit_BNE, self.prefix, valid_BN)
