"""Routed blocks, dense blocks that compute importance for them, and the plain state of both.

Both are mixins in front of a host's class, so the host's forward is called and never copied.
Axes: B images, N tokens, K slots per image, D channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from mmod.blocks.branches import Branch, OneBranch, running_branch
from mmod.blocks.call import BlockCall
from mmod.blocks.forward_pass import ForwardPass, PassTracker, SharedScore, recomputing
from mmod.blocks.record import Deciding, Records
from mmod.blocks.rows import KeptRows, Rows, TwoHalves, Way, enter_rows
from mmod.blocks.symbolic import trace_as_node
from mmod.config import RoutingConfig, Threshold
from mmod.ops import capture_importance
from mmod.routing import Router, Routing, TokenGroups, TokenMarks

_EXPORT = "Use torch.export, torch.onnx.export(dynamo=True) or torch.compile, which replace TorchScript"
_TRACED = (
    "a routed model cannot be traced by torch.jit.trace or torch.onnx.export(dynamo=False), which would record how "
    f"many tokens are kept of this one input. {_EXPORT}"
)


@dataclass(eq=False)
class BlockState:
    """Plain state of a converted block, invisible to state_dict and export.

    Args:
        tracker: Finds the forward pass of the block's stack.
        span: First block of the span whose scores the block reads or writes; None if it shares none.
        writes: The block computes those scores.
        begins: The block begins a forward pass; one that `ends` it is the last.
        captioned: The forward pass knows padding and protected tokens.
        training_only: Importance serves a loss only, and is computed in training only.
        shares: The block reads or writes what a forward pass shares.
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
    shares: bool = field(init=False)

    def __post_init__(self) -> None:
        self.shares = self.captioned or self.span is not None

    def enter(self, x_BND: Tensor, training: bool) -> ForwardPass | None:
        """Return the forward pass that the block runs in, or None if it shares nothing."""
        if not self.shares or (self.training_only and not training and not self.captioned):
            return None
        if self.begins:
            return self.tracker.begin(x_BND)
        return self.tracker.resume() if self.writes and not self.captioned else self.tracker.of(x_BND)

    def leave(self, forward_pass: ForwardPass) -> None:
        """Leave the block."""
        self.tracker.leave(None if self.ends else forward_pass)


