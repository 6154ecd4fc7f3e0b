"""A score that learns: one weight vector."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from mmod.config import Placement, WithImportance, register_score
from mmod.ops.casting import autocasts, without_autocast
from mmod.routing.added import Drawn


@register_score("linear")
@dataclass(frozen=True, kw_only=True)
class Linear(WithImportance):
    """A learned linear score, `w . x / rms(x) + b` of a token x. A threshold is compared with its sigmoid.

    By default each routed block learns a weight vector w of its own. Scores are computed in fp32, under autocast too.

    Args:
        normalize: Divide the score's input by its root mean square.
        bias: Give the score a bias; a linear gate has one anyway, and so has a score that starts elsewhere than at 0.
        init_std: Standard deviation of the initial weight. None chooses one at which every gate starts within a percent
            of the dense model's.
        per: What is decided about: each "token", or the whole "sequence" by the mean score of its tokens, which needs
            a threshold. No token is protected then.
        initial: Value around which scores start. None means 1 for a linear gate, which is the score itself, and 0
            otherwise. A sigmoid gate that starts near 1, as with 3, leaves a pretrained model what it was.
        tied: All routed layers of a language model score with one weight, stored once (gamma-MoD).
        shared: Consecutive routed blocks of an image or caption encoder use the score of the first of them, which alone
            has a weight. At equal capacity they keep the same tokens, decided once, in training too.
        importance: Where the loss "importance" teaches the score: which queries count, as for "attention".

    Source: Raposo et al., arXiv 2404.02258, section 3.4, where the score reads the raw tokens and has no bias.
    """

    learns: ClassVar[bool] = True
    normalize: bool = True
    bias: bool = False
    init_std: Annotated[float | None, "[0, inf)"] = None
    per: Literal["token", "sequence"] = "token"
    initial: float | None = None
    # Other scores are shared by class, this one by choice.
    tied: bool = False  # type: ignore[misc]
    shared: bool = False  # type: ignore[misc]

    @property
    def per_image(self) -> bool:
        """Whether all tokens of an image have one score."""
        return self.per == "sequence"

    def make(self, placement: Placement) -> nn.Module:
        """Return the module that scores tokens."""
        is_gate = placement.gate.name == "linear"
        initial = self.initial
        if initial is None:
            # A linear gate is the score itself, so a pretrained block keeps its function only if scores start at 1.
            initial = 1.0 if is_gate else 0.0
        init_std = self.init_std
        if init_std is None:
            init_std = near_dense_std(placement.dim, placement.gate.scale)
        return LinearScore(
            placement.dim,
            bias=self.bias or is_gate or initial != 0,
            initial=initial,
            normalize=self.normalize,
            init_std=init_std,
            per_image=self.per_image,
            device=placement.device,
            dtype=placement.dtype,
        )


class LinearScore(Drawn):
    """Score tokens by a learned vector: `score = w . x / rms(x) + b`, computed in fp32 under autocast too.

    Args:
        initial: Value around which the scores start; other than 0 it needs the bias.
        per_image: Give each token the mean score of its image.

    Source: Raposo et al., arXiv 2404.02258, section 3.4 (linear, no bias, raw input). A normalised input keeps the
    size of the score apart from the growth of the residual stream with depth.

    Example:
        >>> LinearScore(8)(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5])
    """

    def __init__(
        self,
        dim: int,
        *,
        bias: bool = False,
        normalize: bool = True,
        init_std: float = 0.0,
        initial: float = 0.0,
        per_image: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.normalize = normalize
        self.init_std = init_std
        self.initial = initial
        self.per_image = per_image
        self.alpha = -1 / math.sqrt(dim)
        self.weight = nn.Parameter(torch.empty(1, dim, device=device, dtype=dtype))
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.reset_parameters()

    def draw(self) -> None:
        """Draw the initial weight."""
        nn.init.normal_(self.weight, std=self.init_std)
        if self.bias is not None:
            nn.init.constant_(self.bias, self.initial)

    def forward(self, x_BND: Tensor, valid_BN: Tensor | None = None) -> Tensor:
        """Return the scores (B, N) of tokens (B, N, D)."""
        if autocasts(x_BND):
            with without_autocast(x_BND):
                return self.forward(x_BND, valid_BN)
        weight = self.weight
        bias = self.bias
        if weight.is_meta:
            self.check_values(x_BND)
        if x_BND.dtype != torch.float32:
            x_BND = x_BND.float()
        weight_D = weight[0]
        if weight_D.dtype != torch.float32:
            weight_D = weight_D.float()
        score_BN = torch.matmul(x_BND, weight_D)
        if self.normalize:
            # Dividing the product instead of the tokens reads them twice and writes them never.
            norm_BN = torch.linalg.vector_norm(x_BND, dim=-1)
            # 1e-6 + rms(x) in one operation.
            score_BN = score_BN / torch.rsub(norm_BN, 1e-6, alpha=self.alpha)
        if bias is not None:
            score_BN = score_BN + bias.float()
        if self.per_image:
            return mean_score(score_BN, valid_BN)
        return score_BN


def mean_score(score_BN: Tensor, valid_BN: Tensor | None = None) -> Tensor:
    """Return the mean score of each image, for each of its tokens (B, N).

    Args:
        valid_BN: False where a token does not count (B, N), or None.
    """
    if valid_BN is None:
        return score_BN.mean(dim=1, keepdim=True).expand_as(score_BN)
    total_B1 = torch.where(valid_BN, score_BN, 0.0).sum(dim=1, keepdim=True)
    return (total_B1 / valid_BN.sum(dim=1, keepdim=True).clamp(min=1)).expand_as(score_BN)


def near_dense_std(dim: int, gate_scale: float) -> float:
    """Return an initial weight scale at which tanh gates of normalised tokens start within a percent of 1.

    A weight of exactly zero would tie every score, and ties keep the lowest positions of every image. The router would
    start with the upper rows of the picture, and only ever see a gradient from there.
    """
    return 0.01 / (2.5 * max(gate_scale, 0.01) * math.sqrt(dim))
