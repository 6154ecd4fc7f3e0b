"""A changed model inside a model of a library that saves it as a dense one."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from mmod.blocks import is_converted


class EnclosedModel:
    """A hook before a changed model's `state_dict`, which refuses that a model around it saves itself without methods.

    transformers builds a model of its own classes from config.json alone, so that a changed one inside opens dense. A
    user's class may change what it holds in its constructor, and is left alone.
    """

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Raise a ValueError if a model around the changed one is being saved."""
        outer = _saved_around(module) if prefix else None
        if outer is not None:
            inner = type(module).__name__
            host = type(module).__module__.partition(".")[0]
            save = "its own save_pretrained" if host == "transformers" else "mmod.save_pretrained"
            raise ValueError(
                f"this {type(outer).__name__} would be saved without the methods of the {inner} inside it, and open as "
                f"a dense model: save the {inner} alone with {save}, or call mmod.undo_ on it first"
            )


def _saved_around(module: nn.Module) -> Any:
    """Return the model of transformers that saves itself and does not know that it holds a changed one, or None."""
    # transformers asks no module inside whether it may be saved, so the calls are looked at.
    frame = sys._getframe()
    while frame is not None:
        outer = frame.f_locals.get("self") if frame.f_code.co_name == "save_pretrained" else None
        host = type(outer).__module__.partition(".")[0]
        if host == "transformers" and isinstance(outer, nn.Module) and outer is not module and not is_converted(outer):
            return outer
        frame = frame.f_back  # type: ignore[assignment]
    return None


def watch_saving(model: nn.Module, changed: bool) -> None:
    """Add the hook to a changed model, or remove it from a dense one."""
    hooks = model._state_dict_pre_hooks
    present = [key for key, hook in hooks.items() if isinstance(hook, EnclosedModel)]
    if changed and not present:
        model.register_state_dict_pre_hook(EnclosedModel())
    for key in () if changed else present:
        del hooks[key]
