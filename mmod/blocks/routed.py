"""Routed blocks: mixins in front of a host's class, whose forward is called and never copied.

Axes: B images, N tokens, K slots per image, D channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NoReturn, cast

from torch import Tensor, nn

from mmod.blocks.call import BlockCall, DecoderCall
from mmod.blocks.converted import EXPORT, ConvertedBlock
from mmod.blocks.execution import AmongAll, CachedTokens, Execution, KeptTokens, MlpOfKept, OneBranch
from mmod.blocks.passes import SpanPass
from mmod.blocks.record import Deciding
from mmod.blocks.rows import Rows
from mmod.blocks.span import BlockState
from mmod.blocks.symbolic import trace_as_node
from mmod.config import LOSSES, RoutingConfig, Threshold
from mmod.routing import BorrowedScore, Router, Routing, TokenMasks
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
        # Classes are compared first, which is no call as `isinstance` is.
        if type(x) is not Tensor and not isinstance(x, Tensor):
            return trace_as_node(self, x, args, kwargs)
        state = self.mod_state
        execution = state.execution
        if state.call.decodes:
            whole = cast(DecoderCall, state.call).begin_whole(args, kwargs, x)
            if whole is not None:
                return super().forward(x, **whole)
        # Most hosts pass tokens alone, and binding takes time.
        arguments = state.call.bind(args, kwargs) if args or kwargs else {}
        # Calls cost as much as small operations, so a block alone makes none for what it does not share.
        span_pass = None if state.span is None else self.enter(x, arguments)
        if execution.between_halves:
            x = self.attend(x, arguments, span_pass)
        rows, z = self.gather(x, arguments, span_pass)
        y = execution.run(self, super().forward, z, arguments, rows)
        return rows.write_back(y) if span_pass is None else self.leave(y, rows, span_pass)

    def enter(self, x: Tensor, arguments: Mapping[str, Any]) -> SpanPass | None:
        """Return what the block shares with others in this pass; None for nothing."""
        return None

    def attend(self, x: Tensor, arguments: Mapping[str, Any], span_pass: SpanPass | None) -> Tensor:
        """Return tokens after the attention that runs before the decision."""
        halves = self.mod_state.call.halves
        assert halves is not None
        return halves.attend(self, x, arguments)

    def gather(self, x: Tensor, arguments: Mapping[str, Any], span_pass: SpanPass | None) -> tuple[Rows, Tensor]:
        """Decide about tokens (B, N, D), and return the rows that run, with their state before the block."""
        state = self.mod_state
        tokens = state.call.masks(arguments, x) if arguments or state.call.masks_always else NO_MASKS
        scored = self.normed(x) if state.execution.scores_norm else x
        routing: Routing = self.router(scored, None, tokens)
        if self.training or state.records.value.traced:
            self.note(routing, x)
        rows = state.execution.make_rows(self, x, arguments, routing)
        return rows, rows.z

    def leave(self, y: Tensor, rows: Rows, span_pass: SpanPass) -> Tensor:
        """Return what the next block gets, from the rows after the block."""
        return rows.write_back(y)

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
