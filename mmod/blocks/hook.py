"""Forward pre-hooks that belong to a model's routing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from mmod.values import check_module


class ModelHook:
    """A forward pre-hook that gives routed blocks facts which only their model knows; adapters derive from it."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return changed arguments of the module's forward, or None."""
        raise NotImplementedError

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """Run after a forward pass, also if it failed."""

    def release(self) -> None:
        """Remove what the hook added to the model."""


def attach(module: nn.Module, hook: ModelHook) -> None:
    """Call a hook before every forward pass of a module, and after it if it has an `after`."""
    module.register_forward_pre_hook(hook, with_kwargs=True)
    if type(hook).after is not ModelHook.after:
        module.register_forward_hook(hook.after, with_kwargs=True, always_call=True)


def model_hooks(model: nn.Module) -> list[ModelHook]:
    """Return the routing hooks of a model."""
    check_module(model)
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    return [hook for hook in hooks if isinstance(hook, ModelHook)]


def detach_hooks(model: nn.Module, only: ModelHook | None = None) -> None:
    """Remove the routing hooks of a model, or only one of them."""
    gone = [hook for hook in model_hooks(model) if only is None or only is hook]
    for hook in gone:
        hook.release()
    keys = set(map(id, gone))
    for module in model.modules():
        for key, before in list(module._forward_pre_hooks.items()):
            if id(before) in keys:
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
        for key, after in list(module._forward_hooks.items()):
            if id(getattr(after, "__self__", None)) in keys:
                for hooks in (
                    module._forward_hooks,
                    module._forward_hooks_with_kwargs,
                    module._forward_hooks_always_called,
                ):
                    hooks.pop(key, None)
