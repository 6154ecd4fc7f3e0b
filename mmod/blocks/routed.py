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

from mmod.blocks.branches import BranchRows, branch_on_rows
from mmod.blocks.forward_pass import ForwardPass, SharedScore
from mmod.blocks.packed import run_packed
from mmod.blocks.record import Deciding
from mmod.blocks.rows import enter_rows, leave_rows
from mmod.blocks.span import HeldRows
from mmod.blocks.state import ImportanceState, RoutedState
from mmod.config import Threshold
from mmod.ops import Packing, capture_importance
from mmod.routing import Router, Routing, TokenMarks

_EXPORT = "Use torch.export, torch.onnx.export(dynamo=True) or torch.compile, which replace TorchScript"


class ConvertedBlock(nn.Module):
    """Mixin of a block whose class was changed.

    Attributes:
        mod_state: Plain state, kept out of the module's registries.
    """

    mod_state: Any

    def run_host(self, z: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """Return what the host's own forward makes of tokens (B, K, D), given its arguments by name."""
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
        """Route tokens (B, N, D): gather the kept rows, run the host block on them, weigh the update, write it back."""
        if isinstance(x, fx.Proxy):
            return self.as_node(x, args, kwargs)
        if torch.jit.is_tracing():
            raise RuntimeError(
                "a routed model cannot be traced by torch.jit.trace or torch.onnx.export(dynamo=False), which would "
                f"record how many tokens are kept of this one input. {_EXPORT}"
            )
        arguments = self.mod_state.call.bind(args, kwargs)
        forward_pass = self.enter(x, arguments)
        held: HeldRows | None = None if forward_pass is None else forward_pass.held
        if held is not None and held.slots != x.shape[1]:
            # Rows of a pass that was interrupted.
            forward_pass = held = None
        if forward_pass is not None and held is not None and not held.serves(self.router):
            x, held, forward_pass.held = held.leave(x), None, None
        if self.router.config.merges_inside:
            y = self._run_halves(x, arguments, forward_pass, held)
            self.mod_state.leave(forward_pass)
            return y
        routing = self.decide(x, arguments, forward_pass)
        if held is None and not self._hands_on(forward_pass, routing):
            y = self.run_routed(x, arguments, routing)
        else:
            assert forward_pass is not None
            y = self._run_held(x, arguments, forward_pass, held or HeldRows(x, self.router), routing)
        self.mod_state.leave(forward_pass)
        return y

    def _hands_on(self, forward_pass: ForwardPass | None, routing: Routing) -> bool:
        """Return whether the next block is given rows in the place of all tokens."""
        state = self.mod_state
        may = forward_pass is not None and forward_pass.holds_rows and state.hands_on
        return may and routing.valid_BK is None and routing.index_BK.shape[1] < routing.score_BN.shape[1]

    def _run_held(
        self, x: Tensor, arguments: Mapping[str, Any], forward_pass: ForwardPass, held: HeldRows, routing: Routing
    ) -> Tensor:
        """Run the block on rows that blocks of its span hand on; return them, or all tokens after the last block."""
        call = self.mod_state.call
        z = held.enter(x, routing, getattr(self, call.fused_norm) if call.fused_norm else None)
        y = self.run_host(z, call.select_tokens(arguments, held.x_BND, routing))
        forward_pass.held = held if self._hands_on(forward_pass, routing) else None
        return y if forward_pass.held is held else held.leave(y)

    def _run_halves(
        self, x: Tensor, arguments: Mapping[str, Any], forward_pass: ForwardPass | None, held: HeldRows | None
    ) -> Tensor:
        """Run attention on the rows of the decision before, and the MLP on those of the block's own."""
        call, halves = self.mod_state.call, self.mod_state.call.halves
        assert halves is not None
        earlier = self.mod_state.before(self.router, x, forward_pass) if held is None else held.routing
        z = x if held is not None or earlier is None else enter_rows(x, earlier)
        if earlier is not None:
            arguments = call.select_tokens(arguments, x if held is None else held.x_BND, earlier)
        attend = partial(halves.attend, self, z, arguments)
        if self.mod_state.observes:
            marks = call.marks(arguments, z, forward_pass)
            y = self.observe(attend, marks, self.router.config.importance, forward_pass)
        else:
            y = attend()
        x = y if earlier is None or held is not None else leave_rows(x, z, y, earlier)
        routing = self.decide(x, arguments, forward_pass)
        hands_on = self._hands_on(forward_pass, routing)
        if held is None and hands_on:
            held = HeldRows(x, self.router)
        z = enter_rows(x, routing) if held is None else held.enter(x, routing)
        y = halves.feed(self, z)
        if forward_pass is not None:
            forward_pass.held = held if hands_on else None
        if held is None:
            return leave_rows(x, z, y, routing)
        return y if hands_on else held.leave(y)

    def enter(self, x: Tensor, arguments: Mapping[str, Any]) -> ForwardPass | None:
        """Return the forward pass that the block runs in, or None where it shares nothing."""
        return self.mod_state.enter(x, self.training)

    def decide(self, x: Tensor, arguments: Mapping[str, Any], forward_pass: ForwardPass | None) -> Routing:
        """Return which tokens run; `x` are all of them, or the rows that the block before has handed on."""
        tokens = self.mod_state.call.marks(arguments, x, forward_pass)
        return self.mod_state.decide(self.router, x, tokens, forward_pass, self.training)

    def run_routed(self, x: Tensor, arguments: Mapping[str, Any], routing: Routing) -> Tensor:
        """Return all tokens after the block, given the decision."""
        call, kept_alone = self.mod_state.call, self.router.config.context == "kept"
        if self.router.config.operator != "block":
            return self._run_operator(x, arguments, routing)
        if routing.valid_BK is not None and routing.total and kept_alone and call.can_pack(self, arguments):
            return run_packed(x, routing, partial(self.run_packed, x, arguments, routing))
        z = enter_rows(x, routing, getattr(self, call.fused_norm) if call.fused_norm else None)
        if not routing.index_BK.shape[1]:
            y = z
        elif kept_alone:
            y = self.run_host(z, call.select_tokens(arguments, x, routing))
        else:
            y = call.attend_to_all(self, super().forward, arguments, x, z, routing)
        return leave_rows(x, z, y, routing)

    def _run_operator(self, x: Tensor, arguments: Mapping[str, Any], routing: Routing) -> Tensor:
        """Return all tokens after the block, of which one branch runs on the kept ones alone."""
        call, config = self.mod_state.call, self.router.config
        attends = partial(call.attend_to_all, self, routing=routing) if config.context == "all" else None
        if config.operator == "attention" and attends is None:
            arguments = call.select_tokens(arguments, x, routing)
        with branch_on_rows(self.mod_state.tracker, BranchRows(routing, attends, config.operator in call.tuples)):
            return self.run_host(x, arguments)

    def run_packed(
        self, x: Tensor, arguments: Mapping[str, Any], routing: Routing, z_1TD: Tensor, packing: Packing
    ) -> Tensor:
        """Return kept tokens of the whole batch after the block, packed as one sequence (1, T, D)."""
        return self.run_host(z_1TD, self.mod_state.call.pack(arguments, x, routing, packing))


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
