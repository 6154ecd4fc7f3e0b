"""Spans: runs of consecutive blocks that share scores, decisions and rows.

A `Span` is made when the model is routed, and is known to its blocks. What they share in one forward pass is a
`SpanPass`, which each block finds by its input or by the order of the blocks (`mmod/blocks/passes.py`).

The dense block in front belongs to a span whose blocks read its importance. A span of blocks is not
`language.tokens="span"`, which is about runs of image tokens.

Axes: B images or samples, N tokens.
"""

from __future__ import annotations

from typing import NoReturn, Protocol, cast

import torch
from torch import Tensor

from mmod.blocks.conversion import Mixin
from mmod.blocks.passes import Decision, Passes, SpanPass, StackCalls, recomputing
from mmod.blocks.rows import Execution, Rows, gather_kept
from mmod.routing import Router, Routing, Rule, TokenGroups, TokenMasks
from mmod.threads import PerThread


class StateInSpan(Protocol):
    """What a span reads of a block's state.

    Compilers guard on every number that they read. A graph that reads `place`, or the `number` in the stack, serves one
    block; one that reads only `begins` and `ends` serves all blocks between the first and the last.
    """

    place: int
    number: int
    begins: bool
    ends: bool
    passes_rows: bool
    execution: Execution


class InSpan(Protocol):
    """What a span reads of a routed block."""

    training: bool
    router: Router

    @property
    def mod_state(self) -> StateInSpan:
        """The block's plain state."""

    def normed(self, x: Tensor) -> Tensor:
        """Return the output of the block's first norm."""


