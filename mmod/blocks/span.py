"""Rows that blocks of a span hand on, so that only the first of them enters and only the last leaves.

Axes: B images, N tokens, K slots per image, D channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from mmod.blocks.forward_pass import PassTracker
from mmod.blocks.hook import ModelHook
from mmod.blocks.rows import enter_rows, leave_rows
from mmod.ops import gather_rows, mean_rows
from mmod.routing import Router, Routing


class HeldRows:
    """The rows of a span, and how to give all tokens what became of them.

    Args:
        x_BND: All tokens before the span.
        router: The router of its first block.

    Attributes:
        x_BND: As above.
        routing: The decision that the rows stand for; None before the first.
    """

    def __init__(self, x_BND: Tensor, router: Router) -> None:
        self.x_BND = x_BND
        self.router = router
        self.routing: Routing | None = None
        self._entered: list[tuple[Tensor, Tensor, Routing]] = []

    def serves(self, router: Router) -> bool:
        """Return whether a block can choose among the rows, or keeps all of them."""
        return router.config.skipped != "pass" or router.capacity == self.router.capacity

    def enter(self, rows_BND: Tensor, routing: Routing, norm: nn.Module | None = None) -> Tensor:
        """Return the rows of a decision.

        Args:
            rows_BND: All tokens, or the rows of the decision before.
            routing: The decision, about all tokens.
            norm: The block's first norm if it is a `FusedNorm`, else None.
        """
        if self.routing is routing:
            return rows_BND
        if self.routing is None:
            among, z_BKD = routing, enter_rows(rows_BND, routing, norm)
        else:
            among = _among(routing, self.routing)
            if among.size_BK is None or among.join_BN is None:
                z_BKD = gather_rows(rows_BND, among.index_BK)
            else:
                z_BKD = mean_rows(rows_BND, among.join_BN, among.size_BK, self.routing.size_BK, all_join=True)
        self._entered.append((rows_BND, z_BKD, among))
        self.routing = routing
        return z_BKD

    def leave(self, y_BKD: Tensor) -> Tensor:
        """Return all tokens after the span, given its rows (B, K, D) after its last block."""
        for x_BND, z_BKD, routing in reversed(self._entered):
            y_BKD = leave_rows(x_BND, z_BKD, y_BKD, routing)
        return y_BKD


def _among(routing: Routing, earlier: Routing) -> Routing:
    """Return a decision about all tokens as one about the rows of the decision before."""
    assert earlier.join_BN is not None
    assert routing.join_BN is not None
    index_BK = earlier.join_BN.gather(1, routing.index_BK)
    return routing._replace(index_BK=index_BK, join_BN=routing.join_BN.gather(1, earlier.index_BK), inverse_BN=None)


class SpanHook(ModelHook):
    """Lets blocks hand on rows where nobody else looks at what passes between them.

    That is known of a call of the module that holds the blocks, made without gradients and without hooks on the blocks.
    Whatever else runs the blocks (`forward_intermediates`, a graph of extracted features, a loop of the user's) gets
    all tokens from each of them.

    Args:
        tracker: That of the stack.
        blocks: Name of the list of blocks in the module.
    """

    def __init__(self, tracker: PassTracker, blocks: str) -> None:
        self.tracker = tracker
        self.blocks = blocks

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take note of the call."""
        self.tracker.running.holds_rows = not torch.is_grad_enabled() and not self._is_watched(module)

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """Take note of its end."""
        self.tracker.running.holds_rows = False

    def _is_watched(self, module: nn.Module) -> bool:
        hooks = torch.nn.modules.module
        if hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
            return True
        blocks = cast(Iterable[nn.Module], module.get_submodule(self.blocks))
        # Accelerate, which moves what passes between devices, hooks in without torch's hooks.
        return any(b._forward_hooks or b._forward_pre_hooks or hasattr(b, "_hf_hook") for b in blocks)
