"""Routed blocks and the dense blocks that compute importance for them.

Both are mixins put in front of a host's own class, so the host's forward is called and never copied.
Axes: B images, N tokens, K slots per image, D channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from mmod.blocks.forward_pass import ForwardPass, SharedScore
from mmod.blocks.fused_norm import gather_kept
from mmod.blocks.packed import reweigh_skipped, run_packed
from mmod.blocks.state import ImportanceState, RoutedState
from mmod.ops import Packing, capture_importance, merge_rows
from mmod.routing import Router, Routing


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

    def __prepare_scriptable__(self) -> nn.Module:
        """Refuse TorchScript."""
        raise RuntimeError(
            "a routed model cannot be scripted: its blocks take the host's arguments as they come, which TorchScript "
            "has no types for. Use torch.export or torch.compile, which replace TorchScript"
        )


class RoutedBlock(ConvertedBlock):
    """Mixin that runs a host block on the tokens its router keeps; all others pass by unchanged.

    Attributes:
        router: Decides which tokens run; the only module added to the host.
        mod_state: Plain state, see `RoutedState`.
    """

    router: Router
    mod_state: RoutedState

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Route: gather the kept rows, run the host block on them, weigh the update, write it back.

        Args:
            x: Tokens (B, N, D).
            args: Further arguments of the host block.
            kwargs: The same by name.
        """
        arguments = self.mod_state.call.bind(args, kwargs)
        forward_pass = self.enter(x, arguments)
        y = self.run_routed(x, arguments, self.decide(x, arguments, forward_pass))
        self.mod_state.leave(forward_pass)
        return y

    def enter(self, x: Tensor, arguments: Mapping[str, Any]) -> ForwardPass | None:
        """Return the forward pass that the block runs in, or None where it shares nothing."""
        return self.mod_state.enter(x, self.training)

    def decide(self, x: Tensor, arguments: Mapping[str, Any], forward_pass: ForwardPass | None) -> Routing:
        """Return which tokens run."""
        tokens = self.mod_state.call.marks(arguments, x, forward_pass)
        return self.mod_state.decide(self.router, x, tokens, forward_pass, self.training)

    def run_routed(self, x: Tensor, arguments: Mapping[str, Any], routing: Routing) -> Tensor:
        """Return all tokens after the block, given the decision."""
        call, kept_alone = self.mod_state.call, self.router.config.context == "kept"
        if routing.valid_BK is not None and routing.total and kept_alone and call.can_pack(self, arguments):
            return run_packed(x, routing, partial(self.run_packed, x, arguments, routing))
        z = gather_kept(x, routing, getattr(self, call.fused_norm) if call.fused_norm else None)
        if not routing.index_BK.shape[1]:
            y = z
        elif kept_alone:
            y = self.run_host(z, call.select_tokens(arguments, x, routing))
        else:
            y = call.attend_to_all(self, super().forward, arguments, x, z, routing)
        return merge(x, z, y, routing)

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
        """Run the host block and share the attention each token received in it.

        Args:
            x: Tokens (B, N, D).
            args: Further arguments of the host block.
            kwargs: The same by name.
        """
        state = self.mod_state
        if not state.wanted:
            return super().forward(x, *args, **kwargs)
        forward_pass = state.enter(x, training=True)
        assert forward_pass is not None
        assert state.span is not None
        marks = state.call.marks(state.call.bind(args, kwargs), x, forward_pass)
        captured = capture_importance(marks.valid_BN, state.per_viewer)
        with captured:
            y = super().forward(x, *args, **kwargs)
        if captured.importance_BN is None:
            raise RuntimeError(
                f"no attention was seen in this {type(self).__name__}: it calls neither scaled_dot_product_attention "
                "nor softmax over (B, H, N, N), so importance cannot be read from it"
            )
        forward_pass.scores[state.span] = SharedScore(captured.importance_BN)
        state.leave(forward_pass)
        return y


def merge(x_BND: Tensor, z_BKD: Tensor, y_BKD: Tensor, routing: Routing) -> Tensor:
    """Write the weighed update of the kept rows back among all rows.

    Args:
        x_BND: All tokens before the block (B, N, D).
        z_BKD: The kept ones among them (B, K, D).
        y_BKD: The kept ones after the block (B, K, D).
        routing: The decision.

    Returns:
        All tokens after the block (B, N, D).
    """
    rest_BND, y_BKD = reweigh_skipped(x_BND, routing), y_BKD.to(x_BND.dtype)
    places = (routing.valid_BK, routing.inverse_BN)
    return merge_rows(rest_BND, routing.index_BK, z_BKD, y_BKD, routing.gate_BK, *places)
