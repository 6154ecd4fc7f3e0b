"""What a converted block remembers beside its parameters, in plain objects invisible to state_dict and export."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from mmod.blocks.call import BlockCall
from mmod.blocks.forward_pass import ForwardPass, PassTracker, SharedScore
from mmod.blocks.record import Record
from mmod.blocks.rows import Rows, enter_rows
from mmod.blocks.ways import Way
from mmod.routing import Router, Routing, TokenGroups, TokenMarks
from mmod.routing.rule import PerThread


@dataclass(eq=False)
class BlockState:
    """The state of a converted block.

    Args:
        call: How the host calls the block.
        tracker: Finds the forward pass of the block's stack.
        span: First block of the span whose scores the block reads or writes, None where it shares none.
        writes: The block computes those scores.
        begins: The block begins a forward pass.
        ends: The block ends it.
        captioned: What is padding and what is protected stands in the forward pass.
        training_only: Importance serves a loss only, so outside training it is neither computed nor expected.
    """

    call: BlockCall
    tracker: PassTracker
    span: int | None = None
    _: KW_ONLY
    writes: bool = False
    begins: bool = False
    ends: bool = False
    captioned: bool = False
    training_only: bool = False

    @property
    def shares(self) -> bool:
        """Whether the block reads or writes what a forward pass shares."""
        return self.captioned or self.span is not None

    def enter(self, x_BND: Tensor, training: bool) -> ForwardPass | None:
        """Return the forward pass that the block runs in, or None where it shares nothing.

        Args:
            x_BND: The block's input (B, N, D).
            training: Whether scores that serve a loss are computed.
        """
        if not self.shares or (self.training_only and not training and not self.captioned):
            return None
        if self.begins:
            return self.tracker.begin()
        return self.tracker.resume() if self.writes and not self.captioned else self.tracker.of(x_BND)

    def leave(self, forward_pass: ForwardPass | None) -> None:
        """Leave the block."""
        if forward_pass is not None:
            self.tracker.leave(None if self.ends else forward_pass)


@dataclass(eq=False, kw_only=True)
class ImportanceState(BlockState):
    """The state of a dense block that computes importance.

    Args:
        routers: The routers of the blocks that read importance.
        average: See `mmod.config.WithImportance`.
    """

    routers: Sequence[Router]
    average: str
    writes: bool = True

    @property
    def wanted(self) -> bool:
        """Whether any block reads importance in this forward pass."""
        return not self.training_only or any(router.training for router in self.routers)


@dataclass(eq=False, kw_only=True)
class RoutedState(BlockState):
    """The state of a routed block.

    Args:
        way: How the block runs.
        hands_on: The block that follows shares the span's scores, and may be given rows in place of all tokens.
        observes: The span reads the importance in this block's own attention, after which it decides.
    """

    way: Way
    hands_on: bool = False
    observes: bool = False
    records: PerThread[Record] = field(default_factory=lambda: PerThread(Record), init=False, repr=False)

    @property
    def routing(self) -> Routing | None:
        """The last decision that this thread recorded."""
        return self.records.own.decisions.get("")

    def enter(self, x_BND: Tensor, training: bool) -> ForwardPass | None:
        """Return the forward pass that the block runs in, or None where it shares nothing."""
        forward_pass = super().enter(x_BND, training)
        held: Rows | None = None if forward_pass is None else forward_pass.held
        # Rows of another length are those of a pass that was interrupted.
        return None if held is not None and held.slots != x_BND.shape[1] else forward_pass

    def held(self, x: Tensor, router: Router, forward_pass: ForwardPass | None) -> tuple[Tensor, Rows | None]:
        """Return the block's tokens, and the rows that the block before handed on, or None.

        Args:
            x: The block's input: all tokens (B, N, D), or rows (B, K, D).
            router: The block's router.
            forward_pass: The pass that the block runs in; None where it shares nothing.
        """
        held: Rows | None = None if forward_pass is None else forward_pass.held
        if held is None or held.serves(router):
            return x, held
        assert forward_pass is not None
        forward_pass.held = None
        return held.leave(x), None

    def leave_rows(self, y: Tensor, rows: Rows, router: Router, forward_pass: ForwardPass | None) -> Tensor:
        """Leave the block; return all tokens after it (B, N, D), or its rows where the next block takes them.

        Args:
            y: The rows after the block.
            rows: The rows that were entered.
            router: The block's router.
            forward_pass: The pass that the block runs in; None where it shares nothing.
        """
        if forward_pass is None:
            return rows.leave(y)
        hands_on = self.hands_on and forward_pass.holds_rows and rows.shrinks
        if hands_on and rows.router is None:
            rows.router = router
        forward_pass.held = rows if hands_on else None
        y = y if hands_on else rows.leave(y)
        self.leave(forward_pass)
        return y

    def shared(self, forward_pass: ForwardPass | None, training: bool) -> SharedScore | None:
        """Return the scores that the block's span shares in a forward pass, where they were computed."""
        if forward_pass is None or self.span is None or (self.training_only and not training):
            return None
        return forward_pass.scores.get(self.span)

    def before(self, router: Router, x_BND: Tensor, forward_pass: ForwardPass | None) -> Routing | None:
        """Return the decision that a block begins with which makes its own after attention.

        Args:
            router: The block's router.
            x_BND: The block's input, on whose device the decision is given.
            forward_pass: The pass that the block runs in, None where it shares nothing.
        """
        shared = self.shared(forward_pass, training=True)
        return None if shared is None else shared.before(router, x_BND.device)

    def decide(
        self,
        router: Router,
        x_BND: Tensor,
        tokens: TokenMarks | TokenGroups,
        forward_pass: ForwardPass | None,
        training: bool,
    ) -> Routing:
        """Let the router decide; blocks of a span that read the same scores by the same rule decide once.

        Args:
            router: The block's router.
            x_BND: What is scored: all tokens (B, N, D), or the rows that the block before has handed on.
            tokens: What the router must know of the tokens.
            forward_pass: The pass that the block runs in, None where it shares nothing.
            training: Whether the block trains.
        """
        shared, held = self.shared(forward_pass, training), None if forward_pass is None else forward_pass.held
        joins = router.config.joins
        # Compilers find equal calls by themselves, and would guard on which tensor was seen before. Whom a token joins
        # depends on the block that decides.
        reuses = router.config.router.shared and (joins or not torch.compiler.is_compiling())
        routing = held.routing if held is not None and not joins else None
        if routing is None and shared is not None and reuses:
            routing = shared.decided(router, tokens, x_BND.device)
        earlier = shared.latest if shared is not None and reuses and joins else None
        if routing is None and earlier is not None and earlier.join_BN is not None:
            # Scores that are shared do not learn, and a part that runs again decides nothing.
            with torch.no_grad():
                earlier = earlier.to(x_BND.device)
                rows_BKD = enter_rows(x_BND, earlier) if held is None else x_BND
                routing = router(rows_BKD, None, tokens, earlier)
        elif routing is None:
            routing = router(x_BND, None if shared is None else shared.score_BN.to(x_BND.device), tokens)
        if self.writes and shared is None and forward_pass is not None and self.span is not None:
            shared = forward_pass.scores[self.span] = SharedScore(routing.score_BN)
        if shared is not None and reuses:
            shared.remember(router, tokens, routing)
        partial = router.rule.partial
        if partial is not None:
            # Blocks share the choice; each weighs its last slots by its own capacity.
            routing = partial.weigh(routing, router.prefix)
        record = self.records.own
        # For losses in training, and for traces.
        if training or record.traced:
            record.keep("", routing)
        return routing
