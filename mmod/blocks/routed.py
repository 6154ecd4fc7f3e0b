"""Routed blocks and the dense blocks that compute importance for them.

Both are mixins put in front of a host's own class, so the host's forward is called and never copied.
Axes: B images, N tokens, K slots per image, D channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from mmod.blocks.call import BlockCall
from mmod.blocks.forward_pass import ForwardPass, SharedScore
from mmod.blocks.record import Deciding
from mmod.blocks.state import ImportanceState, RoutedState
from mmod.blocks.ways import AmongAll, KeptAlone, OneBranch, TwoHalves, Way
from mmod.config import RoutingConfig, Threshold
from mmod.ops import capture_importance
from mmod.routing import Router, Routing, TokenMarks

_EXPORT = "Use torch.export, torch.onnx.export(dynamo=True) or torch.compile, which replace TorchScript"


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
        self, run: Callable[[], Tensor], marks: TokenMarks, average: str, forward_pass: ForwardPass | None
    ) -> Tensor:
        """Return what `run` does, and share the attention that each token received in it.

        Args:
            run: Runs the host's attention on all tokens.
            marks: Which of them are padding.
            average: See `mmod.config.WithImportance`.
            forward_pass: The pass that the block runs in.

        Raises:
            RuntimeError: The host calls no attention that can be read.
        """
        span = self.mod_state.span
        assert forward_pass is not None
        assert span is not None
        # Compilers lose what `with ... as` binds.
        captured = capture_importance(marks.valid_BN, average)
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
            raise RuntimeError(
                "a routed model cannot be traced by torch.jit.trace or torch.onnx.export(dynamo=False), which would "
                f"record how many tokens are kept of this one input. {_EXPORT}"
            )
        state, way = self.mod_state, self.mod_state.way
        arguments = state.call.bind(args, kwargs)
        forward_pass = self.enter(x, arguments)
        x, held = state.held(x, self.router, forward_pass)
        x = way.before(self, x, arguments, forward_pass, held)
        routing = self.decide(x, arguments, forward_pass)
        rows = held or way.rows(self, x, arguments, routing)
        y = way.run(self, rows.enter(x, routing), arguments, rows)
        return state.leave_rows(y, rows, self.router, forward_pass)

    def enter(self, x: Tensor, arguments: Mapping[str, Any]) -> ForwardPass | None:
        """Return the forward pass that the block runs in, or None where it shares nothing."""
        return self.mod_state.enter(x, self.training)

    def decide(self, x: Tensor, arguments: Mapping[str, Any], forward_pass: ForwardPass | None) -> Routing:
        """Return the decision about all tokens.

        Args:
            x: All tokens, or the rows that the block before handed on.
            arguments: The block's arguments after the tokens, by name.
            forward_pass: The pass that the block runs in; None where it shares nothing.
        """
        tokens = self.mod_state.call.marks(arguments, x, forward_pass)
        return self.mod_state.decide(self.router, x, tokens, forward_pass, self.training)


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
        marks = state.call.marks(state.call.bind(args, kwargs), x, forward_pass)
        y = self.observe(partial(super().forward, x, *args, **kwargs), marks, state.average, forward_pass)
        state.leave(forward_pass)
        return y