@dataclass(eq=False, kw_only=True)
class ImportanceState(BlockState):
    """Plain state of a dense block that computes importance.

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
    """Plain state of a routed block.

    Args:
        way: How the block runs.
        hands_on: The next block shares the span's scores, and can take rows instead of all tokens.
        observes: The span reads importance from this block's attention, after which the block decides.
    """

    way: Way
    hands_on: bool = False
    observes: bool = False
    records: Records = field(default_factory=Records, init=False, repr=False)

    @property
    def routing(self) -> Routing | None:
        """The last decision that this thread recorded."""
        return self.records.value.decisions.get("")

    def enter(self, x_BND: Tensor, training: bool) -> ForwardPass | None:
        """Return the forward pass that the block runs in, or None if it shares nothing."""
        forward_pass = super().enter(x_BND, training)
        held: Rows | None = None if forward_pass is None else forward_pass.held
        # Rows of another length are left from an interrupted pass.
        return None if held is not None and held.slots != x_BND.shape[1] else forward_pass

    def take(self, x: Tensor, router: Router, forward_pass: ForwardPass) -> tuple[Tensor, Rows | None]:
        """Return the block's input, and the rows if it is those that the previous block passed on; else None."""
        held: Rows | None = forward_pass.held
        if held is None or held.serves(router):
            return x, held
        forward_pass.held = None
        return held.leave(x), None

    def leave_rows(self, y: Tensor, rows: Rows, router: Router, forward_pass: ForwardPass) -> Tensor:
        """Leave the block; return all tokens after it (B, N, D), or its rows if the next block takes them."""
        hands_on = self.hands_on and forward_pass.holds_rows and rows.shrinks
        # Blocks that weigh their last slots by a capacity of their own leave rows that differ.
        hands_on = hands_on and router.rule.partial is None
        if hands_on and rows.router is None:
            rows.router = router
        forward_pass.held = rows if hands_on else None
        y = y if hands_on else rows.leave(y)
        self.leave(forward_pass)
        return y

    def shared(self, forward_pass: ForwardPass | None, training: bool) -> SharedScore | None:
        """Return the shared scores of the block's span, if they were computed."""
        if forward_pass is None or self.span is None or (self.training_only and not training):
            return None
        return forward_pass.scores.get(self.span)

    def decide(
        self, router: Router, x_BND: Tensor, tokens: TokenMarks | TokenGroups, forward_pass: ForwardPass, training: bool
    ) -> Routing:
        """Return the decision on all tokens (B, N, D), or on the rows that the previous block passed on.

        Blocks of a span that read the same scores by the same rule decide once.
        """
        config, held, device = router.config, forward_pass.held, x_BND.device
        if held is not None and not config.joins:
            return held.routing
        shared, joins, score = self.shared(forward_pass, training), config.joins, config.router
        # Compilers merge equal calls themselves, and would guard on the identity of tensors. Whom a token joins depends
        # on the block that decides.
        reuses = score.shared and (joins or not torch.compiler.is_compiling())
        if shared is not None and shared.trains and recomputing() and not shared.score_BN.requires_grad:
            raise RuntimeError(
                "reentrant gradient checkpointing loses the gradient of a score that blocks share: checkpoint with "
                "use_reentrant=False, or set router.shared=False"
            )
        routing = shared.decided(router, tokens, device) if shared is not None and reuses else None
        if routing is None:
            earlier = shared.latest if shared is not None and reuses and joins else None
            if earlier is not None and earlier.joined.slot_BN is not None:
                # Shared scores do not learn, and a recomputed segment decides nothing.
                with torch.no_grad():
                    earlier = earlier.to(device)
                    rows_BKD = enter_rows(x_BND, earlier) if held is None else x_BND
                    routing = router(rows_BKD, None, tokens, earlier)
            else:
                routing = router(x_BND, None if shared is None else shared.score_BN.to(device), tokens)
        if self.writes and shared is None and self.span is not None:
            trains = score.learns and any(weight.requires_grad for weight in router.parameters())
            shared = forward_pass.scores[self.span] = SharedScore(routing.score_BN, trains)
        if shared is not None and reuses:
            shared.remember(router, tokens, routing)
        return routing

    def record(self, router: Router, routing: Routing, training: bool) -> Routing:
        """Record a decision for losses and traces; return it with the block's weights."""
        slots = router.rule.partial
        if slots is not None:
            # Blocks share the choice; each weighs its last slots by its own capacity.
            routing = slots.weigh(routing, router.prefix)
        record = self.records.value
        if training or record.traced:
            record.keep("", routing)
        return routing


class ConvertedBlock(nn.Module):
    """Mixin of a block whose class was changed; `mod_state` is its plain state."""

    mod_state: Any

    def run_host(self, z: Tensor, **arguments: Any) -> Tensor:
        """Return tokens after the host's forward."""
        return super().forward(z, **arguments)

    def observe(
        self, run: Callable[[], Tensor], valid_BN: Tensor | None, average: str, forward_pass: ForwardPass | None
    ) -> Tensor:
        """Run the host's attention on all tokens, and share the importance that it gives them."""
        state, span = self.mod_state, self.mod_state.span
        assert forward_pass is not None
        assert span is not None
        captured = capture_importance(valid_BN, average)
        attention = getattr(self, state.call.operators.get("attention", ""), None)
        # Each call of torch inside the mode costs time, so the attention alone runs in it where nothing replaced that.
        if isinstance(attention, Branch) and "forward" not in vars(attention):
            with running_branch(state.tracker, captured):
                y = run()
        else:
            y = captured.run(run, (), {})
        if captured.importance_BN is None:
            raise RuntimeError(
                f"no attention was seen in this {type(self).__name__}: it calls neither scaled_dot_product_attention "
                "nor softmax over (B, H, N, N), so importance cannot be read from it"
            )
        forward_pass.scores[span] = SharedScore(captured.importance_BN)
        return y

    def __prepare_scriptable__(self) -> nn.Module:
        """Refuse TorchScript."""
        raise RuntimeError(
            "a routed model cannot be scripted: its blocks take the host's arguments as they come, which TorchScript "
            f"has no types for. {_EXPORT}"
        )


