"""Routed blocks and the dense blocks that compute importance for them.

Both are mixins put in front of a host's own class, so the host's forward is called and never copied.
Axes: B images, N tokens, K slots per image, D channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from mmod.blocks.fused_norm import gather_kept
from mmod.blocks.packed import reweigh_skipped, run_packed
from mmod.blocks.state import RoutedState, SharedScore, Span
from mmod.ops import capture_importance, merge_rows
from mmod.routing import Router, Routing

_NO_TORCHSCRIPT = (
    "a routed model cannot be scripted: its blocks take the host's arguments as they come, which TorchScript has no "
    "types for. Use torch.export or torch.compile, which replace TorchScript"
)


class RoutedBlock(nn.Module):
    """Mixin that runs a host block on the tokens its router keeps; all others pass by unchanged.

    Attributes:
        router: Decides which tokens run; the only module added to the call.
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
        call = self.mod_state.call
        arguments = call.bind(args, kwargs)
        marks = call.valid(arguments, x), call.protected(arguments, x)
        routing = self.mod_state.decide(
            self.router, x, self.training, lambda shared_BN: self.router(x, shared_BN, *marks), marks
        )
        to_all = self.router.config.context == "all"
        if routing.valid_BK is not None and routing.total and not to_all and call.can_pack(self, arguments):
            forward, pack = super().forward, partial(call.pack, arguments, x, routing)
            return run_packed(x, routing, lambda z_1TD, packing: forward(z_1TD, **pack(packing)))
        z_BKD = gather_kept(x, routing, getattr(self, call.fused_norm) if call.fused_norm else None)
        if not routing.index_BK.shape[1]:
            y_BKD = z_BKD
        elif to_all:
            y_BKD = call.attend_to_all(self, super().forward, arguments, x, z_BKD, routing)
        else:
            y_BKD = super().forward(z_BKD, **call.select_tokens(arguments, x, routing))
        return merge(x, z_BKD, y_BKD, routing)

    def __prepare_scriptable__(self) -> nn.Module:
        """Refuse TorchScript."""
        raise RuntimeError(_NO_TORCHSCRIPT)


class ImportanceBlock(nn.Module):
    """Mixin that hands the importance of a dense host block's attention to the routed blocks after it.

    Attributes:
        mod_state: Plain state: how the host calls the block, and where importance goes.
    """

    mod_state: ImportanceState

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the host block and hand over the attention each token received in it.

        Args:
            x: Tokens (B, N, D).
            args: Further arguments of the host block.
            kwargs: The same by name.
        """
        if not self.mod_state.wanted:
            return super().forward(x, *args, **kwargs)
        valid_BN = self.mod_state.call.valid(self.mod_state.call.bind(args, kwargs), x)
        captured = capture_importance(valid_BN, self.mod_state.per_viewer)
        with captured:
            y = super().forward(x, *args, **kwargs)
        if captured.importance_BN is None:
            raise RuntimeError(
                f"no attention was seen in this {type(self).__name__}: it calls neither scaled_dot_product_attention "
                "nor softmax over (B, H, N, N), so importance cannot be read from it"
            )
        self.mod_state.span.put(SharedScore(captured.importance_BN))
        return y

    def __prepare_scriptable__(self) -> nn.Module:
        """Refuse TorchScript."""
        raise RuntimeError(_NO_TORCHSCRIPT)


class ImportanceState:
    """The state of a block that computes importance.

    Args:
        call: How the host calls the block.
        span: The blocks that importance goes to.
        routers: Their routers.
        training_only: Importance serves a loss only, so it is computed only while one of the routers trains.
        per_viewer: See `RoutingConfig.importance`.
    """

    def __init__(
        self, call: Any, span: Span, routers: Sequence[Router], *, training_only: bool, per_viewer: bool
    ) -> None:
        self.call = call
        self.span = span
        self.routers = tuple(routers)
        self.training_only = training_only
        self.per_viewer = per_viewer

    @property
    def wanted(self) -> bool:
        """Whether any block reads importance in this forward pass."""
        return not self.training_only or any(router.training for router in self.routers)


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
