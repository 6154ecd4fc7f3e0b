"""Routed blocks: mixins in front of a host's class, which call the host's forward on the kept tokens.

A `RoutedBlock` decides alone: its `forward` is the path of a token. A `SpannedBlock` shares scores, decisions and rows
with the blocks around it, by a `SpanPass` (`mmod/blocks/calls.py`).

Axes: B images, N tokens, K slots per image, D channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import ClassVar, NoReturn

import torch
from torch import Tensor, nn

from mmod.blocks.branches import GATED, Branch, BranchState, make_branch, make_halves
from mmod.blocks.calls import SpanPass
from mmod.blocks.conversion import convert, is_converted
from mmod.blocks.converted import EXPORT, ConvertedBlock, trace_as_node
from mmod.blocks.record import Deciding, recomputing
from mmod.blocks.rows import Execution, FusedNorm, Rows, gather_kept
from mmod.blocks.span import BlockState, Span
from mmod.config import LOSSES, Threshold
from mmod.routing import BorrowedScore, Router, Routing, TokenGroups, TokenMasks
from mmod.routing.shared import NAME as SHARED_ROUTER

_TRACED = (
    "a routed model cannot be traced by torch.jit.trace or torch.onnx.export(dynamo=False), which would record how "
    f"many tokens are kept of this one input. {EXPORT}"
)
NO_MASKS = TokenMasks()


@dataclass(eq=False, kw_only=True)
class RoutedState(BlockState):
    """Plain state of a routed block.

    Args:
        execution: How the block runs on the rows of a decision.
        passes_rows: The next block shares the span's scores, and can take rows instead of all tokens.
        observes: The span reads importance from this block's attention, or from what it changes, after which the block
            decides.
    """

    execution: Execution
    passes_rows: bool = False
    observes: bool = False

    @property
    def routing(self) -> Routing | None:
        """The last decision that this thread recorded."""
        return self.records.value.decisions.get("")


class RoutedBlock(Deciding, ConvertedBlock):
    """Mixin that runs a host block on the tokens that its router keeps; other tokens do not change."""

    router: Router
    mod_state: RoutedState
    mod_added_modules = ("router",)
    mod_untraceable: ClassVar[str] = _TRACED
    """Why torch.jit.trace cannot record the block."""

    @property
    def mod_cost_follows_data(self) -> bool:
        """Whether the router selects by threshold, at least in evaluation."""
        config = self.router.config
        return config.select != "topk" or config.language.inference_threshold is not None

    def mod_assume_kept(self, share: float) -> float:
        """Keep a share of the tokens by top-k; return the share for whole images, or 0 for no tokens."""
        router = self.router
        select = router.config.select
        if isinstance(select, Threshold) and select.max_tokens is not None:
            # This number of slots runs, filled or empty.
            return 1.0
        if router.config.router.per_image:
            # In training, all tokens run with a step gate.
            router.config = router.config.replace(gate="step")
            router.train()
            return share
        language = {"inference_threshold": None, "predictor": False}
        router.config = router.config.replace(select="topk", language=language)
        # Most shares are a count over N: the nearest simple fraction restores that count exactly.
        router.capacity = Fraction(share).limit_denominator(10_000)
        return 1.0 if share else 0.0

    def mod_missed(self, flops: Mapping[str, int], name: str) -> int:
        """Return the FLOPs of the block without its router, or of the routed branch."""
        branch = self.mod_state.call.operators.get(str(self.router.config.operator))
        if branch is None:
            return flops[name] - flops[f"{name}.router"]
        return flops[f"{name}.{branch}"]

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Route tokens (B, N, D): decide, gather the kept rows, run the host's block on them, write them back.

        Source: Raposo et al., arXiv 2404.02258 (MoD), equation 1.
        """
        # Classes are compared first, which is no call as `isinstance` is.
        if type(x) is not Tensor and not isinstance(x, Tensor):
            return trace_as_node(self, x, args, kwargs)
        state = self.mod_state
        arguments: Mapping[str, object] = {}
        # Most hosts pass tokens alone, and binding takes time.
        if args or kwargs:
            arguments = state.call.bind(args, kwargs)
        routing = self.mod_decide(x, arguments)
        rows = state.execution.make_rows(self, x, arguments, routing)
        y = state.execution.run(self, super().forward, rows.z, arguments, rows)
        return rows.write_back(y)

    def mod_decide(self, x: Tensor, arguments: Mapping[str, object]) -> Routing:
        """Return which of the tokens (B, N, D) run."""
        state = self.mod_state
        if arguments or state.call.masks_always:
            tokens = state.call.masks(arguments, x)
        else:
            tokens = NO_MASKS
        scored = self.mod_normed(x) if state.execution.scores_norm else x
        routing: Routing = self.router(scored, None, tokens)
        if self.training or state.records.value.traced:
            self.mod_note(routing, x)
        return routing

    def mod_normed(self, x: Tensor) -> Tensor:
        """Return the output of the block's first norm, which the router scores instead of the tokens."""
        norm = self.mod_state.call.first_norm(self)
        return norm(x)

    def mod_note(self, routing: Routing, x: Tensor) -> None:
        """Record a decision and, in training, its losses. Only training and traces call it: records keep tensors."""
        self.mod_record.keep("", routing)
        if self.training:
            self.mod_tell_of_frozen()
            losses = self.mod_losses(routing)
            if losses:
                self.mod_keep_loss(losses, x, routing.score_BN)

    def _slow_forward(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse torch.jit.trace, under which torch calls this in place of `forward`."""
        raise RuntimeError(self.mod_untraceable)

    def mod_scorers(self) -> dict[str, nn.Module]:
        """Return the router, and the score that it shares with others."""
        router = self.router
        if isinstance(router.score, BorrowedScore):
            return {"router": router, SHARED_ROUTER: router.score.held}
        return {"router": router}

    @property
    def mod_has_loss(self) -> bool:
        """Whether the config has a loss."""
        return bool(self.router.config.losses)

    def mod_decided_alone(self, decisions: Mapping[str, Routing]) -> dict[str, Tensor]:
        """Return which tokens reach the inference threshold (B, N), if there is one."""
        config = self.router.config
        threshold = config.language.inference_threshold
        if threshold is None:
            return {}
        return {name: config.router.normalised(made.logit_BN) >= threshold for name, made in decisions.items()}

    def mod_losses(self, routing: Routing) -> list[Tensor]:
        """Return a decision's weighted losses, those that the config names."""
        router = self.router
        return [weight * LOSSES[name](routing, router) for name, weight in router.config.losses.items()]


class SpannedBlock(RoutedBlock):
    """Mixin of a routed block that shares decisions, decides in two steps, or sometimes runs all tokens.

    A block in a span shares scores, decisions and rows with the blocks around it. Some decide between their attention
    and their MLP. In some calls of a decoder layer all tokens run.
    """

    mod_title = "Routed"

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Route tokens (B, N, D), or rows that the block before passed on (B, K, D); return either."""
        if type(x) is not Tensor and not isinstance(x, Tensor):
            return trace_as_node(self, x, args, kwargs)
        state = self.mod_state
        execution = state.execution
        host = super(RoutedBlock, self).forward
        if state.call.decodes:
            whole = state.call.begin_whole(args, kwargs, x)
            if whole is not None:
                return host(x, **whole)
        arguments: Mapping[str, object] = {}
        if args or kwargs:
            arguments = state.call.bind(args, kwargs)
        span_pass = None
        if state.span is not None:
            span_pass = self.mod_enter(x, arguments)
        if execution.between_halves:
            x = self.mod_attend(x, arguments, span_pass)
        rows, z = self.mod_gather(x, arguments, span_pass)
        y = execution.run(self, host, z, arguments, rows)
        return self.mod_leave(y, rows, span_pass)

    def mod_enter(self, x: Tensor, arguments: Mapping[str, object]) -> SpanPass | None:
        """Return the pass of tokens (B, N, D), or of rows that the block before passed on (B, K, D)."""
        state = self.mod_state
        span = state.span
        assert span is not None
        # In a call in which a decoder may skip no token, its layers share nothing.
        if state.call.decodes and not state.call.shares(arguments):
            return None
        # The dense block in front computes no importance then, so that no pass begins.
        if span.for_loss and not self.training:
            return None
        span_pass = span.enter(x, state)
        if span_pass is None:
            # No pass reached the block, as where it is called by itself.
            self._mod_check_alone(span)
        return span_pass

    def mod_attend(self, x: Tensor, arguments: Mapping[str, object], span_pass: SpanPass | None) -> Tensor:
        """Return tokens, or rows that were passed on, after the attention that runs before the decision."""
        state = self.mod_state
        call = state.call
        halves = call.halves
        assert halves is not None
        if span_pass is None:
            return halves.attend(self, x, arguments)
        rows = span_pass.rows
        z = x
        if rows is None:
            earlier = self._mod_joined_before(span_pass, x.device)
            if earlier is not None:
                rows = Rows(x, earlier)
                z = rows.z
        if rows is not None:
            # Attention runs before this block decides, so on the rows of the decision before.
            arguments = rows.select(self, arguments)
        if state.observes:
            queries_BN = call.masks(arguments, z).queries_BN
            attend = partial(halves.attend, self, z, arguments)
            y, span_pass.score_BN = self.mod_observe(attend, z, queries_BN, self.router.config.importance)
        else:
            y = halves.attend(self, z, arguments)
        # The decision that follows narrows rows which were passed on; rows of its own go back to all tokens.
        if rows is span_pass.rows or rows is None:
            return y
        return rows.write_back(y)

    def mod_gather(self, x: Tensor, arguments: Mapping[str, object], span_pass: SpanPass | None) -> tuple[Rows, Tensor]:
        """Decide, or take the span's decision; return the rows, passed on or new, and their hidden states."""
        state = self.mod_state
        if span_pass is None:
            alone = state.execution.make_rows(self, x, arguments, self.mod_decide(x, arguments))
            return alone, alone.z
        rows = span_pass.rows
        routing = None
        if rows is not None:
            rule = self.router.rule
            if rule.matches(rows.routing.rule):
                # The same rule would decide the same on the same scores.
                routing = rows.routing
            elif not rule.config.joins:
                # Another rule chooses among all tokens. Where tokens join others, it narrows the rows further.
                x = rows.write_back(x)
                rows = span_pass.rows = None
        if routing is None:
            if arguments or state.call.masks_always:
                tokens = state.call.masks(arguments, x)
            else:
                tokens = NO_MASKS
            routing = self._mod_decide_in_span(x, span_pass, tokens)
        if self.training or state.records.value.traced:
            self.mod_note(routing, x)
        if rows is None:
            rows = state.execution.make_rows(self, x, arguments, routing)
            z = rows.z
        else:
            z = rows.follow(x, routing)
        return rows, z

    def mod_leave(self, y: Tensor, rows: Rows, span_pass: SpanPass | None) -> Tensor:
        """Return all tokens after the block, or the rows alone if the next block takes them."""
        state = self.mod_state
        if span_pass is None:
            return rows.write_back(y)
        assert state.span is not None
        passes_on = False
        # Where something may read tokens between two blocks, it finds all of them.
        if state.passes_rows and span_pass.uninterrupted:
            # Compilers guard on the block's number, so it is read only where there are some to compare.
            is_read = span_pass.read_blocks and state.number in span_pass.read_blocks
            shrinks = rows is span_pass.rows or rows.shrinks
            passes_on = shrinks and not is_read
        if passes_on:
            span_pass.rows = rows
        else:
            span_pass.rows = None
            y = rows.write_back(y)
        if not span_pass.uninterrupted:
            return state.span.leave(y, span_pass, state)
        # All that the span does where the next block finds the pass by the order of the blocks.
        span_pass.busy = False
        return y

    def _mod_check_alone(self, span: Span) -> None:
        """Raise a ValueError if a block that no pass has reached cannot decide alone."""
        score = self.router.config.router
        if span.scored_by_first and not score.learns and not score.same_everywhere:
            raise ValueError(
                f"{span.names[self.mod_state.position]} decides by the scores that {span.names[0]} computes, and its "
                f"input comes from no pass through that block: run the whole model, or begin at {span.names[0]}"
            )

    def _mod_decide_in_span(self, x_BND: Tensor, span_pass: SpanPass, tokens: TokenMasks | TokenGroups) -> Routing:
        """Return the block's decision: one that the span knows, one among the tokens kept before, or the router's.

        Args:
            x_BND: All tokens, or the rows that the previous block passed on.
        """
        state = self.mod_state
        span = state.span
        assert span is not None
        routing = None
        if span_pass.decisions:
            self._mod_check_recomputed(span_pass)
            if self._mod_reuses():
                routing = self._mod_known(x_BND, span_pass, tokens)
        if routing is None:
            scored = self.mod_normed(x_BND) if state.execution.scores_norm else x_BND
            routing = self.router(scored, span_pass.score_BN, tokens)
        # What no later block reads is not kept, which would keep its tensors alive.
        if state.ends:
            return routing
        if span_pass.score_BN is None and span.scored_by_first:
            span_pass.score_BN = routing.score_BN
            learns = self.router.config.router.learns
            span_pass.trains = learns and any(weight.requires_grad for weight in self.router.parameters())
        if self._mod_reuses():
            span_pass.decisions[state.position] = routing
        return routing

    def _mod_reuses(self) -> bool:
        """Return whether blocks of the span take each other's decisions."""
        router = self.router
        config = router.config
        if not config.joins and torch.compiler.is_compiling():
            # Compilers merge equal calls themselves, and would guard on the identity of tensors. Whom a token joins
            # depends on the block that decides.
            return False
        return config.router.shared

    def _mod_check_recomputed(self, span_pass: SpanPass) -> None:
        """Raise a RuntimeError if a checkpoint that recomputes the block has lost the gradient of a shared score."""
        lost = span_pass.score_BN is None or not span_pass.score_BN.requires_grad
        if lost and span_pass.trains and recomputing():
            raise RuntimeError(
                "reentrant gradient checkpointing loses the gradient of a score that blocks share: checkpoint with "
                "use_reentrant=False, or set router.shared=False"
            )

    def _mod_known(self, x_BND: Tensor, span_pass: SpanPass, tokens: TokenMasks | TokenGroups) -> Routing | None:
        """Return a decision by the same rule on the same tokens, or one among the tokens kept before; else None."""
        device = x_BND.device
        rule = self.router.rule
        # The nearest first. A checkpoint that recomputes the block finds its own.
        for number in range(self.mod_state.position, -1, -1):
            made = span_pass.decisions.get(number)
            if made is None:
                continue
            if rule.config.joins:
                if not rule.matches(made.rule):
                    # Of the rows of an earlier decision, some have joined others since.
                    break
                return made.to(device)
            if not rule.matches(made.rule):
                continue
            if made.kept.index_BK.device == device and all(a is b for a, b in zip(made.tokens, tokens)):
                return made
        if not rule.config.joins:
            return None
        earlier = self._mod_joined_before(span_pass, device)
        if earlier is None:
            return None
        # Scores that are shared where tokens join never learn.
        with torch.no_grad():
            rows_BKD = x_BND
            if span_pass.rows is None:
                # The block before returned all tokens.
                rows_BKD = gather_kept(x_BND, earlier)
            narrowed: Routing = self.router(rows_BKD, None, tokens, earlier)
        return narrowed

    def _mod_joined_before(self, span_pass: SpanPass, device: torch.device) -> Routing | None:
        """Return the decision of the block before, if skipped tokens joined others in it; None for all tokens."""
        # A block in between may have been removed from the model.
        for number in range(self.mod_state.position - 1, -1, -1):
            if number not in span_pass.decisions:
                continue
            routing = span_pass.decisions[number]
            if routing.joined.slot_BN is None:
                return None
            return routing.to(device)
        return None


def make_routed(block: nn.Module, router: Router, state: RoutedState) -> None:
    """Convert a dense block into a routed one."""
    call = state.call
    alone = state.span is None and not state.execution.between_halves and not call.decodes
    mixin = RoutedBlock if alone else SpannedBlock
    convert(block, mixin, state, call.shell)
    block.router = router
    if call.fused_norm:
        # A `FusedNorm` takes what the kernel that gathers the rows has normalised. Norms of other methods stay.
        norm = block.get_submodule(call.fused_norm)
        if not is_converted(norm):
            convert(norm, FusedNorm, state.inner)
    config = router.config
    operator = str(config.operator)
    if operator != "block":
        make_branch(block, call.operators[operator], state.inner)
    if config.merges_inside:
        make_halves(block, call, state.inner)
    if config.language.gate_on != "update":
        for branch in call.branches(block, config.language.gate_on):
            convert(branch, Branch, BranchState(state.inner, GATED))
