"""Which kept token every skipped one joins, where skipped tokens follow others or merge with them.

Axes: B images, N tokens, M rows of the decision before, K kept slots per image, D channels, E compared channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from mmod.config import Merged, RoutingConfig, spelled
from mmod.ops import held_slots, nearest_rows, regroup_rows, size_groups, unit_rows
from mmod.routing.decision import Joined, Routing, Rule, TokenMasks


class Grouping(nn.Module, ABC):
    """A score that says which kept token a skipped one joins; the first token of a group must score best."""

    @abstractmethod
    def groups(self, tokens: int) -> int:
        """Return the number of groups of N tokens; every token that is always kept is one."""

    @abstractmethod
    def leaders(self, keep_BN: Tensor) -> Tensor:
        """Return the kept token that each token joins, itself where it is kept (B, N)."""


class Joiner(ABC):
    """Joins skipped tokens to kept ones."""

    @abstractmethod
    def fewest(self, tokens: int) -> int:
        """Return how many of N tokens must be kept, so that all others have one to join."""

    def unit_rows(self, x_BND: Tensor, config: RoutingConfig) -> Tensor | None:
        """Return the tokens at norm 1 (B, N, E) if joiner and score both need them, so that they are made once."""
        return None

    def spread(self, rows_BKD: Tensor, earlier: Routing) -> Tensor | None:
        """Return all tokens (B, N, D) if a score needs more than the rows that an earlier decision kept; else None."""
        return None

    @abstractmethod
    def join(
        self,
        routing: Routing,
        rows: Tensor,
        rule: Rule,
        earlier: Routing | None = None,
        unit_BNE: Tensor | None = None,
    ) -> Routing:
        """Return a decision with the kept token that every other one joins.

        Args:
            rows: All tokens (B, N, D), or the rows of the earlier decision (B, K, D).
            rule: What the router decided by.
            earlier: The previous decision, among whose kept tokens this one chose.
            unit_BNE: The rows at norm 1, see `unit_rows`.
        """


class ToNearest(Joiner):
    """Joins each skipped token to the most similar kept one.

    Args:
        prefix: Number of tokens that are always kept, which no other joins.
        compares: The score compares all pairs of tokens too, see `mmod.Score`.
    """

    def __init__(self, prefix: int, compares: bool) -> None:
        self.prefix = prefix
        self.compares = compares

    def fewest(self, tokens: int) -> int:
        """Return one more than the prefix."""
        return self.prefix + 1

    def unit_rows(self, x_BND: Tensor, config: RoutingConfig) -> Tensor | None:
        """Return rows of norm 1 if the score compares tokens too, so that they are computed once."""
        if not self.compares:
            return None
        return unit_rows(x_BND, config.router.channels)

    def join(
        self,
        routing: Routing,
        rows: Tensor,
        rule: Rule,
        earlier: Routing | None = None,
        unit_BNE: Tensor | None = None,
    ) -> Routing:
        """Return a decision with the most similar kept token of every other one."""
        kept = routing.kept
        other_BR = None
        filled = earlier is None or earlier.kept.valid_BK is None
        if kept.order_BN is not None and filled:
            # Behind as many as there are rows stand tokens that an earlier decision has dropped.
            other_BR = kept.order_BN[:, kept.index_BK.shape[1] : rows.shape[1]]
        slots = kept.index_BK.shape[1]
        if slots == rows.shape[1] and rule.config.select == "topk":
            slot_BN = None
            if earlier is not None:
                slot_BN = earlier.joined.slot_BN
            return _joined(routing, slot_BN, rule, rows.dtype)
        _check_kept(routing, rule, self.prefix)
        if unit_BNE is None:
            unit_BNE = unit_rows(rows, rule.config.router.channels)
        if earlier is None:
            valid_BN = routing.tokens.valid_BN
            slot_BN = nearest_rows(unit_BNE, kept.index_BK, self.prefix, kept.valid_BK, valid_BN, other_BR)
            return _joined(routing, slot_BN, rule, rows.dtype)
        # Tokens merged into a token that is now dropped move with it to its new group.
        before_BN = earlier.joined.slot_BN
        assert before_BN is not None
        everyone = _joins_all(routing)
        at_BN = before_BN if everyone else before_BN.clamp(min=0)
        real_BM = earlier.kept.valid_BK
        slot_BM, slot_BN = regroup_rows(unit_BNE, at_BN, kept.index_BK, self.prefix, kept.valid_BK, real_BM, other_BR)
        if not everyone:
            slot_BN = torch.where(before_BN >= 0, slot_BN, -1)
        if real_BM is None:
            return _joined(routing, slot_BN, rule, rows.dtype, slot_BM)
        # Rows that stand for no token have no slot, though every token may have one.
        return _joined(routing, slot_BN, rule, rows.dtype)


class ToLeader(Joiner):
    """Joins each skipped token to the kept one that leads its group.

    Args:
        prefix: Number of tokens that are always kept, which no other joins.
        score: The score that groups tokens.
    """

    def __init__(self, prefix: int, score: Grouping) -> None:
        self.prefix = prefix
        self.score = score

    def fewest(self, tokens: int) -> int:
        """Return the number of groups."""
        return self.score.groups(tokens)

    def spread(self, rows_BKD: Tensor, earlier: Routing) -> Tensor:
        """Return all tokens, each with the state of the row that it joined."""
        slot_BN = earlier.joined.slot_BN
        assert slot_BN is not None
        return rows_BKD.gather(1, slot_BN.unsqueeze(-1).expand(-1, -1, rows_BKD.shape[2]))

    def join(
        self,
        routing: Routing,
        rows: Tensor,
        rule: Rule,
        earlier: Routing | None = None,
        unit_BNE: Tensor | None = None,
    ) -> Routing:
        """Return a decision with the kept token that leads every token's group."""
        index_BK = routing.kept.index_BK
        tokens = routing.score_BN.shape[1]
        if index_BK.shape[1] == tokens and rule.config.select == "topk":
            return routing
        _check_kept(routing, rule, self.prefix)
        groups = self.score.groups(tokens)
        if index_BK.shape[1] < groups:
            raise ValueError(
                f"router={rule.config.router.name!r} keeps a token of each of {groups} groups; capacity "
                f"{float(rule.capacity)} keeps {index_BK.shape[1]} of {tokens}"
            )
        held_BN = held_slots(index_BK, tokens, routing.kept.valid_BK)
        slot_BN = held_BN.gather(1, self.score.leaders(held_BN >= 0))
        return _joined(routing, slot_BN, rule, rows.dtype)


