"""The interfaces of scores that group or compare tokens."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn


class Comparing(nn.Module):
    """A score that compares all pairs of tokens by their cosine.

    Its `forward` takes `unit_rows` of the tokens as `unit_BNE`: a router that compares them again computes them once.
    """


class Grouping(nn.Module):
    """A score whose skipped tokens join the first token of their group, which must score best so that it is kept."""

    @abstractmethod
    def groups(self, tokens: int) -> int:
        """Return the number of groups of N tokens; every token that is always kept is one."""

    @abstractmethod
    def first(self, tokens: int, device: torch.device) -> Tensor:
        """Return the first token of each token's group (N)."""
