"""Routed blocks, dense blocks that compute importance for them, and the plain state of both.

Both are mixins in front of a host's class, so the host's forward is called and never copied.
Axes: B images, N tokens, K slots per image, D channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from mmod.blocks.branches import Branch, BranchState, OneBranch, make_branch, make_halves, make_observed
from mmod.blocks.call import BlockCall, DecoderCall
from mmod.blocks.conversion import Mixin, convert, is_converted
from mmod.blocks.inner import Inner, running_branch
from mmod.blocks.record import Deciding, Records
from mmod.blocks.rows import Execution, FusedNorm, KeptTokens, MlpOfKept, Rows
from mmod.blocks.span import Span, SpanPass
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
class RoutedState:
    """Plain state of a routed block, invisible to state_dict and export.

    Args:
        call: How the host calls the block.
        execution: How the block runs on the rows of a decision.
        span: The span that the block is part of; None if it shares nothing.
        place: The block's place in its span.
        number: The block's number in its stack.
        passes_rows: The next block shares the span's scores, and can take rows instead of all tokens.
        observes: The span reads importance from this block's attention, or from what it changes, after which the block
            decides.

    Attributes:
        begins: The block is the first module of its span. Where the span reads importance of the dense block in front,
            that `ImportanceBlock` is, and no routed block.
        ends: The block is the last module of its span.
    """

    call: BlockCall
    execution: Execution
    span: Span | None = None
    place: int = 0
    number: int = 0
    passes_rows: bool = False
    observes: bool = False
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
        return not self.span.training_only or any(router.training for router in self.routers)


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
        y: Tensor = watch.run(run, (), {})
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
        return KeptTokens(call, config)

    @property
    def cost_follows_data(self) -> bool:
        """Whether the router selects by threshold."""
        return self.router.config.select != "topk"

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

        In a span, a block enters the pass that its input belongs to before these steps, and leaves it after them.

        Source: Raposo et al., arXiv 2404.02258 (MoD), equation 1.
        """
        if not isinstance(x, Tensor):
            return trace_as_node(self, x, args, kwargs)
        if torch.jit.is_tracing():
            raise RuntimeError(_TRACED)
        state = self.mod_state
        call = state.call
        execution = state.execution
        # Most hosts pass tokens alone, and binding takes time.
        arguments = call.bind(args, kwargs) if args or kwargs else {}
        router = self.router
        span = state.span
        # What the blocks of the span share in this pass, and the rows that the previous one passed on.
        shared = None
        rows = None
        if span is not None and (not call.caches or self.shares(arguments)):
            shared = span.enter(x, state, router, self.training)
        if span is not None and shared is not None and shared.rows is not None:
            x, rows = span.take_rows(x, shared, router)
        if execution.between_halves:
            x = self.attend(x, arguments, shared, rows)
        # Decide: alone, or by what the span knows.
        tokens = call.masks(arguments, x) if arguments or call.masks_always else _NO_MASKS
        scored = self.normed(x) if execution.scores_norm else x
        if span is None or shared is None:
            routing = router(scored, None, tokens)
        else:
            routing = None
            if shared.rows is not None or shared.decisions:
                routing = span.decided(scored, shared, state, router, tokens)
            if routing is None:
                routing = router(scored, shared.score_BN, tokens)
            if not state.ends:
                span.remember(routing, shared, state, router, tokens)
        record = state.records.value
        # Elsewhere nobody reads the decision, which would keep its tensors alive.
        if self.training or record.traced:
            record.keep("", routing)
        if self.training:
            self.tell_of_frozen()
            losses = self.losses(routing)
            if losses:
                self.keep_loss(losses, x, routing.score_BN)
        # Gather, run and write back.
        if rows is None:
            rows = execution.make_rows(self, x, arguments, routing)
        z = rows.gather(x, routing)
        y = execution.run(self, super().forward, z, arguments, rows)
        if span is None or shared is None:
            return rows.write_back(y)
        return span.leave(y, shared, rows, router, state)

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

    def shares(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether a block with a cache takes part in its span in this call."""
        return True

    def normed(self, x: Tensor) -> Tensor:
        """Return the output of the block's first norm, which the router scores instead of the tokens."""
        norm = cast(DecoderCall, self.mod_state.call).first_norm(self)
        normed: Tensor = norm(x)
        return normed

    def attend(self, x: Tensor, arguments: Mapping[str, Any], shared: SpanPass | None, held: Rows | None) -> Tensor:
        """Return tokens, or rows that were passed on, after the attention that runs before the decision."""
        state = self.mod_state
        call = state.call
        rows = held
        z = x
        earlier = None
        if rows is None and shared is not None and state.span is not None:
            earlier = state.span.before(shared, state.place, x.device)
        if earlier is not None:
            rows = Rows(x)
            z = rows.gather(x, earlier)
        if rows is not None:
            arguments = call.select_tokens(arguments, rows.x_BND, rows.routing)
        assert call.halves is not None
        attend = partial(call.halves.attend, self, z, arguments)
        if state.observes:
            assert shared is not None
            queries_BN = call.masks(arguments, z).queries_BN
            y, shared.score_BN = self.observe(attend, z, queries_BN, self.router.config.importance)
        else:
            y = attend()
        # The decision that follows narrows rows which were passed on; rows of its own go back to all tokens.
        if rows is held or rows is None:
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


def make_routed(block: nn.Module, router: Router, state: RoutedState, mixin: type[RoutedBlock] = RoutedBlock) -> None:
    """Convert a dense block into a routed one."""
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


def make_importance(block: nn.Module, state: ImportanceState, mixin: type[ImportanceBlock] = ImportanceBlock) -> None:
    """Convert a dense block into one that shares its importance."""
    convert(block, mixin, state, state.call.shell)
    if state.importance != CHANGE:
        # The change of a token is measured around the block.
        make_observed(block, state.call, state.inner)
