"""Routing inside a transformers checkpoint: in its config.json under "mmod", read again by one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from mmod.blocks import ModelHook, StandingModule, host_class, is_converted
from mmod.config import RoutingConfig
from mmod.routing.shared import KEY_MAPPING

FORMAT_VERSION = 3
# Version 1 has the options of all parts of a routing config side by side, and version 2 knows routing alone.
_READ = (1, 2, FORMAT_VERSION)
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
        parts = {
            # A function cannot be saved; loading then says so.
            part: {"router": "a function"} if routing.router.name == "function" else routing.to_dict()
            for part, routing in configs.items()
        }
        write_description(self.model, {"parts": parts, "capacities": list(capacities.values())})

    def release(self) -> None:
        """Take back what `describe` wrote."""
        erase_description(self.model, "parts", "capacities")


def write_description(model: nn.Module, described: Mapping[str, Any]) -> None:
    """Write into a model's config what it takes to change another one alike, and keep changed layers whole.

    Args:
        model: A model that was routed, changed by a method, or both.
        described: What it takes, in plain values, beside what was written before.
    """
    setattr(model.config, KEY, {"version": FORMAT_VERSION, **getattr(model.config, KEY, {}), **described})
    for module, names in _splits(model):
        whole = {type(block).__name__ for block in model.modules() if _whole(block, names)}
        module._no_split_modules = names | whole  # type: ignore[assignment]
    for module in _generating(model):
        vars(module)[_CONTINUOUS] = refuse_continuous_batching


def erase_description(model: nn.Module, *names: str) -> None:
    """Take back what `write_description` wrote, while the changed layers are still there.

    Args:
        model: The model.
        names: Names of what is no longer so.
    """
    left = {name: value for name, value in getattr(model.config, KEY, {}).items() if name not in names}
    stays = set(left) > {"version"}
    if stays:
        setattr(model.config, KEY, left)
    elif hasattr(model.config, KEY):
        delattr(model.config, KEY)
    changed = [block for block in model.modules() if _is_changed(block)]
    gone = {type(block).__name__ for block in changed if not (stays and isinstance(block, StandingModule))}
    for module, found in _splits(model):
        module._no_split_modules = found - gone  # type: ignore[assignment]
    for module in [] if stays else _generating(model):
        vars(module).pop(_CONTINUOUS, None)


def _generating(model: nn.Module) -> list[nn.Module]:
    """Return the modules that can batch continuously: the model, or the one in it where peft wraps it."""
    return [module for module in model.modules() if hasattr(type(module), _CONTINUOUS)]


def _splits(model: nn.Module) -> list[tuple[nn.Module, set[str]]]:
    """Return the modules that name classes which accelerate must not split over devices, with those names."""
    found = [(module, vars(module).get("_no_split_modules")) for module in model.modules()]
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
    """Whether a changed block is one that must not be split, or holds such."""
    return _is_changed(block) and any(host_class(each).__name__ in names for each in block.modules())


def _is_changed(block: nn.Module) -> bool:
    return is_converted(block) or isinstance(block, StandingModule)


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
Route = Callable[[nn.Module, dict[str, RoutingConfig], list[float], "dict[str, Any] | None"], None]


def read_routing(config: Any, folder: str | Path) -> Described:
    """Return how a saved model was routed, or else changed.

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
    parts = {name: RoutingConfig.from_dict(values) for name, values in described.get("parts", {}).items()}
    return Described(parts, list(described.get("capacities", [])), described.get("method"))


def load(folder: str | Path, route: Route, *args: Any, model_class: Any = None, **options: Any) -> Any:
    """Build, route and load a model that was saved by its own `save_pretrained` after it was routed.

    Args:
        folder: The folder, with one or several files of weights.
        route: Routes the model, or changes it otherwise, while it has no weights yet.
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
        described = read_routing(config, folder)
        dense.__init__(self, config, *args, **kwargs)
        # Routed while it has no weights yet: those of the routers are then loaded like all others.
        route(self, *described)

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
