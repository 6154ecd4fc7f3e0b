"""Weights of checkpoints in the form of a model."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from torch import Tensor, nn

from mmod.adapters import image_facts


def load_weights(model: nn.Module, state: Mapping[str, Tensor], source: object) -> None:
    """Load a state dict strictly."""
    expected = model.state_dict()
    missing = set(expected) - set(state)
    unknown = set(state) - set(expected)
    if missing or unknown:
        raise ValueError(
            f"checkpoint {str(source)!r} does not fit the model: "
            f"it lacks {some(missing)} and has {some(unknown)} that the model does not know"
        )
    for name, value in state.items():
        shape = expected[name].shape
        if value.shape != shape:
            classes = image_facts(model).classes
            head = value.shape[:1] != shape[:1] and shape[:1] == (classes,)
            what = f"it has {value.shape[0]} classes, the model {classes}: " if head else ""
            raise ValueError(
                f"checkpoint {str(source)!r} does not fit the model: {what}{name} has shape "
                f"{tuple(value.shape)}, the model's is {tuple(shape)}"
            )
    model.load_state_dict(state)


def converted(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return weights in the form of a timm model, converted by timm's filter if names or shapes differ."""
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if convert is None or shapes == {name: value.shape for name, value in state.items()}:
        return dict(state)
    return convert(dict(state), model)


def described(fields: Mapping[str, Any]) -> Any:
    """Return the transformers config with these fields, among them `model_type`; misspelled ones are refused.

    Example:
        >>> described({"model_type": "llama", "hiden_size": 32})
        Traceback (most recent call last):
        ValueError: model.config.hiden_size is no field of a LlamaConfig: is hidden_size meant?
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        config = AutoConfig.for_model(**fields)
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise ValueError(f"model.config describes no model of transformers: {' '.join(str(error).split())}") from error
    _check_names(config, fields, "model.config")
    return config


def _check_names(config: Any, fields: Mapping[str, Any], name: str) -> None:
    known = [*vars(type(config)()), *config.attribute_map]
    for key, value in fields.items():
        # Models read some fields that their configs do not declare, so only names that look misspelled are refused.
        near = [] if key in known else get_close_matches(key, known, 1, cutoff=0.8)
        if near:
            raise ValueError(f"{name}.{key} is no field of a {type(config).__name__}: is {near[0]} meant?")
        part = getattr(config, key, None)
        if isinstance(value, Mapping) and hasattr(part, "attribute_map"):
            _check_names(part, value, f"{name}.{key}")


def classifier_names(model: nn.Module) -> tuple[str, ...]:
    """Return the prefixes of the weights of an image model's classifier.

    Example:
        >>> import timm
        >>> classifier_names(timm.create_model("test_vit"))
        ('head.',)
    """
    return image_facts(model).head


def some(names: Iterable[str]) -> str:
    """Return the number of keys of a state dict and the first few of them."""
    keys = sorted(names)
    if not keys:
        return "no key"
    others = ", ..." if len(keys) > 3 else ""
    return f"{len(keys)} keys ({', '.join(keys[:3])}{others})"
