"""Rows that blocks of a span hand on, so that only the first of them enters and only the last leaves.

Axes: B images, N tokens, K slots per image, D channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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

    @property
    def slots(self) -> int:
        """Rows of an image that are handed on."""
        assert self.routing is not None
        return self.routing.index_BK.shape[1]

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
    """Ends each forward pass of a stack, and lets its blocks hand on rows where nobody can look between them.

    That is so in a call of the module that holds the blocks, without gradients, as long as the host library's own
    code runs the very blocks that were routed, one after another, and calls nothing but their forward. Whatever else
    runs the blocks (a subclass with a forward of its own, `forward_intermediates`, a graph of extracted features, a
    loop of the user's) gets all tokens from each of them.

    Args:
        tracker: That of the stack.
        name: Name of the list of blocks in the module.
        blocks: The blocks.
        host: Package whose code may run blocks that hand on rows; empty where none may.
    """

    def __init__(self, tracker: PassTracker, name: str, blocks: Sequence[nn.Module], host: str) -> None:
        self.tracker = tracker
        self.name = name
        self.blocks = tuple(blocks)
        self.host = host

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take note of the call."""
        holds_rows = bool(self.host) and not torch.is_grad_enabled() and self._runs(module) and not self._is_watched()
        self.tracker.running.holds_rows = holds_rows

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """End the pass, which a call that fails leaves open."""
        self.tracker.running.holds_rows = False
        self.tracker.leave(None)

    def _runs(self, module: nn.Module) -> bool:
        """Return whether the host's code runs the blocks that were routed, in their order."""
        if not all(_runs_code_of(self.host, module, name) for name in _RUNNING if hasattr(type(module), name)):
            return False
        blocks: Any = module.get_submodule(self.name)
        if type(blocks) not in (nn.Sequential, nn.ModuleList) or "forward" in vars(blocks):
            return False
        return len(blocks) == len(self.blocks) and all(a is b for a, b in zip(blocks, self.blocks))

    def _is_watched(self) -> bool:
        """Return whether a hook, or a forward put in the place of a block's, sees what passes between blocks."""
        hooks = torch.nn.modules.module
        if hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
            return True
        for block in self.blocks:
            if block._forward_hooks or block._forward_pre_hooks:
                return True
            if "mod_state" in vars(block) and not _runs_code_of("mmod", block, "forward"):
                return True
        return False


# The functions of hosts between a call of the module that holds the blocks and those of the blocks.
_RUNNING = ("forward", "forward_features")


def _runs_code_of(package: str, module: nn.Module, name: str) -> bool:
    """Return whether a module's function is written in a package, not put in its place by a subclass or on the module.

    A decorator copies the name of the function's module, but not its globals.
    """
    if name in vars(module):
        return False
    code = getattr(type(module), name)
    return getattr(code, "__globals__", {}).get("__name__", "").partition(".")[0] == package
