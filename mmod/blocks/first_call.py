"""What is seen once, in the first call of a changed model: forwards that hide mixins, and tokens that are no patches.

Nothing stays in later calls. A compiled model sees nothing.

Axes: B images, N tokens, D channels.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from mmod.blocks.call import Arguments
from mmod.blocks.conversion import host_class, mixin_forwards, mixins_of
from mmod.blocks.hook import ModelHook, attach
from mmod.config import Grid

# The classes of watched modules have it.
_MARK = "mod_watched"


def has_replaced_forward(module: nn.Module) -> bool:
    """Return whether a `forward` was put on a module after it was converted."""
    return "forward" in vars(module) and bool(mixin_forwards(type(module)))


def watch_first_call(module: nn.Module) -> None:
    """Let the first call of a module refuse what `refuse_hidden` does, once for all methods."""
    hooks = module._forward_pre_hooks.values()
    if not any(isinstance(hook, ModelHook) and hook.before is refuse_hidden for hook in hooks):
        attach(module, ModelHook(refuse_hidden, once=True))


def refuse_hidden(module: nn.Module, arguments: Arguments) -> None:
    """Refuse, in the first call, a `forward` that was put on a converted module and does not run the mixin.

    accelerate's forward runs the one before it. Code that replaces a forward would run the host's block densely.
    """
    if torch.jit.is_tracing():
        _refuse_trace(module)
    watches = [
        _Watch(name, inner)
        for name, inner in module.named_modules()
        if has_replaced_forward(inner) and not getattr(inner, "mod_optional", False)
    ]
    if watches:
        # A call that did not end, as after a KeyboardInterrupt, was not the first: the next one watches anew.
        attach(module, ModelHook(refuse_hidden, partial(_refuse, watches), once=True, stop=partial(_remove, watches)))


def _refuse_trace(module: nn.Module) -> None:
    """Refuse torch.jit.trace where a block would, before host and torch warn of what a trace cannot record."""
    for inner in module.modules():
        reason = getattr(inner, "mod_untraceable", "")
        if reason:
            raise RuntimeError(reason)


def _refuse(watches: Sequence[_Watch], module: nn.Module, arguments: Arguments, output: object) -> None:
    """Refuse a module that was called without its mixin."""
    hidden = [watch for watch in watches if watch.ran_inside and not watch.ran_mixin]
    if hidden:
        name = hidden[0].name or "the model"
        raise ValueError(
            f"{name} ({host_class(hidden[0].module).__name__}) has a `forward` on the instance, put there since a "
            "method was applied, which does not run that method: it would have no effect. Remove it "
            "(`del module.forward`), or let it call the forward that was there before"
        )


def _remove(watches: Sequence[_Watch]) -> None:
    for watch in watches:
        watch.remove()


class _Watch:
    """Sees whether modules inside a converted module run, and whether its mixin does, which reads its state.

    Attributes:
        ran_mixin: The mixin has read its state.
        ran_inside: A module inside was called.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.ran_mixin = False
        self.ran_inside = False
        inside = [inner for inner in module.modules() if inner is not module]
        self.handles = [inner.register_forward_pre_hook(self._see) for inner in inside]
        # No mixin runs without its state. A property stands before the attribute of the same name, so one in its place
        # sees the mixin, whatever the forward on the instance calls on the way to it.
        names = {mixin.mod_state_name for mixin in mixins_of(module)}
        watching = {name: property(partial(self._read, name)) for name in names}
        watched = type(module)
        module.__class__ = type(watched.__name__, (watched,), {**watching, _MARK: True})

    def _read(self, name: str, module: nn.Module) -> object:
        self.ran_mixin = True
        return vars(module)[name]

    def _see(self, inner: nn.Module, args: tuple[object, ...]) -> None:
        self.ran_inside = True

    def remove(self) -> None:
        """Remove the hooks, and give the module its class back, unless it has got another one since."""
        watching = type(self.module)
        if _MARK in vars(watching):
            # The class that it watches.
            self.module.__class__ = watching.__bases__[0]
        for handle in self.handles:
            handle.remove()
        self.handles = []


def compare_grid(
    read: Callable[[object], Grid | None],
    block: nn.Module,
    name: str,
    prefix: int,
    module: nn.Module,
    arguments: Arguments,
    output: object,
) -> None:
    """Warn, in the first call, of tokens besides patches and prefix, such as learned prompts, skipped like patches.

    Args:
        read: Returns the grid of patches from the output of the module that shows it.
        block: The first changed block.
        name: Its name in the model.
        prefix: Number of tokens that are always kept.
    """
    grid = read(output)
    # Only the block knows how many tokens there are: its next call compares.
    if grid is not None:
        # Blocks may be compiled one by one, in a model that is not.
        attach(block, ModelHook(partial(_warn_of_others, grid, name, prefix), once=True, compiled=True))


def _warn_of_others(grid: Grid, name: str, prefix: int, module: nn.Module, arguments: Arguments) -> None:
    """Tell of more tokens than patches and prefix."""
    rows, columns = grid
    x_BND = next((value for value in arguments.values() if isinstance(value, Tensor)), None)
    if x_BND is None or x_BND.ndim != 3 or x_BND.shape[1] <= rows * columns + prefix:
        return
    tokens = x_BND.shape[1]
    block_list = name.rpartition(".")[0]
    warnings.warn(
        f"{name} gets {tokens} tokens, but {rows} x {columns} patches and {prefix} tokens that are "
        f"always kept make {rows * columns + prefix}: the others, such as learned prompts, are skipped "
        f"like patches. To keep them in a model of timm or of your own class, put them in front of the patches and "
        f"pass tokens=mmod.Tokens({block_list!r}, prefix={tokens - rows * columns})",
        stacklevel=2,
    )
