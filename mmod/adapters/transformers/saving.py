"""Routing inside a transformers checkpoint: in its config.json under "mmod", read again by one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from mmod.blocks import ModelHook, host_class, is_converted
from mmod.config import RoutingConfig
from mmod.routing.shared import KEY_MAPPING

FORMAT_VERSION = 2
# Version 1 has the options of all parts of a routing config side by side.
_READ = (1, FORMAT_VERSION)
KEY = "mmod"
# What every way of transformers to batch continuously calls first.
_CONTINUOUS = "init_continuous_batching"


class DescribedRouting(ModelHook):
    """Keeps a model's config, which `save_pretrained` writes, in step with its routing.

    Args:
        model: The model that was routed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Leave the arguments as they are."""

    def describe(self, configs: Mapping[str, RoutingConfig], capacities: Mapping[str, float]) -> None:
        """Write the routing into the model's config, and keep routed layers whole when a model is split."""
        config: Any = self.model.config
        parts = {
            # A function cannot be saved; loading then says so.
            part: {"router": "a function"} if routing.router.name == "function" else routing.to_dict()
            for part, routing in configs.items()
        }
        setattr(config, KEY, {"version": FORMAT_VERSION, "parts": parts, "capacities": list(capacities.values())})
        for module, names in self._splits():
            whole = {type(block).__name__ for block in module.modules() if _whole(block, names)}
            module._no_split_modules = names | whole  # type: ignore[assignment]
        for module in self._generating():
            vars(module)[_CONTINUOUS] = refuse_continuous_batching

    def release(self) -> None:
        """Take back what `describe` wrote."""
        if hasattr(self.model.config, KEY):
            delattr(self.model.config, KEY)
        converted = {type(block).__name__ for block in self.model.modules() if is_converted(block)}
        for module, names in self._splits():
            module._no_split_modules = names - converted  # type: ignore[assignment]
        for module in self._generating():
            vars(module).pop(_CONTINUOUS, None)

    def _generating(self) -> list[nn.Module]:
        """Return the modules that can batch continuously: the model, or the one in it where peft wraps it."""
        return [module for module in self.model.modules() if hasattr(type(module), _CONTINUOUS)]

    def _splits(self) -> list[tuple[nn.Module, set[str]]]:
        """Return the modules that name classes which accelerate must not split over devices, with those names."""
        found = [(module, vars(module).get("_no_split_modules")) for module in self.model.modules()]
        return [(module, set(names)) for module, names in found if names]


def refuse_continuous_batching(*args: Any, **kwargs: Any) -> None:
    """Stand in a routed model where transformers begins to batch requests continuously.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        "a routed model cannot batch continuously (generate_batch): its layers keep different tokens, which a paged "
        "cache has no room for. Use generate, which takes padded batches"
    )


def _whole(block: nn.Module, names: set[str]) -> bool:
    return is_converted(block) and host_class(block).__name__ in names


# Routes a model part by part, with the capacities of its routed blocks in order.
Route = Callable[[nn.Module, dict[str, RoutingConfig], list[float]], None]


def read_routing(config: Any, folder: str | Path) -> tuple[dict[str, RoutingConfig], list[float]]:
    """Return how a saved model was routed: the configs of its parts, and the capacities of its blocks in order.

    Args:
        config: The model's config.
        folder: Where it was read from.

    Raises:
        ValueError: Not saved from a routed model, or by a version this one does not know.
    """
    described = getattr(config, KEY, None)
    if not isinstance(described, dict):
        raise ValueError(
            f"{str(folder)!r} holds no routed model: its config.json says nothing of {KEY!r}. Load a dense one with "
            "from_pretrained and call mmod.route_"
        )
    if described.get("version") not in _READ:
        raise ValueError(f"{str(folder)!r} was saved as version {described.get('version')!r}, none of {_READ}")
    parts = {name: RoutingConfig.from_dict(values) for name, values in described["parts"].items()}
    return parts, list(described["capacities"])


def load(folder: str | Path, route: Route, *args: Any, model_class: Any = None, **options: Any) -> Any:
    """Build, route and load a model that was saved by its own `save_pretrained` after it was routed.

    Args:
        folder: The folder, with one or several files of weights.
        route: Routes the model while it has no weights yet.
        args: Further arguments of the model's `__init__`.
        model_class: The class to make; None means the one that the local folder names.
        options: What the model's `from_pretrained` takes: `dtype`, `device_map`, `quantization_config` ...

    Returns:
        The model in evaluation mode, with `output_loading_info` as a tuple with the report.

    Raises:
        ValueError: Not saved from a routed model, by a version this one does not know, or without some of its weights.
    """
    dense: Any = _class_of(folder) if model_class is None else model_class

    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        parts, kept = read_routing(config, folder)
        dense.__init__(self, config, *args, **kwargs)
        # Routed while it has no weights yet: those of the routers are then loaded like all others.
        route(self, parts, kept)

    # Named like the dense class, by which checkpoints, devices and recorded outputs know it.
    members = {"__init__": build, "__module__": dense.__module__, "routes_itself": True}
    routed = type(dense.__name__, (dense,), members)
    mapping = {**KEY_MAPPING, **options.pop("key_mapping", {})}
    with_report = options.pop("output_loading_info", False)
    model, found = routed.from_pretrained(  # type: ignore[attr-defined]
        folder, *args, key_mapping=mapping, output_loading_info=True, **{"use_safetensors": True, **options}
    )
    missing = sorted(found["missing_keys"])
    if missing:
        raise ValueError(
            f"the weights in {str(folder)!r} do not fit: missing {missing}. A routed model that was loaded where mmod "
            "had not been imported, and saved again, has lost its routers"
        )
    model.__class__ = dense
    return (model, found) if with_report else model


def _class_of(folder: str | Path) -> Any:
    """Return the class that a routed folder names."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    read_routing(config, folder)
    name = next(iter(config.architectures or ()), None)
    dense = getattr(transformers, str(name), None)
    if not isinstance(dense, type) or not issubclass(dense, transformers.PreTrainedModel):
        raise ValueError(f"{str(folder)!r} names {name!r} in its config.json, which is no model of transformers")
    return dense
