"""What is seen once, in the first call of a changed model: forwards that hide mixins.

Nothing stays in later calls. Compiled calls see nothing.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from mmod.blocks.conversion import host_class, mixin_forwards
from mmod.blocks.hook import ModelHook, detach


def has_replaced_forward(module: nn.Module) -> bool:
    """Return whether a `forward` was put on a module after it was converted."""
    return "forward" in vars(module) and bool(mixin_forwards(type(module)))


def _wraps(module: nn.Module) -> bool:
    """Return whether a `forward` on the instance wraps that of the class, by functools.wraps as accelerate's does."""
    own = type(module).forward

    def is_own(run: Any) -> bool:
        return getattr(run, "__func__", run) is own

    return is_own(inspect.unwrap(vars(module)["forward"], stop=is_own))


class FirstCall(ModelHook):
    """Refuses, once, a `forward` that was put on a converted module and wraps none.

    Code that replaces a forward, as kernels for a class of layers do, would run the host's block densely.
    """

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look for such modules; the hook removes itself."""
        # Compilers guard on hooks, which change here; a call without one may follow.
        if torch.compiler.is_compiling():
            return
        for name, inner in module.named_modules():
            if has_replaced_forward(inner) and not getattr(inner, "optional", False) and not _wraps(inner):
                raise ValueError(
                    f"{name or 'the model'} ({host_class(inner).__name__}) has a `forward` on the instance, put there "
                    "since a method was applied, which may not run that method: it would have no effect. Remove it "
                    "(`del module.forward`), or let it wrap the forward that was there before by functools.wraps"
                )
        detach(module, self)