class RoutedBlock(Deciding, ConvertedBlock):
    """Mixin that runs a host block on the tokens that its router keeps; other tokens do not change."""

    router: Router
    mod_state: RoutedState
    added_modules = ("router",)

    @staticmethod
    def choose_way(call: BlockCall, config: RoutingConfig) -> Way:
        """Return how a block with this config runs."""
        if config.merges_inside:
            return TwoHalves(call, config)
        if config.operator != "block":
            return OneBranch(call, config)
        return KeptRows(call, config)

    @property
    def cost_follows_data(self) -> bool:
        """Whether the router selects by threshold."""
        return self.router.config.select != "topk"

    def assume_kept(self, share: float) -> float:
        """Keep a share of the tokens by top-k; return the share for whole images, or 0 for no tokens."""
        router, select = self.router, self.router.config.select
        if isinstance(select, Threshold) and select.max_tokens is not None:
            # This number of slots runs, filled or empty.
            return 1.0
        if router.config.router.per_image:
            # In training, all tokens run with a step gate.
            router.config = router.config.replace(gate="step")
            router.train()
            return share
        router.config = router.config.replace(select="topk")
        # Most shares are a count over N: the nearest simple fraction restores that count exactly.
        router.capacity = Fraction(share).limit_denominator(10_000)
        return 1.0 if share else 0.0

    def missed(self, flops: Mapping[str, int], name: str) -> int:
        """Return the FLOPs of the block without its router, or of the routed branch."""
        branch = self.mod_state.call.operators.get(str(self.router.config.operator))
        return flops[name] - flops[f"{name}.router"] if branch is None else flops[f"{name}.{branch}"]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Route tokens (B, N, D): decide, gather the kept rows, run the host's block on them, write them back.

        Source: Raposo et al., arXiv 2404.02258 (MoD), equation 1.
        """
        if isinstance(x, fx.Proxy):
            return trace_as_node(self, x, args, kwargs)
        if torch.jit.is_tracing():
            raise RuntimeError(_TRACED)
        state, way, router, rows = self.mod_state, self.mod_state.way, self.router, None
        arguments = state.call.bind(args, kwargs)
        forward_pass = self.enter(x, arguments) if state.shares else None
        if forward_pass is not None:
            x, rows = state.take(x, router, forward_pass)
        if way.two_halves:
            x = self.attend(x, arguments, forward_pass, rows)
        tokens = state.call.marks(arguments, x, forward_pass)
        scored, partial_slots = x if way.scored_norm is None else way.scored_norm(self)(x), router.rule.partial
        if forward_pass is None:
            routing = router(scored, None, tokens)
        else:
            routing = state.decide(router, scored, tokens, forward_pass, self.training)
        if self.training or state.records.value.traced or partial_slots is not None:
            routing = state.record(router, routing, self.training)
        if rows is None:
            rows = way.rows(self, x, arguments, routing)
        z = rows.enter(x, routing)
        y = way.run(self, super().forward, z, arguments, rows)
        return rows.leave(y) if forward_pass is None else state.leave_rows(y, rows, router, forward_pass)

    def enter(self, x: Tensor, arguments: Mapping[str, Any]) -> ForwardPass | None:
        """Return the forward pass of a block that shares something, or None if it shares nothing in this call."""
        return self.mod_state.enter(x, self.training)

    def attend(
        self, x: Tensor, arguments: Mapping[str, Any], forward_pass: ForwardPass | None, held: Rows | None
    ) -> Tensor:
        """Return tokens, or rows that were passed on, after the attention that runs before the decision."""
        state, call, rows, z = self.mod_state, self.mod_state.call, held, x
        if rows is None:
            shared = state.shared(forward_pass, training=True)
            earlier = None if shared is None else shared.before(self.router, x.device)
            if earlier is not None:
                rows = Rows(x)
                z = rows.enter(x, earlier)
        if rows is not None:
            arguments = call.select_tokens(arguments, rows.x_BND, rows.routing)
        assert call.halves is not None
        attend = partial(call.halves.attend, self, z, arguments)
        if state.observes:
            valid_BN = call.marks(arguments, z, forward_pass).valid_BN
            y = self.observe(attend, valid_BN, self.router.config.importance, forward_pass)
        else:
            y = attend()
        return y if rows is held else rows.leave(y)  # type: ignore[union-attr]


class ImportanceBlock(ConvertedBlock):
    """Mixin that shares the importance in a dense block's attention with the routed blocks after it."""

    mod_state: ImportanceState

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the host's block on tokens (B, N, D) and share their importance."""
        if isinstance(x, fx.Proxy):
            return trace_as_node(self, x, args, kwargs)
        state = self.mod_state
        if not state.wanted:
            return super().forward(x, *args, **kwargs)
        forward_pass = state.enter(x, training=True)
        assert forward_pass is not None
        valid_BN = state.call.marks(state.call.bind(args, kwargs), x, forward_pass).valid_BN
        y = self.observe(partial(super().forward, x, *args, **kwargs), valid_BN, state.average, forward_pass)
        state.leave(forward_pass)
        return y
