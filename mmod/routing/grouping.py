"""The interfaces of scores that group or compare tokens."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor, nn


class Comparing(nn.Module):
    """A score that compares all pairs of tokens by their cosine.

    Its `forward` takes `unit_rows` of the tokens as `unit_BNE`: a router that compares them again computes them once.
    """


class Grouping(nn.Module):
    """A score that says which kept token a skipped one joins; the first token of a group must score best."""

    @abstractmethod
    def groups(self, tokens: int) -> int:
        """Return the number of groups of N tokens; every token that is always kept is one."""

    @abstractmethod
    def leaders(self, keep_BN: Tensor) -> Tensor:
        """Return the kept token that each token joins, itself where it is kept (B, N)."""
