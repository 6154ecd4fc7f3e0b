"""What the router asks of a score that puts tokens into groups."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn


class Grouping(nn.Module):
    """A module that scores tokens in groups: tokens that are not kept join the first of their group.

    The first tokens of all groups must have the best scores, so that they are kept.
    """

    @abstractmethod
    def groups(self, tokens: int) -> int:
        """Return the number of groups, a token that is always kept counted as one.

        Args:
            tokens: N.
        """

    @abstractmethod
    def first(self, tokens: int, device: torch.device) -> Tensor:
        """Return the first token of each token's group (N,).

        Args:
            tokens: N.
            device: Where.
        """
