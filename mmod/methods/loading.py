"""A changed model that was made on the meta device, and loads the weights of the dense one."""

from __future__ import annotations

from typing import Any

from torch import nn

from mmod.routing.score.drawn import Added


class FillAdded:
    """A hook after a changed model's `load_state_dict`, which gives added weights without values their initial ones."""

    def __call__(self, module: nn.Module, incompatible: Any) -> None:
        """Fill weights on the meta device where the others have left it.

        Raises:
            ValueError: A dense checkpoint was loaded, and weights that replace some of its own have no values.
        """
        device = next((weight.device for weight in module.parameters() if not weight.is_meta), None)
        if device is None:
            return
        lacking: dict[str, Added] = {}
        for name, inner in module.named_modules():
            if not isinstance(inner, Added) or not inner.lacks_values():
                continue
            if any(f"{name}." in key for key in incompatible.missing_keys):
                lacking[name] = inner
            else:
                inner.emptied = False
        for inner in lacking.values():
            inner.fill(device)
        unfilled = [name for name, inner in lacking.items() if inner.lacks_values()]
        # Without weights that have no place, another file may bring those that are missing.
        if unfilled and incompatible.unexpected_keys:
            raise ValueError(
                f"these are weights of the dense {type(module).__name__}: {incompatible.unexpected_keys[0]} has no "
                f"place in the changed model, and {unfilled[0]}, made on the meta device, gets no values from them. "
                "Load dense weights before mmod.apply_, or those of the changed model after it"
            )


def watch_loading(model: nn.Module, changed: bool) -> None:
    """Add the hook to a changed model, or remove it from a dense one."""
    hooks = model._load_state_dict_post_hooks
    present = [key for key, hook in hooks.items() if isinstance(hook, FillAdded)]
    if changed and not present:
        model.register_load_state_dict_post_hook(FillAdded())
    for key in () if changed else present:
        del hooks[key]
