"""A score without parameters: how far a token is from the one at the same position one frame earlier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmod.config import Placement, Score, register_score


@register_score("temporal")
@dataclass(frozen=True, kw_only=True)
class Temporal(Score):
    """The cosine distance of a video's token to the one at the same position one frame earlier.

    Consecutive routed layers share it. A video's first frame is never skipped, so capacity is a share of the tokens of
    later frames. Neither are images skipped, unless `images` is set.

    Args:
        images: Successive images of a prompt with equally many tokens count as frames of a video, for models that get
            videos as images.

    Source: EVS, Bagrov et al., arXiv 2510.14624, as vLLM and SGLang run it on the embeddings of video tokens; the paper
        compares pixels.
    """

    shared: ClassVar[bool] = True
    reads_frames: ClassVar[bool] = True
    images: bool = False  # type: ignore[misc]  # other scores read no frames

    def make(self, placement: Placement) -> nn.Module:
        """Return the module that scores tokens."""
        return TemporalScore()


class TemporalScore(nn.Module):
    """Score tokens by 1 - cos(x, y), where y is the token at the same position one frame earlier.

    Tokens without an earlier frame have the largest distance, 2.

    Example:
        >>> x = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, -1.0]]])
        >>> TemporalScore()(x, earlier_BN=torch.tensor([[-1, -1, 0, 1]]))
        tensor([[2., 2., 0., 2.]])
    """

    @torch.no_grad()
    def forward(self, x_BND: Tensor, valid_BN: Tensor | None = None, earlier_BN: Tensor | None = None) -> Tensor:
        """Return the scores (B, N) of tokens (B, N, D).

        Args:
            earlier_BN: See `TokenGroups`.
        """
        if earlier_BN is None:
            raise ValueError("router 'temporal' needs the frames of a prompt: run the whole model")
        x_BND = x_BND.float()
        index_BN1 = earlier_BN.clamp(min=0).unsqueeze(-1)
        before_BND = x_BND.gather(1, index_BN1.expand_as(x_BND))
        return torch.where(earlier_BN >= 0, 1 - F.cosine_similarity(x_BND, before_BND, dim=-1), 2.0)
