"""Routing inside a transformers checkpoint: a changed model describes itself in config.json under "mmod".

Models share configs, so the description goes into the file alone. The file also keeps the folder from being opened as a
dense model: where transformers reads the name of the weights from it, there is a sentence that says what to do.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import transformers
from torch import nn

from mmod.blocks import (
    ModelHook,
    RoutedBlock,
    RoutedDecoderBlock,
    StandingModule,
    convert,
    host_class,
    host_of,
    is_converted,
    model_hooks,
)
from mmod.config import RoutingConfig
from mmod.routing import LinearScore

FORMAT_VERSION = 4
KEY = "mmod"
# The field of a config from which transformers takes the name of the file of weights, if it has one.
WEIGHTS_FIELD = "transformers_weights"
REFUSAL = (
    "this is no dense model. Where mmod is installed, mmod.load_pretrained opens it, or an Auto class with "
    "trust_remote_code=True"
)
CODE = "mmod_model"
_SOURCE = '''"""Let the Auto classes of transformers open the model in this folder, which mmod changed."""

from mmod.registry.transformers import auto_class as __getattr__
'''


class DescribedRouting(ModelHook):
    """Marks where a part of a model is routed, with its config, for what saves the model.

    Args:
        part: The part's name.
        config: How it is routed.
    """

    def __init__(self, part: str, config: RoutingConfig) -> None:
        self.part = part
        self.config = config

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Leave the arguments as they are."""


