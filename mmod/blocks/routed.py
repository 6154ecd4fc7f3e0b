"""Routed blocks, dense blocks that compute importance for them, and the plain state of both.

Both are mixins in front of a host's class, so the host's forward is called and never copied.
Axes: B images, N tokens, K slots per image, D channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple, NoReturn, cast

from torch import Tensor, nn

from mmod.blocks.branches import Branch, BranchState, OneBranch, make_branch, make_halves, make_observed
from mmod.blocks.call import BlockCall, DecoderCall
from mmod.blocks.conversion import Mixin, convert, is_converted
from mmod.blocks.inner import Inner, running_branch
from mmod.blocks.passes import SpanPass
from mmod.blocks.record import Deciding, Records
from mmod.blocks.rows import AmongAll, CachedTokens, Execution, FusedNorm, KeptTokens, MlpOfKept, Rows
from mmod.blocks.span import Span
from mmod.blocks.symbolic import trace_as_node
from mmod.config import CHANGE, LOSSES, RoutingConfig, Threshold
from mmod.ops import capture_importance
from mmod.ops.intercept import AttentionIntercept, unseen_attention
from mmod.routing import BorrowedScore, Router, Routing, TokenMasks, token_change
from mmod.routing.shared import NAME as SHARED_ROUTER
from mmod.threads import PerThread

_EXPORT = "Use torch.export, torch.onnx.export(dynamo=True) or torch.compile, which replace TorchScript"
_TRACED = (
    "a routed model cannot be traced by torch.jit.trace or torch.onnx.export(dynamo=False), which would record how "
    f"many tokens are kept of this one input. {_EXPORT}"
)
_NO_MASKS = TokenMasks()


@dataclass(eq=False, kw_only=True)
class BlockState:
    """Plain state of a block in a span, invisible to state_dict and export.

    Args:
        call: How the host calls the block.
        span: The span that the block is part of; None if it shares nothing.
        place: The block's place in its span.
        number: The block's number in its stack.

    Attributes:
        begins: The block is the first module of its span. Where the span reads importance of the dense block in front,
            that `ImportanceBlock` is, and no routed block.
        ends: The block is the last module of its span.
    """

    call: BlockCall
    span: Span | None = None
    place: int = 0
    number: int = 0
    inner: PerThread[Inner] = field(default_factory=lambda: PerThread(Inner), repr=False)
    records: Records = field(default_factory=Records, init=False, repr=False)
    begins: bool = field(init=False)
    ends: bool = field(init=False)

    def __post_init__(self) -> None:
        self.begins = self.place == 0
        self.ends = self.span is None or self.place == self.span.last

    @property
    def passes(self) -> Span | None:
        """What finds the pass of the block's input."""
        return self.span


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


@dataclass(eq=False, kw_only=True)
class ImportanceState:
    """Plain state of the dense block at place 0 of a span, whose importance the others read.

    Args:
        routers: The routers of the span.
        importance: What importance is, see `RoutingConfig.importance`.
    """

    call: BlockCall
    span: Span
    routers: Sequence[Router]
    importance: str
    inner: PerThread[Inner] = field(default_factory=lambda: PerThread(Inner), repr=False)

    @property
    def passes(self) -> Span:
        """What finds the pass of the block's input."""
        return self.span

    @property
    def wanted(self) -> bool:
        """Whether any block reads importance in this forward pass."""
        return not self.span.for_loss or any(router.training for router in self.routers)


