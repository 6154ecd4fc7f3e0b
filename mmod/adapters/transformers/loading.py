"""Open the folder of a routed transformers model: its class is made, changed while it has no weights, and loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import transformers

from mmod.adapters.transformers.saving import CODE, FORMAT_VERSION, KEY, WEIGHTS_FIELD
from mmod.blocks import host_of
from mmod.config import RoutingConfig


class Described(NamedTuple):
    """What a saved folder says of how its model was changed.

    Args:
        parts: The configs of its routed parts by name.
        capacities: The capacities of its routed blocks in order.
        method: The method that changed it, in plain values; None where none did.
    """

    parts: dict[str, RoutingConfig]
    capacities: list[float]
    method: dict[str, Any] | None


# Changes a model as a folder says.
Route = Callable[[Any, dict[str, RoutingConfig], list[float], "dict[str, Any] | None"], None]
_FIELDS: dict[str, Any] = {"parts": dict, "capacities": list, "method": (dict, type(None))}


def take_description(config: Any, folder: str | Path) -> Described:
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
    for name, kind in _FIELDS.items():
        if name not in described or not isinstance(described[name], kind):
            found = repr(described[name]) if name in described else "nothing"
            raise ValueError(f"{file}: {KEY}.{name} says how the model was changed, got {found}. Save the model again")
    if not described["parts"] and not described["method"]:
        raise ValueError(f"{file}: {KEY}.parts and {KEY}.method are empty, so the model is dense. Save it again")
    forget_description(config)
    parts = {name: RoutingConfig.from_dict(values) for name, values in described["parts"].items()}
    return Described(parts, list(described["capacities"]), described["method"])


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
    folder: str | Path, route: Route, *args: Any, model_class: Any = None, config: Any = None, **options: Any
) -> Any:
    """Build, route and load a model that was saved by its own `save_pretrained` after it was routed.

    Args:
        folder: The folder, with one or several files of weights.
        route: Routes the model, or changes it otherwise, while it has no weights yet.
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
    taken: list[Described] = []
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
        # Routed while it has no weights yet: those of the routers are then loaded like all others.
        route(self, *taken[0])
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
