"""Blocks that share scores, decisions and rows with those around them, and dense blocks that compute importance.

What the modules of a `Span` share in one forward pass is a `SpanPass` (`mmod/blocks/passes.py`).

Axes: B images or samples, N tokens, K slots per image, D channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from mmod.blocks.branches import GATED, Branch, BranchState, make_branch, make_halves, make_observed
from mmod.blocks.call import DecoderCall
from mmod.blocks.conversion import convert, is_converted
from mmod.blocks.converted import ConvertedBlock
from mmod.blocks.passes import Decision, SpanPass
from mmod.blocks.record import recomputing
from mmod.blocks.routed import NO_MASKS, RoutedBlock, RoutedState
from mmod.blocks.rows import FusedNorm, Rows, gather_kept
from mmod.blocks.span import BlockState, Span
from mmod.blocks.symbolic import trace_as_node
from mmod.config import CHANGE
from mmod.routing import Router, Routing, Rule, TokenGroups, TokenMasks


class SpannedBlock(RoutedBlock):
    """Mixin of a routed block in a span, which shares scores, decisions and rows with the blocks around it."""

    title = "Routed"

    def enter(self, x: Tensor, arguments: Mapping[str, Any]) -> SpanPass | None:
        """Return the pass of tokens (B, N, D), or of rows that the block before passed on (B, K, D)."""
        state = self.mod_state
        span = state.span
        assert span is not None
        # In a call in which a decoder may skip no token, its layers share nothing.
        if state.call.decodes and not cast(DecoderCall, state.call).shares(arguments):
            return None
        if span.for_loss and not self.training:
            return None
        span_pass = span.enter(x, state)
        if span_pass is None:
            # No pass reached the block, as where it is called by itself.
            self._check_alone(span)
        return span_pass

    def gather(self, x: Tensor, arguments: Mapping[str, Any], span_pass: SpanPass | None) -> tuple[Rows, Tensor]:
        """Decide as the span does, and return its rows, or new ones where none were passed on."""
        if span_pass is None:
            return super().gather(x, arguments, None)
        state = self.mod_state
        rule = self.router.rule
        rows = span_pass.rows
        routing = None
        if rows is not None:
            if rule.matches(rows.rule):
                # The same rule would decide the same on the same scores.
                routing = rows.routing
            elif not rule.config.joins:
                # Another rule chooses among all tokens. Where tokens join others, it narrows the rows further.
                x = rows.write_back(x)
                rows = span_pass.rows = None
        if routing is None:
            tokens = state.call.masks(arguments, x) if arguments or state.call.masks_always else NO_MASKS
            routing = self._decide(x, span_pass, rule, tokens)
        if self.training or state.records.value.traced:
            self.note(routing, x)
        if rows is None:
            rows = state.execution.make_rows(self, x, arguments, routing)
            z = rows.z
        else:
            z = rows.follow(x, routing)
        rows.rule = rule
        return rows, z

    def leave(self, y: Tensor, rows: Rows, span_pass: SpanPass) -> Tensor:
        """Return all tokens after the block, or the rows alone if the next block takes them."""
        state = self.mod_state
        assert state.span is not None
        if state.passes_rows and span_pass.uninterrupted:
            # Compilers guard on the block's number, so it is read only where there are some to compare.
            is_read = span_pass.read_blocks and state.number in span_pass.read_blocks
            if not is_read and (rows is span_pass.rows or (rows.shrinks and self.router.shares_decisions)):
                span_pass.rows = rows
                # All that `span.leave` does where the next block finds the pass by the order of the blocks.
                span_pass.busy = False
                return y
        span_pass.rows = None
        return state.span.leave(rows.write_back(y), span_pass, state)

    def _check_alone(self, span: Span) -> None:
        """Raise a ValueError if a block that no pass has reached cannot decide alone."""
        score = self.router.config.router
        if span.scored_by_first and not score.learns and not score.same_everywhere:
            raise ValueError(
                f"{span.names[self.mod_state.position]} decides by the scores that {span.names[0]} computes, and its "
                f"input comes from no pass through that block: run the whole model, or begin at {span.names[0]}"
            )

    def attend(self, x: Tensor, arguments: Mapping[str, Any], span_pass: SpanPass | None) -> Tensor:
        """Return tokens, or rows that were passed on, after the attention that runs before the decision."""
        if span_pass is None:
            return super().attend(x, arguments, None)
        state = self.mod_state
        call = state.call
        rows = span_pass.rows
        z = x
        if rows is None:
            earlier = self._joined_before(span_pass, x.device)
            if earlier is not None:
                rows = Rows(x, earlier)
                z = rows.z
        if rows is not None:
            arguments = call.select_tokens(arguments, rows.x_BND, rows.routing)
        if state.observes:
            queries_BN = call.masks(arguments, z).queries_BN
            attend = partial(super().attend, z, arguments, span_pass)
            y, span_pass.score_BN = self.observe(attend, z, queries_BN, self.router.config.importance)
        else:
            y = super().attend(z, arguments, span_pass)
        # The decision that follows narrows rows which were passed on; rows of its own go back to all tokens.
        if rows is span_pass.rows or rows is None:
            return y
        return rows.write_back(y)

    def _decide(self, x_BND: Tensor, span_pass: SpanPass, rule: Rule, tokens: TokenMasks | TokenGroups) -> Routing:
        """Return the block's decision: one that the span knows, one among the tokens kept before, or the router's.

        Args:
            x_BND: All tokens, or the rows that the previous block passed on.
        """
        state = self.mod_state
        span = state.span
        assert span is not None
        reuses = self.router.shares_decisions and rule.config.router.shared
        if not rule.config.joins and torch.compiler.is_compiling():
            # Compilers merge equal calls themselves, and would guard on the identity of tensors. Whom a token joins
            # depends on the block that decides.
            reuses = False
        routing = None
        if span_pass.decisions:
            self._check_recomputed(span_pass)
            if reuses:
                routing = self._known(x_BND, span_pass, rule, tokens)
        if routing is None:
            scored = self.normed(x_BND) if state.execution.scores_norm else x_BND
            routing = self.router(scored, span_pass.score_BN, tokens)
        # What no later block reads is not kept, which would keep its tensors alive.
        if state.ends:
            return routing
        if span_pass.score_BN is None and span.scored_by_first:
            span_pass.score_BN = routing.score_BN
            learns = rule.config.router.learns
            span_pass.trains = learns and any(weight.requires_grad for weight in self.router.parameters())
        if reuses:
            span_pass.decisions[state.position] = Decision(rule, tokens, routing)
        return routing

    def _check_recomputed(self, span_pass: SpanPass) -> None:
        """Raise a RuntimeError if a checkpoint that recomputes the block has lost the gradient of a shared score."""
        lost = span_pass.score_BN is None or not span_pass.score_BN.requires_grad
        if lost and span_pass.trains and recomputing():
            raise RuntimeError(
                "reentrant gradient checkpointing loses the gradient of a score that blocks share: checkpoint with "
                "use_reentrant=False, or set router.shared=False"
            )

    def _known(
        self, x_BND: Tensor, span_pass: SpanPass, rule: Rule, tokens: TokenMasks | TokenGroups
    ) -> Routing | None:
        """Return a decision by the same rule on the same tokens, or one among the tokens kept before; else None."""
        device = x_BND.device
        # The nearest first. A checkpoint that recomputes the block finds its own.
        for number in range(self.mod_state.position, -1, -1):
            made = span_pass.decisions.get(number)
            if made is None or not made.rule.matches(rule):
                continue
            if rule.config.joins:
                return made.routing.to(device)
            if made.routing.kept.index_BK.device == device and all(a is b for a, b in zip(made.tokens, tokens)):
                return made.routing
        earlier = self._joined_before(span_pass, device) if rule.config.joins else None
        if earlier is None:
            return None
        # Scores that are shared where tokens join never learn.
        with torch.no_grad():
            rows_BKD = gather_kept(x_BND, earlier) if span_pass.rows is None else x_BND
            narrowed: Routing = self.router(rows_BKD, None, tokens, earlier)
        return narrowed

    def _joined_before(self, span_pass: SpanPass, device: torch.device) -> Routing | None:
        """Return the decision of the block before, if skipped tokens joined others in it; None for all tokens."""
        # A block in between may have been removed from the model.
        for number in range(self.mod_state.position - 1, -1, -1):
            if number in span_pass.decisions:
                routing = span_pass.decisions[number].routing
                return None if routing.joined.slot_BN is None else routing.to(device)
        return None


@dataclass(eq=False, kw_only=True)
class ImportanceState(BlockState):
    """Plain state of the dense block at position 0 of a span, whose importance the others read.

    Args:
        routers: The routers of the span.
        importance: What importance is, see `RoutingConfig.importance`.
    """

    span: Span
    routers: Sequence[Router]
    importance: str

    @property
    def wanted(self) -> bool:
        """Whether any block reads importance in this forward pass."""
        return not self.span.for_loss or any(router.training for router in self.routers)


class ImportanceBlock(ConvertedBlock):
    """Mixin that shares the importance of a dense block's tokens with the routed blocks after it."""

    mod_state: ImportanceState

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the host's block on tokens (B, N, D) and share their importance."""
        if not isinstance(x, Tensor):
            return trace_as_node(self, x, args, kwargs)
        state = self.mod_state
        call = state.call
        arguments: Mapping[str, Any] = call.bind(args, kwargs)
        wanted = state.wanted
        if call.decodes:
            decoder = cast(DecoderCall, call)
            # Where all tokens run nothing reads it, and with a filled cache the map is not square.
            wanted = wanted and decoder.shares(arguments)
            arguments = decoder.whole(arguments, x)
        # A loss alone reads the importance, and only in training.
        if not wanted:
            return super().forward(x, **arguments)
        span_pass = state.span.enter(x, state)
        assert span_pass is not None
        queries_BN = call.masks(arguments, x).queries_BN
        run = partial(super().forward, x, **arguments)
        y, span_pass.score_BN = self.observe(run, x, queries_BN, state.importance)
        return state.span.leave(y, span_pass, state)


def make_routed(block: nn.Module, router: Router, state: RoutedState) -> None:
    """Convert a dense block into a routed one."""
    call = state.call
    convert(block, RoutedBlock if state.span is None else SpannedBlock, state, call.shell)
    block.router = router
    # A `FusedNorm` takes what the kernel that gathers the rows has normalised. Norms of other methods stay as they are.
    if call.fused_norm and not is_converted(block.get_submodule(call.fused_norm)):
        convert(block.get_submodule(call.fused_norm), FusedNorm, state.inner)
    config = router.config
    operator = str(config.operator)
    if operator != "block":
        make_branch(block, call.operators[operator], state.inner)
    if config.merges_inside:
        make_halves(block, call, state.inner)
    if config.language.gate_on != "update":
        for branch in cast(DecoderCall, call).branches(block, config.language.gate_on):
            convert(branch, Branch, BranchState(state.inner, GATED))


def make_importance(block: nn.Module, state: ImportanceState) -> None:
    """Convert a dense block into one that shares its importance."""
    convert(block, ImportanceBlock, state, state.call.shell)
    if state.importance != CHANGE:
        # The change of a token is measured around the block.
        make_observed(block, state.call, state.inner)
