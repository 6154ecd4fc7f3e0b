"""Routed blocks, the dense blocks that compute importance for them, and what both remember beside parameters.

Both are mixins put in front of a host's own class, so the host's forward is called and never copied.
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

from mmod.blocks.branches import OneBranch
from mmod.blocks.call import BlockCall
from mmod.blocks.forward_pass import ForwardPass, PassTracker, SharedScore
from mmod.blocks.record import Deciding, Records
from mmod.blocks.rows import AmongAll, KeptAlone, Rows, TwoHalves, Way, enter_rows
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
    """What a converted block remembers; a plain object, invisible to state_dict and export.

    Args:
        call: How the host calls the block.
        tracker: Finds the forward pass of the block's stack.
        span: First block of the span whose scores the block reads or writes, None where it shares none.
        writes: The block computes those scores.
        begins: The block begins a forward pass.
        ends: The block ends it.
        captioned: What is padding and what is protected stands in the forward pass.
        training_only: Importance serves a loss only, so outside training it is neither computed nor expected.
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

    def leave(self, forward_pass: ForwardPass) -> None:
        """Leave the block."""
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
    records: Records = field(default_factory=Records, init=False, repr=False)

    @property
    def routing(self) -> Routing | None:
        """The last decision that this thread recorded."""
        return self.records.value.decisions.get("")

    def enter(self, x_BND: Tensor, training: bool) -> ForwardPass | None:
        """Return the forward pass that the block runs in, or None where it shares nothing."""
        forward_pass = super().enter(x_BND, training)
        held: Rows | None = None if forward_pass is None else forward_pass.held
        # Rows of another length are those of a pass that was interrupted.
        return None if held is not None and held.slots != x_BND.shape[1] else forward_pass

    def take(self, x: Tensor, router: Router, forward_pass: ForwardPass) -> tuple[Tensor, Rows | None]:
        """Return the block's tokens, and the rows that the block before handed on, or None.

        Args:
            x: The block's input: all tokens (B, N, D), or rows (B, K, D).
            router: The block's router.
            forward_pass: The pass that the block runs in.
        """
        held: Rows | None = forward_pass.held
        if held is None or held.serves(router):
            return x, held
        forward_pass.held = None
        return held.leave(x), None

    def leave_rows(self, y: Tensor, rows: Rows, router: Router, forward_pass: ForwardPass) -> Tensor:
        """Leave the block; return all tokens after it (B, N, D), or its rows where the next block takes them."""
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

    def decide(
        self, router: Router, x_BND: Tensor, tokens: TokenMarks | TokenGroups, forward_pass: ForwardPass, training: bool
    ) -> Routing:
        """Let the router decide; blocks of a span that read the same scores by the same rule decide once.

        Args:
            router: The block's router.
            x_BND: What is scored: all tokens (B, N, D), or the rows that the block before has handed on.
            tokens: What the router must know of the tokens.
            forward_pass: The pass that the block runs in.
            training: Whether the block trains.
        """
        shared, held, device = self.shared(forward_pass, training), forward_pass.held, x_BND.device
        joins = router.config.joins
        # Compilers find equal calls by themselves, and would guard on which tensor came before. Whom a token joins
        # depends on the block that decides.
        reuses = router.config.router.shared and (joins or not torch.compiler.is_compiling())
        routing: Routing | None = None
        if held is not None and not joins:
            routing = held.routing
        elif shared is not None and reuses:
            routing = shared.decided(router, tokens, device)
        if routing is None:
            earlier = shared.latest if shared is not None and reuses and joins else None
            if earlier is not None and earlier.joined.slot_BN is not None:
                # Scores that are shared do not learn, and a segment that runs again decides nothing.
                with torch.no_grad():
                    earlier = earlier.to(device)
                    rows_BKD = enter_rows(x_BND, earlier) if held is None else x_BND
                    routing = router(rows_BKD, None, tokens, earlier)
            else:
                routing = router(x_BND, None if shared is None else shared.score_BN.to(device), tokens)
        if self.writes and shared is None and self.span is not None:
            shared = forward_pass.scores[self.span] = SharedScore(routing.score_BN)
        if shared is not None and reuses:
            shared.remember(router, tokens, routing)
        return routing

    def record(self, router: Router, routing: Routing, training: bool) -> Routing:
        """Record a decision for losses in training and for traces; return it with the block's own weights."""
        slots = router.rule.partial
        if slots is not None:
            # Blocks share the choice; each weighs its last slots by its own capacity.
            routing = slots.weigh(routing, router.prefix)
        record = self.records.value
        if training or record.traced:
            record.keep("", routing)
        return routing


