"""A score of your own that reads importance: import this file, and configs may name "important_diversity".

The score is that of max-min selection (`router="diversity"`, DivPrune, arXiv 2503.02175), weighed by the attention that
a token receives in the dense block before.

    python examples/scores/important_diversity.py

Axes: B images, N tokens, D channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mmod
from mmod.config import Placement, WithImportance


@mmod.register_score("important_diversity")
@dataclass(frozen=True)
class ImportantDiversity(WithImportance):
    """Importance of a token times how far it is from those that are chosen before it.

    Args:
        importance: Which queries count, see `mmod.config.WithImportance`.
    """

    reads_importance: ClassVar[bool] = True

    def make(self, place: Placement) -> nn.Module:
        """Return the module that scores tokens."""
        return ImportantDiversityScore(place.prefix)


class ImportantDiversityScore(nn.Module):
    """Score tokens so that the k best are those that selection takes one after the other, for every k.

    Selection takes the token i with the largest `w_i min_j d(i, j)`: w is importance, d the cosine distance, and j runs
    over the tokens that are taken, or over all others before any is.
    """

    def __init__(self, prefix: int) -> None:
        super().__init__()
        self.prefix = prefix

    @torch.no_grad()
    def forward(self, x_BND: Tensor, valid_BN: Tensor | None, importance_BN: Tensor) -> Tensor:
        """Return the scores (B, N) of tokens (B, N, D); those where `valid_BN` is False have -1."""
        unit_BND = F.normalize(x_BND[:, self.prefix :].float(), dim=-1)
        weight_BN = importance_BN[:, self.prefix :].float()
        far_BNN = (1 - unit_BND @ unit_BND.transpose(1, 2)).clamp_min(0)
        tokens = far_BNN.shape[1]
        out_BN = torch.zeros_like(weight_BN, dtype=torch.bool)
        if valid_BN is not None:
            out_BN = ~valid_BN[:, self.prefix :]
        itself_NN = torch.eye(tokens, dtype=torch.bool, device=x_BND.device)
        least_BN = far_BNN.masked_fill(out_BN[:, None] | itself_NN, torch.inf).amin(dim=-1).clamp(max=2)
        score_BN = torch.full_like(weight_BN, -1.0)
        for step in range(tokens):
            value_BN = (weight_BN * least_BN).masked_fill(out_BN, -1.0)
            value_B1, chosen_B1 = value_BN.max(dim=1, keepdim=True)
            # The first token scores above all others; an image whose tokens are all taken keeps its scores.
            first_B1 = 2 * weight_BN.amax(dim=1, keepdim=True) if step == 0 else value_B1
            score_B1 = torch.where(value_B1 < 0, score_BN.gather(1, chosen_B1), first_B1)
            score_BN = score_BN.scatter(1, chosen_B1, score_B1)
            taken_BN = far_BNN.gather(1, chosen_B1.unsqueeze(-1).expand(-1, -1, tokens))[:, 0]
            least_BN = taken_BN if step == 0 else torch.minimum(least_BN, taken_BN)
            out_BN = out_BN.scatter(1, chosen_B1, True)
        return F.pad(score_BN, (self.prefix, 0), value=2.0)


if __name__ == "__main__":
    model = timm.create_model("test_vit").eval()
    mmod.route_(model, mmod.RoutingConfig(router="important_diversity", capacity=0.5, blocks=(1, 3)))
    with mmod.trace(model) as decisions, torch.no_grad():
        model(torch.randn(1, 3, 160, 160))
    print(f"kept by important_diversity: {decisions.kept_shares()}")