class ConvertedBlock(Mixin):
    """Mixin of a block that runs its host's forward itself."""

    def run_host(self, z: Tensor, **arguments: Any) -> Tensor:
        """Return tokens after the host's forward."""
        return super().forward(z, **arguments)

    def observe(
        self, run: Callable[[], Tensor], x: Tensor, queries_BN: Tensor | None, importance: str
    ) -> tuple[Tensor, Tensor]:
        """Run what contains the host's attention on tokens x; return its result, and the importance of x (B, N).

        Args:
            queries_BN: True at tokens whose attention counts (B, N); None for all.
        """
        if importance == CHANGE:
            y = run()
            return y, token_change(x, y)
        captured = capture_importance(queries_BN, importance)
        y = self.run_observed(run, captured)
        if captured.importance_BN is None:
            raise unseen_attention("importance cannot be read from it")
        return y, captured.importance_BN

    def run_observed(self, run: Callable[[], Tensor], watch: AttentionIntercept) -> Tensor:
        """Run what contains the host's attention, inside a mode that reads it."""
        state = self.mod_state
        name = state.call.operators.get("attention")
        attention = None if name is None else self.get_submodule(name)
        # Each call of torch inside the mode costs time, so the attention alone runs in it, unless its forward was
        # replaced.
        if isinstance(attention, Branch) and "forward" not in vars(attention):
            with running_branch(state.inner, watch):
                return run()
        watch.cross = state.call.cross
        inner = state.inner.value
        # A hook inside the block may call the model again.
        outer = inner.observed
        inner.observed = True
        try:
            y: Tensor = watch.run(run, (), {})
        finally:
            inner.observed = outer
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
    def choose_execution(call: BlockCall, config: RoutingConfig) -> Execution:
        """Return how a block with this config runs."""
        if config.merges_inside:
            return MlpOfKept(call, config)
        if config.operator != "block":
            return OneBranch(call, config)
        if config.context == "all":
            return AmongAll(call, config)
        return CachedTokens(call, config) if call.caches else KeptTokens(call, config)

    @property
    def cost_follows_data(self) -> bool:
        """Whether the router selects by threshold, at least in evaluation."""
        config = self.router.config
        return config.select != "topk" or config.language.inference_threshold is not None

    def assume_kept(self, share: float) -> float:
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
        if not isinstance(x, Tensor):
            return trace_as_node(self, x, args, kwargs)
        state = self.mod_state
        execution = state.execution
        # Most hosts pass tokens alone, and binding takes time.
        arguments = state.call.bind(args, kwargs) if args or kwargs else {}
        if execution.between_halves:
            x = self.attend(x, arguments)
        routing = self.decide(x, arguments)
        rows = execution.make_rows(self, x, arguments, routing)
        z = rows.gather(x, routing)
        y = execution.run(self, super().forward, z, arguments, rows)
        return rows.write_back(y)

    def decide(self, x: Tensor, arguments: Mapping[str, Any]) -> Routing:
        """Return the router's decision about tokens (B, N, D)."""
        state = self.mod_state
        tokens = state.call.masks(arguments, x) if arguments or state.call.masks_always else _NO_MASKS
        scored = self.normed(x) if state.execution.scores_norm else x
        routing: Routing = self.router(scored, None, tokens)
        if self.training or state.records.value.traced:
            self.note(routing, x)
        return routing

    def normed(self, x: Tensor) -> Tensor:
        """Return the output of the block's first norm, which the router scores instead of the tokens."""
        norm = cast(DecoderCall, self.mod_state.call).first_norm(self)
        normed: Tensor = norm(x)
        return normed

    def note(self, routing: Routing, x: Tensor) -> None:
        """Record a decision and, in training, its losses. In other calls nobody reads what would keep tensors alive."""
        self.record.keep("", routing)
        if self.training:
            self.tell_of_frozen()
            losses = self.losses(routing)
            if losses:
                self.keep_loss(losses, x, routing.score_BN)

    def attend(self, x: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """Return tokens after the attention that runs before the decision."""
        halves = self.mod_state.call.halves
        assert halves is not None
        return halves.attend(self, x, arguments)

    def _slow_forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse torch.jit.trace, under which torch calls this in place of `forward`."""
        raise RuntimeError(_TRACED)

    def scorers(self) -> dict[str, nn.Module]:
        """Return the router, and the score that it shares with others."""
        router = self.router
        if isinstance(router.score, BorrowedScore):
            return {"router": router, SHARED_ROUTER: router.score.held}
        return {"router": router}

    @property
    def has_loss(self) -> bool:
        """Whether the config has a loss."""
        return bool(self.router.config.losses)

    def losses(self, routing: Routing) -> list[Tensor]:
        """Return the weighted losses of a decision that the config names."""
        router = self.router
        return [weight * LOSSES[name](routing, router) for name, weight in router.config.losses.items()]


class SpannedBlock(RoutedBlock):
    """Mixin of a routed block in a span, which shares scores, decisions and rows with the blocks around it."""

    title = "Routed"

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Route tokens (B, N, D), or rows that the block before passed on (B, K, D), see `RoutedBlock.forward`."""
        if not isinstance(x, Tensor):
            return trace_as_node(self, x, args, kwargs)
        state = self.mod_state
        span = state.span
        execution = state.execution
        arguments = state.call.bind(args, kwargs) if args or kwargs else {}
        assert span is not None
        shared = None
        if not state.call.caches or self.shares(arguments):
            shared = span.enter(x, self)
        if shared is None:
            return super().forward(x, **arguments)
        rule = self.router.rule
        rows = shared.rows
        routing = None
        if rows is not None:
            if rule.matches(rows.rule):
                routing = rows.routing
            elif not rule.config.joins:
                x = rows.write_back(x)
                rows = shared.rows = None
        if execution.between_halves:
            x = self.attend_in_span(x, arguments, shared, rows)
        if routing is None:
            tokens = state.call.masks(arguments, x) if arguments or state.call.masks_always else _NO_MASKS
            routing = span.decide(x, self, shared, rule, tokens)
        if self.training or state.records.value.traced:
            self.note(routing, x)
        if rows is None:
            rows = execution.make_rows(self, x, arguments, routing)
        z = rows.gather(x, routing)
        y = execution.run(self, super(RoutedBlock, self).forward, z, arguments, rows)
        return span.leave(y, shared, rows, rule, self)

    def shares(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether a block with a cache takes part in its span in this call."""
        return True

    def attend_in_span(
        self, x: Tensor, arguments: Mapping[str, Any], shared: SpanPass, passed_on: Rows | None
    ) -> Tensor:
        """Return tokens, or rows that were passed on, after the attention that runs before the decision."""
        state = self.mod_state
        call = state.call
        rows = passed_on
        z = x
        earlier = None
        if rows is None:
            assert state.span is not None
            earlier = state.span.before(shared, state.place, x.device)
        if earlier is not None:
            rows = Rows(x)
            z = rows.gather(x, earlier)
        if rows is not None:
            arguments = call.select_tokens(arguments, rows.x_BND, rows.routing)
        if state.observes:
            queries_BN = call.masks(arguments, z).queries_BN
            attend = partial(self.attend, z, arguments)
            y, shared.score_BN = self.observe(attend, z, queries_BN, self.router.config.importance)
        else:
            y = self.attend(z, arguments)
        # The decision that follows narrows rows which were passed on; rows of its own go back to all tokens.
        if rows is passed_on or rows is None:
            return y
        return rows.write_back(y)


class ImportanceBlock(ConvertedBlock):
    """Mixin that shares the importance of a dense block's tokens with the routed blocks after it."""

    mod_state: ImportanceState

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the host's block on tokens (B, N, D) and share their importance."""
        if not isinstance(x, Tensor):
            return trace_as_node(self, x, args, kwargs)
        state = self.mod_state
        # A loss alone reads the importance, and only in training.
        if not state.wanted:
            return super().forward(x, *args, **kwargs)
        shared = state.span.begin(x)
        shared.busy = True
        queries_BN = state.call.masks(state.call.bind(args, kwargs), x).queries_BN
        run = partial(super().forward, x, *args, **kwargs)
        y, shared.score_BN = self.observe(run, x, queries_BN, state.importance)
        shared.busy = False
        if not shared.uninterrupted:
            state.span.hand_on(shared, y)
        return y


class RoutedMixins(NamedTuple):
    """Mixins of a host's blocks.

    Args:
        alone: Of a routed block that shares nothing with others.
        in_span: Of a routed block in a span.
        importance: Of a dense block whose importance a span reads.
    """

    alone: type[RoutedBlock]
    in_span: type[SpannedBlock]
    importance: type[ImportanceBlock]


ROUTED = RoutedMixins(RoutedBlock, SpannedBlock, ImportanceBlock)


def make_routed(block: nn.Module, router: Router, state: RoutedState, mixins: RoutedMixins = ROUTED) -> None:
    """Convert a dense block into a routed one."""
    mixin = mixins.alone if state.span is None else mixins.in_span
    call = state.call
    convert(block, mixin, state, call.shell)
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
            convert(branch, Branch, BranchState(state.inner, ""))


def make_importance(block: nn.Module, state: ImportanceState, mixins: RoutedMixins = ROUTED) -> None:
    """Convert a dense block into one that shares its importance."""
    convert(block, mixins.importance, state, state.call.shell)
    if state.importance != CHANGE:
        # The change of a token is measured around the block.
        make_observed(block, state.call, state.inner)
