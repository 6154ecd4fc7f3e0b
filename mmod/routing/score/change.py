"""A score without parameters: how far the dense block before moved a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmod.config import CHANGE, Placement, Score, register_score


@register_score(CHANGE)
@dataclass(frozen=True)
class Change(Score):
    """How far the dense block before moved a token: the Euclidean distance between its input and its output.

    Consecutive routed blocks share it. It needs no attention map, and its cost is linear in the number of tokens. With
    `Merged(before="mlp")` it is how far the first routed block's own attention moved the token. A threshold is compared
    with it relative to the image's mean.

    Source: Representation Shift, Choi et al., arXiv 2508.00367 (of attention or MLP); V2Drop, Chen et al., arXiv
        2509.01552 (of a layer of the language model); IPCV, arXiv 2512.18747 (of a layer of the vision tower).
    """

    shared: ClassVar[bool] = True
    reads_importance: ClassVar[bool] = True
    relative: ClassVar[bool] = True
    importance: ClassVar[str] = CHANGE

    def make(self, placement: Placement) -> None:
        """Return nothing: the block before computes the score itself."""


def token_change(x_BND: Tensor, y_BND: Tensor) -> Tensor:
    """Return the Euclidean distance of every token before and after a block (B, N), fp32 and without a gradient.

    Example:
        >>> token_change(torch.zeros(1, 2, 2), torch.tensor([[[3.0, 4.0], [0.0, 0.0]]]))
        tensor([[5., 0.]])
    """
    return torch.linalg.vector_norm(y_BND.detach().float() - x_BND.detach().float(), dim=-1)
