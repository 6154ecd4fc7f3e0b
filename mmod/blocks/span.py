"""When blocks of a span may hand rows on, so that only the first of them enters and only the last leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mmod.blocks.forward_pass import PassTracker
from mmod.blocks.hook import ModelHook


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
        self.tracker.running.next_holds_rows = holds_rows

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """End the pass, which a call that fails leaves open."""
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