class ConvertedBlock(nn.Module):
    """Mixin of a block whose class was changed.

    Attributes:
        mod_state: Plain state, kept out of the module's registries.
    """

    mod_state: Any

    def run_host(self, z: Tensor, **arguments: Any) -> Tensor:
        """Return tokens (B, K, D) after the host's forward."""
        y: Tensor = super().forward(z, **arguments)
        return y

    def observe(
        self, run: Callable[[], Tensor], valid_BN: Tensor | None, average: str, forward_pass: ForwardPass | None
    ) -> Tensor:
        """Return what `run` does, and share the attention that each token received in it.

        Args:
            run: Runs the host's attention on all tokens.
            valid_BN: False where one is padding (B, N); None where none is.
            average: See `mmod.config.WithImportance`.
            forward_pass: The pass that the block runs in.

        Raises:
            RuntimeError: The host calls no attention that can be read.
        """
        span = self.mod_state.span
        assert forward_pass is not None
        assert span is not None
        # Compilers lose what `with ... as` binds.
        captured = capture_importance(valid_BN, average)
        with captured:
            y = run()
        if captured.importance_BN is None:
            raise RuntimeError(
                f"no attention was seen in this {type(self).__name__}: it calls neither scaled_dot_product_attention "
                "nor softmax over (B, H, N, N), so importance cannot be read from it"
            )
        forward_pass.scores[span] = SharedScore(captured.importance_BN)
        return y

    def as_node(self, x: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the block as one node of the graph that torch.fx traces: decisions are no symbolic values."""
        return x.tracer.create_proxy("call_module", x.tracer.path_of_module(self), (x, *args), dict(kwargs))

    def __prepare_scriptable__(self) -> nn.Module:
        """Refuse TorchScript."""
        raise RuntimeError(
            "a routed model cannot be scripted: its blocks take the host's arguments as they come, which TorchScript "
            f"has no types for. {_EXPORT}"
        )


class RoutedBlock(Deciding, ConvertedBlock):
    """Mixin that runs a host block on the tokens its router keeps; all others pass by unchanged.

    Attributes:
        router: Decides which tokens run; the only module added to the host.
        mod_state: Plain state, see `RoutedState`.
    """

    router: Router
    mod_state: RoutedState

    @staticmethod
    def choose_way(call: BlockCall, config: RoutingConfig) -> Way:
        """Return how a block runs that is routed by a config."""
        if config.merges_inside:
            return TwoHalves(call, config)
        if config.operator != "block":
            return OneBranch(call, config)
        return KeptAlone(call, config) if config.context == "kept" else AmongAll(call, config)

    @property
    def cost_follows_data(self) -> bool:
        """Whether it is routed by threshold."""
        return self.router.config.select != "topk"

    def assume_kept(self, share: float) -> float:
        """Choose a share of the tokens by top-k; return the share where whole images, or no tokens, are kept."""
        router, select = self.router, self.router.config.select
        if isinstance(select, Threshold) and select.max_tokens is not None:
            # So many slots run, whatever fills them.
            return 1.0
        if router.config.router.whole:
            # Training runs all tokens at such a gate.
            router.config = router.config.replace(gate="step")
            router.train()
            return share
        router.config = router.config.replace(select="topk")
        # A share is a count over N in most traces; the nearest simple fraction gives that count back exactly.
        router.capacity = Fraction(share).limit_denominator(10_000)
        return 1.0 if share else 0.0

    def missed(self, flops: Mapping[str, int], name: str) -> int:
        """Return the FLOPs of the block without its router, or of the branch that skipped images miss."""
        branch = self.mod_state.call.operators.get(str(self.router.config.operator))
        return flops[name] - flops[f"{name}.router"] if branch is None else flops[f"{name}.{branch}"]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Route tokens (B, N, D): decide, enter the kept rows, run the host's block on them, leave.

        Source: Raposo et al., arXiv 2404.02258 (MoD), equation 1.
        """
        if isinstance(x, fx.Proxy):
            return self.as_node(x, args, kwargs)
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
        scored = x if way.scored_norm is None else way.scored_norm(self)(x)
        if forward_pass is None:
            routing = router(scored, None, tokens)
        else:
            routing = state.decide(router, scored, tokens, forward_pass, self.training)
        if self.training or state.records.value.traced or router.rule.partial is not None:
            routing = state.record(router, routing, self.training)
        if rows is None:
            rows = way.rows(self, x, arguments, routing)
        z = rows.enter(x, routing)
        y = way.run(self, super().forward, z, arguments, rows)
        return rows.leave(y) if forward_pass is None else state.leave_rows(y, rows, router, forward_pass)

    def enter(self, x: Tensor, arguments: Mapping[str, Any]) -> ForwardPass | None:
        """Return the forward pass that a block runs in which shares something, or None where it does not now."""
        return self.mod_state.enter(x, self.training)

    def attend(
        self, x: Tensor, arguments: Mapping[str, Any], forward_pass: ForwardPass | None, held: Rows | None
    ) -> Tensor:
        """Return the tokens, or the rows that were handed on, after attention, which a block runs before it decides."""
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
    """Mixin that shares the importance of a dense host block's attention with the routed blocks after it.

    Attributes:
        mod_state: Plain state, see `ImportanceState`.
    """

    mod_state: ImportanceState

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the host block on tokens (B, N, D) and share the attention each of them received in it."""
        if isinstance(x, fx.Proxy):
            return self.as_node(x, args, kwargs)
        state = self.mod_state
        if not state.wanted:
            return super().forward(x, *args, **kwargs)
        forward_pass = state.enter(x, training=True)
        assert forward_pass is not None
        valid_BN = state.call.marks(state.call.bind(args, kwargs), x, forward_pass).valid_BN
        y = self.observe(partial(super().forward, x, *args, **kwargs), valid_BN, state.average, forward_pass)
        state.leave(forward_pass)
        return y
