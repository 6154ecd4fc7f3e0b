"""Forward pre-hooks that belong to a model's routing: what its blocks need to be told without a change of class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from mmod.values import check_module


class ModelHook:
    """A forward pre-hook that tells routed blocks what only their model knows; adapters derive from it."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of the module's forward, changed, or None."""
        raise NotImplementedError

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """Be told that a forward pass has ended, or failed."""

    def release(self) -> None:
        """Remove what the hook added to the model."""


def attach(module: nn.Module, hook: ModelHook) -> None:
    """Call a hook before every forward pass of a module, and after it where it has something to do there."""
    module.register_forward_pre_hook(hook, with_kwargs=True)
    if type(hook).after is not ModelHook.after:
        module.register_forward_hook(hook.after, with_kwargs=True, always_call=True)


def model_hooks(model: nn.Module) -> list[ModelHook]:
    """Return the hooks of a model that belong to its routing."""
    check_module(model)
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    return [hook for hook in hooks if isinstance(hook, ModelHook)]


def detach_hooks(model: nn.Module, only: ModelHook | None = None) -> None:
    """Remove the hooks of a model that belong to its routing.

    Args:
        model: Any model.
        only: The one to remove; None removes all.
    """
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