def choose_joiner(config: RoutingConfig, score: nn.Module | None, prefix: int) -> Joiner | None:
    """Return how the skipped tokens of a router join kept ones; None if they join none.

    Args:
        score: The module that scores tokens.
        prefix: Number of tokens that are always kept.
    """
    if not config.joins:
        return None
    if isinstance(score, Grouping):
        return ToLeader(prefix, score)
    return ToNearest(prefix, config.router.compares)


def _joins_all(routing: Routing) -> bool:
    """Return whether every token joins a kept one, as far as shapes tell."""
    masks = routing.tokens
    assert isinstance(masks, TokenMasks)
    return routing.kept.valid_BK is None and masks.valid_BN is None and masks.protect_BN is None


def _joined(
    routing: Routing, slot_BN: Tensor | None, rule: Rule, dtype: torch.dtype, slot_BM: Tensor | None = None
) -> Routing:
    """Return a decision whose tokens join slots (B, N), and rows of the one before (B, M); that one if none does."""
    if slot_BN is None:
        return routing
    everyone = _joins_all(routing)
    size_BK = None
    bias = None
    skipped = rule.config.skipped
    if isinstance(skipped, Merged):
        size_BK, bias = size_groups(slot_BN, routing.kept.index_BK.shape[1], dtype, all_join=everyone)
        if not skipped.size_power:
            bias = None
        elif skipped.size_power != 1:
            # The bias is a logarithm: a power of the size is a factor of it.
            bias = bias * skipped.size_power
    # Torch 2.11 cannot rebuild what `_replace` makes, if the value outlives a compiled graph.
    joined = Joined(slot_BN, size_BK, everyone, bias, slot_BM)
    return Routing(
        routing.kept,
        routing.score_BN,
        routing.gate_BK,
        routing.skipped_BN,
        joined,
        routing.tokens,
        routing.importance_BN,
        routing.predicted_BN,
        routing.rule,
    )


def _check_kept(routing: Routing, rule: Rule, prefix: int) -> None:
    """Raise a ValueError if a decision keeps no token that others could join."""
    kept = routing.kept.index_BK.shape[1]
    if kept <= prefix:
        raise ValueError(
            f"skipped={spelled(rule.config.skipped)!r} needs a kept token beside the {prefix} that are always kept; "
            f"capacity {float(rule.capacity)} keeps {kept} of {routing.score_BN.shape[1]}"
        )