class Span(Passes):
    """A run of consecutive blocks that share scores or rows.

    The dense block whose importance routed blocks read, if any, has place 0. Blocks that read the same scores by the
    same rule decide once.

    Args:
        names: Names of the modules, in order.
        scored_by_first: The first routed block computes the scores; otherwise they are importance, or none are shared.
        for_loss: Importance serves a loss only, and is computed in training only.
    """

    def __init__(
        self,
        calls: PerThread[StackCalls],
        names: tuple[str, ...],
        scored_by_first: bool = False,
        for_loss: bool = False,
    ) -> None:
        super().__init__(calls, len(names) - 1)
        self.names = names
        self.scored_by_first = scored_by_first
        self.for_loss = for_loss

    def enter(self, x: Tensor, block: Mixin) -> SpanPass | None:
        """Return the pass of a block's input (B, N, D), or of rows that were passed on (B, K, D); None without one.

        The first module of the span begins the pass: a routed block here, or an `ImportanceBlock` by `begin`.

        Raises:
            ValueError: The first block, whose scores this block reads, was not run; or the shape changed since.
            RuntimeError: See `Passes.find`.
        """
        if self.for_loss and not block.training:
            return None
        state = block.mod_state
        calls = self.calls.value
        found: SpanPass | None
        if state.begins:
            found = self.begin(x)
        else:
            # Outside calls of the model, where batches may be in flight in stages, places tell them apart.
            in_order = torch.compiler.is_dynamo_compiling() and calls.running.outer is not None
            found = self.find(x, None if in_order else state.place)
        if found is None:
            if self.scored_by_first:
                self._check_begun(cast(InSpan, block))
            return None
        # An uninterrupted pass may hand on rows instead of all tokens.
        if not found.uninterrupted and not torch.compiler.is_compiling() and found.shape != x.shape[:2]:
            self._refuse_shape(x, found)
        found.busy = True
        calls.entered = found
        score_BN = found.score_BN
        if score_BN is not None and score_BN.device != x.device:
            found.score_BN = score_BN.to(x.device)
        return found

    def _check_begun(self, block: InSpan) -> None:
        """Raise a ValueError if a block that no pass has reached cannot decide alone."""
        score = block.router.config.router
        if not score.learns and not score.same_everywhere:
            raise ValueError(
                f"{self.names[block.mod_state.place]} decides by the scores that {self.names[0]} computes, and its "
                f"input comes from no pass through that block: run the whole model, or begin at {self.names[0]}"
            )

    def _refuse_shape(self, x: Tensor, found: SpanPass) -> NoReturn:
        raise ValueError(
            f"a block got (images, tokens) = {tuple(x.shape[:2])}, and the pass that it continues has {found.shape}: "
            "the batch or the sequence changed between the two blocks, which share scores or rows. Keep all images and "
            "tokens between them, or route with a router that shares none, such as 'linear'"
        )

    def decide(
        self, x_BND: Tensor, block: InSpan, shared: SpanPass, rule: Rule, tokens: TokenMasks | TokenGroups
    ) -> Routing:
        """Return a block's decision: one that the span knows, one among the tokens kept before, or the router's.

        Args:
            x_BND: All tokens, or the rows that the previous block passed on.
        """
        state = block.mod_state
        routing = None
        if shared.decisions:
            routing = self._decided(x_BND, block, shared, rule, tokens)
        if routing is None:
            scored = block.normed(x_BND) if state.execution.scores_norm else x_BND
            routing = block.router(scored, shared.score_BN, tokens)
        if state.ends:
            return routing
        if shared.score_BN is None and self.scored_by_first:
            shared.score_BN = routing.score_BN
            learns = rule.config.router.learns
            shared.trains = learns and any(weight.requires_grad for weight in block.router.parameters())
        if self._reuses(block.router, rule):
            shared.decisions[state.place] = Decision(rule, tokens, routing)
        return routing

    def _decided(
        self, x_BND: Tensor, block: InSpan, shared: SpanPass, rule: Rule, tokens: TokenMasks | TokenGroups
    ) -> Routing | None:
        """Return a decision that the span knows, or one among the tokens kept before; else None."""
        if shared.trains and recomputing() and not (shared.score_BN is not None and shared.score_BN.requires_grad):
            raise RuntimeError(
                "reentrant gradient checkpointing loses the gradient of a score that blocks share: checkpoint with "
                "use_reentrant=False, or set router.shared=False"
            )
        if not self._reuses(block.router, rule):
            return None
        place = block.mod_state.place
        known = self._same_rule(shared, place, rule, x_BND.device, tokens)
        if known is not None or not rule.config.joins:
            return known
        earlier = self.before(shared, place, x_BND.device)
        if earlier is None:
            return None
        # Scores that are shared where tokens join never learn.
        with torch.no_grad():
            rows_BKD = gather_kept(x_BND, earlier) if shared.rows is None else x_BND
            narrowed: Routing = block.router(rows_BKD, None, tokens, earlier)
        return narrowed

    def before(self, shared: SpanPass, place: int, device: torch.device) -> Routing | None:
        """Return the decision of the block before, if skipped tokens joined others in it; None for all tokens."""
        # A block in between may have been removed from the model.
        for number in range(place - 1, -1, -1):
            if number in shared.decisions:
                routing = shared.decisions[number].routing
                return None if routing.joined.slot_BN is None else routing.to(device)
        return None

    def leave(self, y: Tensor, shared: SpanPass, rows: Rows, rule: Rule, block: InSpan) -> Tensor:
        """Return all tokens after a block (B, N, D), or its rows if the next block takes them."""
        state = block.mod_state
        shared.busy = False
        if state.passes_rows and shared.uninterrupted:
            # The block's number is read only where there are some to compare, see `InSpan`.
            is_read = bool(shared.read_blocks) and state.number in shared.read_blocks
            if not is_read and (rows is shared.rows or (rows.shrinks and block.router.shares_decisions)):
                rows.rule = rule
                shared.rows = rows
                return y
        shared.rows = None
        y = rows.write_back(y)
        if not state.ends and not shared.uninterrupted:
            self.hand_on(shared, y)
        return y

    def _reuses(self, router: Router, rule: Rule) -> bool:
        # Compilers merge equal calls themselves, and would guard on the identity of tensors. Whom a token joins depends
        # on the block that decides.
        return router.shares_decisions and (rule.config.joins or not torch.compiler.is_compiling())

    def _same_rule(
        self, shared: SpanPass, place: int, rule: Rule, device: torch.device, tokens: TokenMasks | TokenGroups
    ) -> Routing | None:
        """Return the block's earlier decision, or that of a block before it by the same rule on the same tokens."""
        for number in range(place, -1, -1):
            made = shared.decisions.get(number)
            if made is None or not made.rule.matches(rule):
                continue
            if rule.config.joins:
                return made.routing.to(device)
            if made.routing.kept.index_BK.device == device and all(a is b for a, b in zip(made.tokens, tokens)):
                return made.routing
        return None
