"""A score without parameters that spreads the kept tokens out: far from each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmod.config import Placement, Score, register_score
from mmod.ops import unit_rows


@register_score("diversity")
@dataclass(frozen=True)
class Diversity(Score):
    """How far a token is from those chosen before it: the cosine distance to the nearest of them.

    The first one chosen is the token that is farthest from its nearest neighbour. Consecutive routed blocks share the
    score.

    Source: DivPrune, Alvar et al., arXiv 2503.02175.
    """

    shared: ClassVar[bool] = True
    compares: ClassVar[bool] = True

    def make(self, placement: Placement) -> nn.Module:
        """Return the module that scores tokens."""
        return DiversityScore(placement.prefix)


class DiversityScore(nn.Module):
    """Score tokens so that the k best are those that max-min selection takes, for every k.

    Selection takes the token i with the largest `min_j d(i, j)`, where d is the cosine distance. Here j runs over the
    tokens that are taken, or over all others before any is. That value is the token's score; the first token has 2,
    which none exceeds. `prefix` tokens take no part and have the score 2.

    Source: DivPrune, Alvar et al., arXiv 2503.02175, algorithm 1; there the tokens are the language model's inputs.

    Example:
        >>> x = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.1], [-1.0, 0.0]]])
        >>> DiversityScore()(x).topk(2).indices.sort().values
        tensor([[0, 3]])
    """

    def __init__(self, prefix: int = 0) -> None:
        super().__init__()
        self.prefix = prefix

    @torch.no_grad()
    def forward(self, x_BND: Tensor, valid_BN: Tensor | None = None, unit_BNE: Tensor | None = None) -> Tensor:
        """Return the scores (B, N) of tokens (B, N, D); those where `valid_BN` is False take no part and have -1."""
        if unit_BNE is None:
            unit_BNE = unit_rows(x_BND)
        unit_BND = unit_BNE[:, self.prefix :]
        tokens = unit_BND.shape[1]
        far_BNN = (1 - unit_BND @ unit_BND.transpose(1, 2)).clamp_min(0)
        out_BN = torch.zeros_like(far_BNN[:, 0], dtype=torch.bool)
        if valid_BN is not None:
            out_BN = ~valid_BN[:, self.prefix :]
        score_BN = torch.full_like(far_BNN[:, 0], -1.0)
        # Tokens that take no part are near to nothing; nor is a token near to itself.
        itself_NN = torch.eye(tokens, dtype=torch.bool, device=x_BND.device)
        others_BNN = far_BNN.masked_fill(out_BN[:, None] | itself_NN, torch.inf)
        least_BN = others_BNN.amin(dim=-1).clamp(max=2)
        for step in range(tokens):
            value_BN = least_BN.masked_fill(out_BN, -1.0)
            value_B1, chosen_B1 = value_BN.max(dim=1, keepdim=True)
            # An image whose tokens are all taken chooses one of them again, which keeps its score.
            first_B1 = torch.full_like(value_B1, 2.0) if step == 0 else value_B1
            score_B1 = torch.where(value_B1 < 0, score_BN.gather(1, chosen_B1), first_B1)
            score_BN = score_BN.scatter(1, chosen_B1, score_B1)
            row_B1N = chosen_B1.unsqueeze(-1).expand(-1, -1, tokens)
            taken_BN = far_BNN.gather(1, row_B1N)[:, 0]
            least_BN = taken_BN if step == 0 else torch.minimum(least_BN, taken_BN)
            out_BN = out_BN.scatter(1, chosen_B1, True)
        return F.pad(score_BN, (self.prefix, 0), value=2.0)
