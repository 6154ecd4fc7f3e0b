"""Functions that belong to a model's methods and run around a module's forward, and whose code a module runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from mmod.blocks.call import Arguments, name_arguments
from mmod.blocks.conversion import host_class, positional_names
from mmod.values import check_module

Before = Callable[[nn.Module, Arguments], Arguments | None]
"""Gets a module and the arguments of its forward by name; returns changed ones, or None."""
After = Callable[[nn.Module, Arguments, object], None]
"""Gets a module, the arguments of its forward by name, and the output; None of a call that failed."""


@dataclass(eq=False)
class ModelHook:
    """Two functions of a method around a module's forward, such as to tell blocks facts that only the model knows.

    Args:
        before: Runs before each forward pass; None for nothing.
        after: Runs after it, also after an `Exception`, but not after a KeyboardInterrupt; None for nothing.
        once: It removes itself: in the first call, or the first one that does not fail if it only runs after calls.
            Compiled calls leave it alone, unless it is `compiled`.
        compiled: It runs once in a compiled call too, before it.
        stop: Ends what it began, when it is removed and when a call fails; it may run twice.
        install: Converts a block of another part, which knows some of the facts; routing makes it dense again.
        kind: Kind of the method that attached it, which also removes it; empty for none.
        names: What the arguments in order of the forward are called, once it is attached.
    """

    before: Before | None = None
    after: After | None = None
    once: bool = False
    compiled: bool = False
    stop: Callable[[], None] | None = None
    install: Callable[[], None] | None = None
    kind: str = ""
    names: tuple[str, ...] = ()

    def __call__(
        self, module: nn.Module, args: tuple[object, ...], kwargs: Arguments
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        """Return changed arguments of the module's forward, or None."""
        if self.before is None:
            return None
        arguments = name_arguments(self.names, args, kwargs)
        if self.once:
            # Compilers guard on hooks, which change here; a call without one may follow.
            if torch.compiler.is_compiling() and not self.compiled:
                return None
            # First, as the module may be called again while it runs.
            detach(module, self)
        changed = self.before(module, arguments)
        if changed is None:
            return None
        # In the place where the caller passed them: hooks of others may look there.
        given = dict(zip(self.names, args))
        in_order = [changed.get(name, value) for name, value in given.items()]
        named = {name: value for name, value in changed.items() if name not in given}
        return (*in_order, *args[len(in_order) :]), named

    def end(self, module: nn.Module, args: tuple[object, ...], kwargs: Arguments, output: object) -> None:
        """Run after a forward pass."""
        assert self.after is not None
        if self.once:
            if torch.compiler.is_compiling():
                return
            if output is None:
                # Torch is going through the hooks of the call that failed, none of which may be removed now.
                if self.stop is not None:
                    self.stop()
                return
            detach(module, self)
        # A call that failed may have got one of them twice.
        self.after(module, {**dict(zip(self.names, args)), **kwargs}, output)


def attach(module: nn.Module, hook: ModelHook) -> None:
    """Call a hook before every forward pass of a module, and after it if it has an `after`."""
    if hook.install is not None:
        hook.install()
    hook.names = positional_names(module)
    module.register_forward_pre_hook(hook, with_kwargs=True)
    if hook.after is not None:
        # A call that failed ends too: its passes must not stay open.
        module.register_forward_hook(hook.end, with_kwargs=True, always_call=True)


def model_hooks(model: nn.Module) -> list[ModelHook]:
    """Return the hooks of a model that belong to methods."""
    check_module(model)
    found: list[ModelHook] = []
    for module in model.modules():
        found += [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, ModelHook)]
    return found


def detach_hooks(model: nn.Module, kind: str | None = None, once: bool = False) -> None:
    """Remove hooks from a model: those of a kind of method, or those that are left of a first call."""
    for module in model.modules():
        for before in list(module._forward_pre_hooks.values()):
            if isinstance(before, ModelHook) and kind in (None, before.kind) and (before.once or not once):
                detach(module, before)


def detach(module: nn.Module, hook: ModelHook) -> None:
    """Remove one hook from a module; a call that runs may go on without it."""
    for key, before in list(module._forward_pre_hooks.items()):
        if before is hook:
            module._forward_pre_hooks.pop(key, None)
            # Torch notes in a table of its own which hooks take keywords.
            module._forward_pre_hooks_with_kwargs.pop(key, None)
    for key, after in list(module._forward_hooks.items()):
        if getattr(after, "__self__", None) is hook:
            for hooks in (
                module._forward_hooks,
                module._forward_hooks_with_kwargs,
                module._forward_hooks_always_called,
            ):
                hooks.pop(key, None)
    if hook.stop is not None:
        hook.stop()


def check_whole_batch(blocks: Mapping[str, nn.Module], module: nn.Module, arguments: Arguments) -> None:
    """Refuse training where a method reads or narrows the branches of blocks that divide the batch there.

    Args:
        blocks: The blocks, by name.
    """
    for name, block in blocks.items():
        if block.training:
            raise ValueError(
                f"{name} ({host_class(block).__name__}) runs its attention or its MLP on a part of the batch in "
                "training, as DINOv2's stochastic depth does, and this method needs them for all images: set the "
                "rate of stochastic depth to 0 before the method is applied, or use one that runs whole blocks "
                "alone, such as mmod.RoutingConfig(router='linear', capacity=0.5)"
            )


def runs_code_of(package: str, module: nn.Module, name: str) -> bool:
    """Return whether a module's method is a package's code, not replaced by a subclass or on the instance."""
    if name in vars(module):
        return False
    code = getattr(type(module), name)
    if package != "mmod" and _package_of(code) == "mmod":
        # A mixin of mmod in front of a host's class calls the host's method.
        code = getattr(type(module).mod_host, name)  # type: ignore[attr-defined]
    if package == "mmod" and getattr(code, "__globals__", {}).get("__name__") == "transformers.modeling_layers":
        # Layers of transformers wrap the forward of every subclass, for gradient checkpointing.
        code = code.__wrapped__
    return _package_of(code) == package


def _package_of(code: object) -> str:
    """Return the package that a function was written in."""
    # A decorator copies `__module__`, but not the globals.
    return str(getattr(code, "__globals__", {}).get("__name__", "")).partition(".")[0]
