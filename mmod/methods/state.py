"""What a changed model does when its weights are saved and loaded.

A model around it that knows no methods must not save it, and added weights that a dense checkpoint lacks get values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, MutableMapping
from typing import Any

from torch import nn

from mmod.blocks import is_converted
from mmod.routing.added import Added

_Hook = Callable[..., object]


def refuse_enclosed(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Raise a ValueError before a changed model's `state_dict`, if a model around it saves itself without methods.

    transformers builds a model of its own classes from config.json alone, so that a changed one inside opens dense. A
    user's class may change what it holds in its constructor, and is left alone.
    """
    # Without a prefix, the model itself is saved, and not one around it.
    if not prefix:
        return
    outer = _saved_around(module)
    if outer is not None:
        inner = type(module).__name__
        host = type(module).__module__.partition(".")[0]
        save = "its own save_pretrained" if host == "transformers" else "mmod.save_pretrained"
        raise ValueError(
            f"this {type(outer).__name__} would be saved without the methods of the {inner} inside it, and open as "
            f"a dense model: save the {inner} alone with {save}, or call mmod.undo_ on it first"
        )


def _saved_around(module: nn.Module) -> object:
    """Return the model of transformers that saves itself and does not know that it holds a changed one, or None."""
    # transformers asks no module inside whether it may be saved, so the calls are looked at.
    frame = sys._getframe()
    while frame is not None:
        outer = None
        if frame.f_code.co_name == "save_pretrained":
            outer = frame.f_locals.get("self")
        host = type(outer).__module__.partition(".")[0]
        if host == "transformers" and isinstance(outer, nn.Module) and outer is not module and not is_converted(outer):
            return outer
        frame = frame.f_back  # type: ignore[assignment]
    return None


def fill_added(module: nn.Module, incompatible: Any) -> None:
    """Give added weights without values their initial ones, after a changed model's `load_state_dict`.

    Those that are still on the meta device are filled where the others have left it.

    Raises:
        ValueError: A dense checkpoint was loaded, and weights that replace some of its own have no values.
    """
    device = next((weight.device for weight in module.parameters() if not weight.is_meta), None)
    if device is None:
        return
    lacking: dict[str, Added] = {}
    for name, inner in module.named_modules():
        if not isinstance(inner, Added) or not inner.mod_lacks_values():
            continue
        if any(f"{name}." in key for key in incompatible.missing_keys):
            lacking[name] = inner
        else:
            inner.mod_emptied = False
    for inner in lacking.values():
        inner.mod_fill(device)
    unfilled = [name for name, inner in lacking.items() if inner.mod_lacks_values()]
    # Without weights that have no place, another file may bring those that are missing.
    if unfilled and incompatible.unexpected_keys:
        raise ValueError(
            f"these are weights of the dense {type(module).__name__}: {incompatible.unexpected_keys[0]} has no "
            f"place in the changed model, and {unfilled[0]}, made on the meta device, gets no values from them. "
            "Load dense weights before mmod.apply_, or those of the changed model after it"
        )


def watch_state(model: nn.Module, changed: bool) -> None:
    """Add the hooks to a changed model, or remove them from a dense one."""
    _watch(model._state_dict_pre_hooks, model.register_state_dict_pre_hook, refuse_enclosed, changed)
    _watch(model._load_state_dict_post_hooks, model.register_load_state_dict_post_hook, fill_added, changed)


def _watch(hooks: MutableMapping[int, _Hook], register: Callable[[_Hook], object], hook: _Hook, changed: bool) -> None:
    # A copy of a model has the same functions.
    present = [key for key, other in hooks.items() if other is hook]
    if not changed:
        for key in present:
            del hooks[key]
    elif not present:
        register(hook)