class DescribedModel(nn.Module):
    """Goes in front of the class of a routed `PreTrainedModel`, and of each such model inside that holds routed layers.

    Its `mod_state` is the method that changed the model, None where none did.
    """

    keeps_name = True
    config: Any
    mod_state: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a dense model where the class of a routed one is called with a config."""
        return host_of(cls)(*args, **kwargs) if args or kwargs else super().__new__(cls)

    @property
    def _no_split_modules(self) -> set[str]:
        """Names of the classes that accelerate must not split over devices: the host's and those made of them."""
        names = set(vars(self).get("_no_split_modules") or ())
        inner = [each for each in self.modules() if not isinstance(each, DescribedModel)]
        changed = [each for each in inner if is_converted(each) or isinstance(each, StandingModule)]
        whole = [each for each in changed if any(host_class(part).__name__ in names for part in each.modules())]
        return names | {type(each).__name__ for each in whole}

    @_no_split_modules.setter
    def _no_split_modules(self, names: Iterable[str]) -> None:
        inner = [each for each in self.modules() if not isinstance(each, DescribedModel)]
        vars(self)["_no_split_modules"] = set(names) - {type(each).__name__ for each in inner if is_converted(each)}

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> None:
        """Refuse what every way of transformers to batch continuously calls first.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "a routed model cannot batch continuously (generate_batch): its layers keep different tokens, which a "
            "paged cache has no room for. Use generate, which takes padded batches"
        )

    def save_pretrained(self, save_directory: Any, *args: Any, **options: Any) -> None:
        """Save the model as its host does, with a description of its change in config.json.

        Args:
            save_directory: Where to.
            args: Further arguments of the host's `save_pretrained`.
            options: The same by name.

        Raises:
            ValueError: A router is a function, the model cannot do without the one around it, or a distributed
                checkpoint is asked for.
        """
        host: Any = super()
        described = describe(self)
        if described is None:
            host.save_pretrained(save_directory, *args, **options)
            return
        if options.get("distributed_checkpoint"):
            raise ValueError("a routed model has no distributed checkpoint: transformers would open it as a dense one")
        config = self.config
        self.config = _described_config(config, described)
        try:
            host.save_pretrained(save_directory, *args, **options)
        finally:
            self.config = config

    def _init_weights(self, module: nn.Module) -> None:
        host: Any = super()
        if not isinstance(module, LinearScore):
            host._init_weights(module)
        elif not module.drawn:
            module.reset_parameters()


class ChangedModel(DescribedModel, StandingModule):
    """Goes in front of the class of a `PreTrainedModel` that a method changed, until that is undone."""


def describe_routing(model: nn.Module, layers: nn.Module) -> tuple[tuple[nn.Module, type[nn.Module], None], ...]:
    """Return the models that must describe themselves once some layers are routed, as companions of the layers.

    Args:
        model: The model that is to be routed.
        layers: The layers in it.
    """
    around = _models_around(model, [layers])
    return tuple((each, DescribedModel, None) for each in around if not isinstance(each, DescribedModel))


def describe_method(model: nn.Module, method: Any) -> None:
    """Let a model that a method changed describe itself, and so each model inside that holds what was changed.

    Args:
        model: The model.
        method: The method, see `mmod.methods.base.Method`.
    """
    for each in _models_around(model, [module for module in model.modules() if isinstance(module, StandingModule)]):
        convert(each, ChangedModel, method)


def _models_around(model: nn.Module, parts: Iterable[nn.Module]) -> list[nn.Module]:
    wanted = set(map(id, parts))
    models = [each for each in model.modules() if isinstance(each, transformers.PreTrainedModel)]
    return [each for each in models if not wanted.isdisjoint(map(id, each.modules()))]


def describe(model: nn.Module) -> dict[str, Any] | None:
    """Return in plain values what it takes to change another model alike; None where nothing is changed.

    Args:
        model: A routed model, or one that a method changed.

    Raises:
        ValueError: A router is a function, or tokens are chosen by what only a model around this one knows.
    """
    parts = {each.part: each.config.to_dict() for each in model_hooks(model) if isinstance(each, DescribedRouting)}
    routed = [each for each in model.modules() if isinstance(each, RoutedBlock)]
    if "language" not in parts and any(isinstance(each, RoutedDecoderBlock) for each in routed):
        raise ValueError(
            f"cannot save this {type(model).__name__} alone: the model around it finds the tokens that its routed "
            "layers may skip. Save the whole model, or call mmod.unroute_ on that first"
        )
    method = vars(model).get("mod_state")
    methods = [] if method is None else [method.to_dict()]
    if parts:
        capacities = [float(each.router.capacity) for each in routed]
        methods.append({"kind": "routing", "parts": parts, "capacities": capacities})
    return {"version": FORMAT_VERSION, "methods": methods} if methods else None


def _described_config(config: Any, described: dict[str, Any]) -> Any:
    """Return a copy of a config that writes a description, and what opens the folder by it, beside itself."""

    def to_json_file(self: Any, json_file_path: str, use_diff: bool = True) -> None:
        values = json.loads(self.to_json_string(use_diff))
        _refuse_dense(values)
        # Auto classes that code beside the weights would open otherwise are those that know the config.
        autos = {name: f"{CODE}.{name}" for name in auto_classes(type(config))}
        values |= {KEY: described, "auto_map": {**values.get("auto_map", {}), **autos}}
        path = Path(json_file_path)
        path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
        path.with_name(f"{CODE}.py").write_text(_SOURCE)

    host = type(config)
    twin = copy.copy(config)
    twin.__class__ = type(host.__name__, (host,), {"__module__": host.__module__, "to_json_file": to_json_file})
    return twin


def _refuse_dense(values: dict[str, Any]) -> None:
    """Name no weights in the values of a config and of those inside it, which classes of parts of a model read."""
    values[WEIGHTS_FIELD] = REFUSAL
    for value in values.values():
        if isinstance(value, dict) and "model_type" in value:
            _refuse_dense(value)


def auto_classes(config_class: type) -> dict[str, Any]:
    """Return the Auto classes of transformers that know a class of configs, by name.

    Args:
        config_class: The class.
    """
    from transformers.models.auto import modeling_auto

    found = {name: each for name, each in vars(modeling_auto).items() if name.startswith("AutoModel")}
    return {name: each for name, each in found.items() if config_class in (each._model_mapping or ())}
