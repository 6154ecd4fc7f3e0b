"""Attention routing: the score is the importance of the tokens in the dense block before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mmod.config import Placement, WithImportance, register_score


@register_score("attention")
@dataclass(frozen=True)
class Attention(WithImportance):
    """Importance: the attention that tokens receive in the dense block before, without parameters.

    Consecutive routed blocks share it. A threshold is compared with it relative to the image's mean.

    Source: Gadhikar et al., arXiv 2412.20875.
    """

    shared: ClassVar[bool] = True
    reads_importance: ClassVar[bool] = True
    relative: ClassVar[bool] = True

    def make(self, placement: Placement) -> None:
        """Return nothing: importance is the score itself."""
