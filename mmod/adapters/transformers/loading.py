"""Load a routed transformers model from a folder: create the model, apply its methods, then load weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers

from mmod.adapters.transformers.saving import CODE, FORMAT_VERSION, KEY, WEIGHTS_FIELD
from mmod.blocks import host_of

Methods = list[dict[str, Any]]
"""The methods of a model, in order, as plain values."""
Change = Callable[[Any, Methods], None]
"""Applies methods to a model."""


def take_description(config: Any, folder: str | Path) -> Methods:
    """Remove and return the methods from a config; the config of the dense model remains."""
    described, file = getattr(config, KEY, None), f"{str(folder)!r}, config.json"
    if not isinstance(described, dict):
        raise ValueError(
            f"{str(folder)!r} has no routed model: its config.json has no key {KEY!r}. Load a dense model with "
            "from_pretrained and call mmod.route_"
        )
    if described.get("version") != FORMAT_VERSION:
        raise ValueError(f"{file}: saved as version {described.get('version')!r}, this mmod reads {FORMAT_VERSION}")
    methods = described.get("methods")
    if not isinstance(methods, list) or not methods:
        raise ValueError(
            f"{file}: {KEY}.methods must list how the model was changed, got {methods!r}. Save the model again"
        )
    forget_description(config)
    return methods


def forget_description(config: Any) -> None:
    """Turn the config of a changed model into that of the dense model, in place."""
    fields = vars(config)
    for value in fields.values():
        if isinstance(value, transformers.PreTrainedConfig):
            forget_description(value)
    for name in (KEY, WEIGHTS_FIELD):
        fields.pop(name, None)
    code = fields.pop("auto_map", None) or {}
    others = {name: place for name, place in code.items() if not str(place).startswith(f"{CODE}.")}
    if others:
        config.auto_map = others


def load(
    folder: str | Path, change: Change, *args: Any, model_class: Any = None, config: Any = None, **options: Any
) -> Any:
    """Load a changed model that its `save_pretrained` saved.

    Args:
        model_class: Class of the model; None takes the one in config.json.

    Returns:
        The model in evaluation mode, with `output_loading_info` as a tuple with the report.
    """
    dense: Any = _class_of(folder) if model_class is None else host_of(model_class)
    descriptions: list[Methods] = []
    added: set[str] = set()

    class Configs:
        """Reads the config of the dense model."""

        @staticmethod
        def from_pretrained(*args: Any, **options: Any) -> Any:
            read = dense.config_class.from_pretrained(*args, **options)
            descriptions.append(take_description(read[0], folder))
            return read

    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        self.__class__ = dense
        dense.__init__(self, config, *args, **kwargs)
        before = set(self.state_dict())
        # Methods are applied before weights are loaded, so that added weights are loaded like all others.
        change(self, descriptions[0])
        added.update(set(self.state_dict()) - before)

    if isinstance(config, transformers.PreTrainedConfig):
        config = copy.deepcopy(config)
        descriptions.append(take_description(config, folder))
    members = {"__init__": build, "__module__": dense.__module__, "config_class": Configs, "routes_itself": True}
    routed: Any = type(dense.__name__, (dense,), members)
    with_report = options.pop("output_loading_info", False)
    model, report = routed.from_pretrained(
        folder, *args, config=config, output_loading_info=True, **{"use_safetensors": True, **options}
    )
    missing = sorted(added & set(report["missing_keys"]))
    if missing:
        raise ValueError(
            f"the weights in {str(folder)!r} do not fit: missing {missing}. Save the routed model with its added "
            "weights, not only the dense ones"
        )
    return (model, report) if with_report else model


def _class_of(folder: str | Path) -> Any:
    """Return the model class in a folder's config.json."""
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    take_description(config, folder)
    name = next(iter(config.architectures or ()), None)
    dense = getattr(transformers, str(name), None)
    if not isinstance(dense, type) or not issubclass(dense, transformers.PreTrainedModel):
        raise ValueError(f"{str(folder)!r} names {name!r} in its config.json, which is no model of transformers")
    return dense
