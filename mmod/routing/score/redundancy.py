"""A score without parameters: how unlike a token is to the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmod.config import Placement, Score, register_score


@register_score("redundancy")
@dataclass(frozen=True)
class Redundancy(Score):
    """How unlike a token is to its most similar neighbour in the other half of the tokens, see `RedundancyScore`.

    Consecutive routed blocks of equal capacity share it.
    """

    shared: ClassVar[bool] = True
    relative: ClassVar[bool] = True

    def make(self, place: Placement) -> nn.Module:
        """Return the module that scores tokens."""
        return RedundancyScore()


class RedundancyScore(nn.Module):
    """Score tokens so that those which another token can stand for best come last.

    Tokens are dealt to two halves by turns, so that the copies of something are not all dropped. A token of the first
    half has the score `1 - cos(x, y)`, `y` being the token of the second half that is most like it. Those of the second
    half are kept as long as there is room; among themselves they rank by the same measure against every other of them.

    Source: the bipartite matching of ToMe, Bolya et al., arXiv 2210.09461, on tokens in the place of keys.

    Example:
        >>> x = torch.tensor([[[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [1.0, 0.0]]])
        >>> RedundancyScore()(x).argsort(descending=True).tolist()
        [[3, 1, 2, 0]]
    """

    def forward(self, x_BND: Tensor, valid_BN: Tensor | None = None) -> Tensor:
        """Return the scores (B, N) for tokens (B, N, D); padding, where `valid_BN` is False, is like nothing."""
        with torch.no_grad():
            unit_BND = F.normalize(x_BND.detach().float(), dim=-1)
            if valid_BN is not None:
                unit_BND = unit_BND * valid_BN.unsqueeze(-1)
            return _scores(unit_BND)


def _scores(unit_BND: Tensor) -> Tensor:
    """Return the scores of unit vectors; the second half's own stand above those of the first."""
    tokens = unit_BND.shape[1]
    if tokens < 2:
        return unit_BND.new_ones(unit_BND.shape[:2])
    first_BND, second_BND = unit_BND[:, ::2], unit_BND[:, 1::2]
    score_BN = 1 - (first_BND @ second_BND.transpose(1, 2)).amax(dim=-1)
    # A cosine is at least -1, so no score of the first half is above 2.
    halves_BN = torch.cat([score_BN, _scores(second_BND) + 2], dim=1)
    place_N = torch.arange(tokens, device=unit_BND.device)
    return halves_BN[:, place_N // 2 + place_N % 2 * first_BND.shape[1]]
