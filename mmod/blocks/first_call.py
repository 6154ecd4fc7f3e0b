"""What is seen once, in the first call of a changed model: forwards that hide mixins.

Nothing stays in later calls.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from mmod.blocks.conversion import host_class, mixin_forwards
from mmod.blocks.hook import ModelHook, attach, detach


def has_replaced_forward(module: nn.Module) -> bool:
    """Return whether a `forward` was put on a module after mmod converted it."""
    return "forward" in vars(module) and bool(mixin_forwards(type(module)))


class FirstCall(ModelHook):
    """Refuses, once, a `forward` that was put on a converted module and does not run the mixin.

    accelerate's forward runs the one before it. Code that replaces a forward would run the host's block densely.
    """

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Watch the converted modules that have a `forward` on the instance in this call alone."""
        if torch.compiler.is_compiling():
            return
        detach(module, self)
        watches = [
            _Watch(name, inner)
            for name, inner in module.named_modules()
            if has_replaced_forward(inner) and not getattr(inner, "optional", False)
        ]
        if watches:
            attach(module, _WatchedCall(watches))


class _WatchedCall(ModelHook):
    """Ends the first call of a module that contains watched ones."""

    def __init__(self, watches: Sequence[_Watch]) -> None:
        self.watches = watches

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Do nothing before the call."""

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """Refuse a module that was called without its mixin; there is no output of a call that failed."""
        detach(module, self)
        for watch in self.watches:
            watch.remove()
        hidden = [watch for watch in self.watches if watch.ran_without_mixin and not watch.ran_mixin]
        if output is not None and hidden:
            name = hidden[0].name or "the model"
            raise ValueError(
                f"{name} ({host_class(hidden[0].module).__name__}) has a `forward` on the instance, put there since a "
                "method was applied, which does not run that method: it would have no effect. Remove it "
                "(`del module.forward`), or let it call the forward that was there before"
            )


class _Watch:
    """Sees whether modules inside a converted module run under its mixin.

    Attributes:
        ran_mixin: A module inside was called by the mixin.
        ran_without_mixin: A module inside was called by other code.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.codes: set[CodeType] = {forward.__code__ for forward in mixin_forwards(type(module))}
        self.ran_mixin = False
        self.ran_without_mixin = False
        inside = [inner for inner in module.modules() if inner is not module]
        self.handles = [inner.register_forward_pre_hook(self._see) for inner in inside]

    def _see(self, inner: nn.Module, args: tuple[Any, ...]) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code in self.codes and frame.f_locals.get("self") is self.module:
                self.ran_mixin = True
                return
            frame = frame.f_back
        self.ran_without_mixin = True

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()
