"""Weights of checkpoints in the form of a model."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from torch import Tensor, nn


def load_weights(model: nn.Module, state: Mapping[str, Tensor], source: object) -> None:
    """Load a state dict strictly."""
    expected = model.state_dict()
    missing, unknown = set(expected) - set(state), set(state) - set(expected)
    if missing or unknown:
        raise ValueError(
            f"checkpoint {str(source)!r} does not fit the model: "
            f"it lacks {some(missing)} and has {some(unknown)} that the model does not know"
        )
    for name, value in state.items():
        shape = expected[name].shape
        if value.shape != shape:
            classes = getattr(model, "num_classes", None)
            head = value.shape[:1] != shape[:1] and shape[:1] == (classes,)
            what = f"it has {value.shape[0]} classes, the model {classes}: " if head else ""
            raise ValueError(
                f"checkpoint {str(source)!r} does not fit the model: {what}{name} has shape "
                f"{tuple(value.shape)}, the model's is {tuple(shape)}"
            )
    model.load_state_dict(state)


def converted(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return weights in the form of a timm model, converted by timm's filter if names or shapes differ.

    Args:
        state: Weights by name, perhaps of another image or patch size, or by the names of their source.
    """
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if convert is None or shapes == {name: value.shape for name, value in state.items()}:
        return dict(state)
    converted_state: dict[str, Tensor] = convert(dict(state), model)
    return converted_state


def classifier_names(model: nn.Module) -> tuple[str, ...]:
    """Return the prefixes of the weights of a timm model's classifier.

    Example:
        >>> import timm
        >>> classifier_names(timm.create_model("test_vit"))
        ('head.',)
    """
    names: str | tuple[str, ...] = getattr(model, "pretrained_cfg", {}).get("classifier") or "head"
    return tuple(f"{name}." for name in ([names] if isinstance(names, str) else names))


def some(names: Iterable[str]) -> str:
    """Return the number of keys of a state dict and the first few of them."""
    keys = sorted(names)
    return f"{len(keys)} keys ({', '.join(keys[:3])}{', ...' if len(keys) > 3 else ''})" if keys else "no key"
