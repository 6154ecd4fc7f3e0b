"""Open the folder of a routed transformers model: its class is made, changed while it has no weights, and loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers

from mmod.adapters.transformers.saving import CODE, FORMAT_VERSION, KEY, WEIGHTS_FIELD
from mmod.blocks import host_of

Methods = list[dict[str, Any]]
"""The methods that changed a model, in order, in plain values."""
Change = Callable[[Any, Methods], None]
"""Changes a model by methods."""


def take_description(config: Any, folder: str | Path) -> Methods:
    """Take out of a config that was read from a folder how its model was changed; a dense model's config remains.

    Args:
        config: The config.
        folder: Where it was read from.

    Raises:
        ValueError: It describes no change, or in a way that this version does not know.
    """
    described, file = getattr(config, KEY, None), f"{str(folder)!r}, config.json"
    if not isinstance(described, dict):
        raise ValueError(
            f"{str(folder)!r} holds no routed model: its config.json says nothing of {KEY!r}. Load a dense one with "
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
    """Make a config that was read from the folder of a changed model that of a dense one, in place.

    Args:
        config: The config.
    """
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
    """Build, route and load a model that was saved by its own `save_pretrained` after it was routed.

    Args:
        folder: The folder, with one or several files of weights.
        change: Changes the model by its methods, while it has no weights yet.
        args: Further arguments of the model's `__init__`.
        model_class: The class to make; None means the one that the local folder names.
        config: A config that was read from the folder, or where else to read it.
        options: What the model's `from_pretrained` takes: `dtype`, `device_map`, `quantization_config` ...

    Returns:
        The model in evaluation mode, with `output_loading_info` as a tuple with the report.

    Raises:
        ValueError: Not saved from a routed model, by a version this one does not know, or without weights that the
            change of the model added. Other weights that are missing are reported as transformers always does.
    """
    dense: Any = _class_of(folder) if model_class is None else host_of(model_class)
    taken: list[Methods] = []
    added: set[str] = set()

    class Configs:
        """Reads a config as a dense model's."""

        @staticmethod
        def from_pretrained(*args: Any, **options: Any) -> Any:
            read = dense.config_class.from_pretrained(*args, **options)
            taken.append(take_description(read[0], folder))
            return read

    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        self.__class__ = dense
        dense.__init__(self, config, *args, **kwargs)
        before = set(self.state_dict())
        # Changed while it has no weights yet: those of the routers are then loaded like all others.
        change(self, taken[0])
        added.update(set(self.state_dict()) - before)

    if isinstance(config, transformers.PreTrainedConfig):
        config = copy.deepcopy(config)
        taken.append(take_description(config, folder))
    members = {"__init__": build, "__module__": dense.__module__, "config_class": Configs, "routes_itself": True}
    routed: Any = type(dense.__name__, (dense,), members)
    with_report = options.pop("output_loading_info", False)
    model, report = routed.from_pretrained(
        folder, *args, config=config, output_loading_info=True, **{"use_safetensors": True, **options}
    )
    missing = sorted(added & set(report["missing_keys"]))
    if missing:
        raise ValueError(
            f"the weights in {str(folder)!r} do not fit: missing {missing}. A routed model whose dense weights alone "
            "were saved has lost its routers"
        )
    return (model, report) if with_report else model


def _class_of(folder: str | Path) -> Any:
    """Return the class that a routed folder names."""
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    take_description(config, folder)
    name = next(iter(config.architectures or ()), None)
    dense = getattr(transformers, str(name), None)
    if not isinstance(dense, type) or not issubclass(dense, transformers.PreTrainedModel):
        raise ValueError(f"{str(folder)!r} names {name!r} in its config.json, which is no model of transformers")
    return dense
