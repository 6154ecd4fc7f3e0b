"""Methods inside a transformers checkpoint: config.json describes them under "mmod".

Models share config objects, so only the file has the description. The file also prevents opening the folder as a dense
model: the field from which transformers reads the name of the weights holds an error message.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from mmod.adapters.saving import FORMAT_VERSION, KEY
from mmod.adapters.tokens import proofs_of
from mmod.adapters.transformers.generation import GeneratedFrom, refuse_training_mode
from mmod.adapters.transformers.groups import group_reader
from mmod.adapters.transformers.images import IMAGES, LAYOUT
from mmod.blocks import (
    Deciding,
    Mixin,
    RoutedBlock,
    convert,
    host_class,
    host_of,
    is_converted,
    make_dense,
    model_hooks,
)
from mmod.io.files import make_folder
from mmod.io.sums import remove_sums
from mmod.routing.added import Drawn

# The config field from which transformers reads the name of the weights file.
WEIGHTS_FIELD = "transformers_weights"
# On lines of its own: transformers puts it behind a sentence about files, and the last line is what is read.
REFUSAL = (
    "\n\nOpen this folder with mmod.load_pretrained, or with an Auto class and trust_remote_code=True where mmod is "
    "installed: its model was changed by mmod, and is no dense one"
)
CODE = "mmod_model"
# The layers of a model, which its config counts; mixtures of experts and attention have lists of other modules.
_LAYERS = (GradientCheckpointingLayer,)
_SOURCE = '''"""Let the Auto classes of transformers open the model in this folder, which mmod changed."""

from mmod.registry.transformers import auto_class as __getattr__
'''


class _HostGenerate:
    """The host's `generate`, for what decides in evaluation; with routed layers, it also takes `image_mask`.

    It is no method, because a model that does not generate has no such attribute, and no property, because FSDP and
    others replace `generate` on the model.
    """

    def __get__(self, model: nn.Module, owner: type | None = None) -> object:
        if model is None:
            return self
        host_generate: Callable[..., object] = super(DescribedModel, model).generate  # type: ignore[misc]
        return functools.update_wrapper(functools.partial(_generate, model, host_generate), host_generate)


class DescribedModel(Mixin):
    """Mixin of a changed `PreTrainedModel`, and of such models inside it that contain changed modules.

    Its `mod_state` holds the methods that changed the model, in order.
    """

    mod_keeps_name = True
    config: object

    def __new__(cls, *args: object, **kwargs: object) -> Any:
        """Create a dense model if the class of a routed one is called with a config."""
        if args or kwargs:
            return host_of(cls)(*args, **kwargs)
        return super().__new__(cls)

    @property
    def _no_split_modules(self) -> set[str]:
        """Names of classes that accelerate must not split over devices: the host's and their converted classes."""
        names = set(vars(self).get("_no_split_modules") or ())
        return names | {
            type(module).__name__
            for module in _changed_modules(self)
            if any(host_class(inner).__name__ in names for inner in module.modules())
        }

    @_no_split_modules.setter
    def _no_split_modules(self, names: Iterable[str]) -> None:
        changed = {type(module).__name__ for module in _changed_modules(self) if is_converted(module)}
        vars(self)["_no_split_modules"] = set(names) - changed

    def init_continuous_batching(self, *args: object, **kwargs: object) -> None:
        """Refuse continuous batching."""
        raise ValueError(
            "a routed model does not support continuous batching (generate_batch): its layers keep different tokens, "
            "unlike a paged cache. Use generate, which takes padded batches"
        )

    generate = _HostGenerate()

    def save_pretrained(self, save_directory: Any, *args: object, **options: object) -> None:
        """Save the model as its host does, with its methods in config.json."""
        host: Any = super()
        if options.get("distributed_checkpoint"):
            raise ValueError("distributed_checkpoint is not supported for routed models: they would load as dense ones")
        # transformers only logs that a file is no folder, and saves nothing.
        make_folder(save_directory)
        remove_sums(save_directory)
        config = self.config
        self.config = _described_config(config, describe(self))
        try:
            host.save_pretrained(save_directory, *args, **options)
        finally:
            self.config = config

    def _init_weights(self, module: nn.Module) -> None:
        host: Any = super()
        if not isinstance(module, Drawn):
            host._init_weights(module)
        elif not module.drawn:
            module.reset_parameters()


def _generate(
    model: Any, host_generate: Callable[..., object], inputs: object = None, *args: object, **options: Any
) -> object:
    """Generate as a host does, and tell the layers what only `generate` knows.

    Args:
        options: Those of the host's `generate`, and `image_mask`: True at image tokens of the prompt (B, N).
    """
    for method in model.mod_state:
        if method.two_ways and any(module.training for module in model.modules() if isinstance(module, Deciding)):
            refuse_training_mode(method.kind)
    groups = group_reader(model)
    if groups is None:
        return host_generate(inputs, *args, **options)
    image_BN = options.pop(IMAGES, None)
    named = {"inputs_embeds": options.get("inputs_embeds"), "input_ids": options.get("input_ids", inputs)}
    given = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    if image_BN is not None:
        groups.check_masks()
    kind_BN = None
    if given and groups.tokens == "image":
        sizes = {value.shape[:2] for value in given.values()}
        described = given
        if len(sizes) > 1:
            # Beside embeddings, which alone are read, ids may be others.
            described = {"inputs_embeds": given["inputs_embeds"]}
        types_BN = options.get("mm_token_type_ids")
        kind_BN = groups.images.kinds(model, {**described, "mm_token_type_ids": types_BN}, image_BN)
    drafts = bool(getattr(options.get("generation_config"), "is_assistant", None))
    layout = {name: options[name] for name in LAYOUT if options.get(name) is not None}
    if groups.image_reader is not None:
        # `generate` may run the tower before any pass, which would begin anew.
        groups.image_reader.forget()
    with groups.running.value.generating(GeneratedFrom(given, kind_BN, layout, drafts)):
        return host_generate(inputs, *args, **options)


def describe_methods(model: nn.Module, methods: tuple[object, ...]) -> None:
    """Make a changed model, and models inside it with changed modules, save their methods; none make them dense."""
    for module in [module for module in model.modules() if isinstance(module, transformers.PreTrainedModel)]:
        if methods and (_changed_modules(module) or model_hooks(module)):
            convert(module, DescribedModel, methods)
        elif isinstance(module, DescribedModel):
            make_dense(module)


def _changed_modules(model: nn.Module) -> list[nn.Module]:
    mixins = [module for module in model.modules() if isinstance(module, Mixin)]
    return [module for module in mixins if not isinstance(module, DescribedModel)]


def describe(model: DescribedModel) -> dict[str, object]:
    """Return the methods of a changed model as plain values."""
    routed = [module for module in model.modules() if isinstance(module, RoutedBlock)]
    if group_reader(model) is None and any(block.mod_state.call.decodes for block in routed):
        raise ValueError(
            f"cannot save this {type(model).__name__} alone: the model around it determines the tokens that its routed "
            "layers may skip. Save the full model, or call mmod.unroute_ on it first"
        )
    _check_depth(model)
    methods = [method.with_settings_of(model).to_dict() for method in model.mod_state]
    return {"version": FORMAT_VERSION, "methods": methods, "proofs": proofs_of(model)}


def _check_depth(model: nn.Module) -> None:
    """Raise a ValueError if layers were removed or added, so that the config describes another model."""
    for name, layers in model.named_modules():
        if not isinstance(layers, nn.ModuleList) or not any(isinstance(layer, _LAYERS) for layer in layers):
            continue
        config = getattr(model.get_submodule(name.rpartition(".")[0]), "config", None)
        count = len(layers)
        for layer in layers:
            if isinstance(layer, Deciding):
                # A module that repeats layers stands for all that it replaces.
                count += layer.mod_dense_blocks - 1
        # A predictor behind an encoder, for one, has a field of its own.
        settings = {} if config is None else vars(config)
        fields = {key: value for key, value in settings.items() if key.endswith("num_hidden_layers")}
        if fields and count not in fields.values():
            wanted = fields.get("num_hidden_layers", count)
            raise ValueError(
                f"cannot save this {type(model).__name__}: {name} has {count} layers, and its config says "
                f"num_hidden_layers={wanted}, so it would be rebuilt with another number. Call mmod.undo_, set "
                f"num_hidden_layers={count} in the config, and apply the methods again"
            )


def _described_config(config: object, described: dict[str, object]) -> object:
    """Return a copy of a config that also writes the description, and the code that opens the folder."""

    def to_json_file(self: Any, json_file_path: str, use_diff: bool = True) -> None:
        values = json.loads(self.to_json_string(use_diff))
        _refuse_dense(values)
        # All Auto classes that know the config must use the code in the folder.
        autos = {name: f"{CODE}.{name}" for name in auto_classes(type(config))}
        values |= {KEY: described, "auto_map": {**values.get("auto_map", {}), **autos}}
        path = Path(json_file_path)
        path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
        path.with_name(f"{CODE}.py").write_text(_SOURCE)

    host = type(config)
    # transformers writes the file by this method of the config, in the middle of saving, and uploads the folder then.
    twin = copy.copy(config)
    twin.__class__ = type(host.__name__, (host,), {"__module__": host.__module__, "to_json_file": to_json_file})
    return twin


def _refuse_dense(values: dict[str, object]) -> None:
    """Put the refusal into a config and the configs inside it, which classes of submodels read."""
    values[WEIGHTS_FIELD] = REFUSAL
    for value in values.values():
        if isinstance(value, dict) and "model_type" in value:
            _refuse_dense(value)


def auto_classes(config_class: type) -> dict[str, object]:
    """Return the Auto classes of transformers that support a config class, by name."""
    from transformers.models.auto import modeling_auto

    classes = {name: auto for name, auto in vars(modeling_auto).items() if name.startswith("AutoModel")}
    # The truth of a mapping is its length, for which transformers imports every model that it has.
    mappings = {name: auto._model_mapping for name, auto in classes.items() if auto._model_mapping is not None}
    return {name: classes[name] for name, mapping in mappings.items() if config_class in mapping}


ChangeModel = Callable[[object, Mapping[str, object]], None]
"""Changes a model as a description of a saved one says."""


def take_description(config: object, folder: str | Path) -> dict[str, object]:
    """Remove and return from a config how its model was changed: `methods` and `proofs`, plain untrusted values.

    The config of the dense model remains.
    """
    described = getattr(config, KEY, None)
    file = f"{str(folder)!r}, config.json"
    if not isinstance(described, dict):
        raise ValueError(
            f"{str(folder)!r} has no routed model: its config.json has no key {KEY!r}. A dense model opens with "
            f"mmod.open_model({str(folder)!r}).model"
        )
    if described.get("version") != FORMAT_VERSION:
        raise ValueError(f"{file}: saved as version {described.get('version')!r}, this mmod reads {FORMAT_VERSION}")
    methods = described.get("methods")
    if not isinstance(methods, list) or not methods:
        raise ValueError(
            f"{file}: {KEY}.methods must list how the model was changed, got {methods!r}. Save the model again"
        )
    forget_description(config)
    return described


def forget_description(config: Any) -> None:
    """Turn the config of a changed model into that of the dense model, in place."""
    fields = vars(config)
    for value in fields.values():
        if isinstance(value, transformers.PreTrainedConfig):
            forget_description(value)
    for name in (KEY, WEIGHTS_FIELD):
        fields.pop(name, None)
    code = fields.pop("auto_map", None) or {}
    # A user's own code stays; the file that opens a changed model goes.
    others = {name: path for name, path in code.items() if not str(path).startswith(f"{CODE}.")}
    if others:
        config.auto_map = others


def load(
    folder: str | Path,
    change: ChangeModel,
    *args: object,
    model_class: Any = None,
    config: object = None,
    **options: object,
) -> Any:
    """Load a changed model that its `save_pretrained` saved.

    Args:
        model_class: Class of the model; None takes the one in config.json.

    Returns:
        The model in evaluation mode, with `output_loading_info` as a tuple with the report.
    """
    dense: Any
    if model_class is None:
        dense = _class_of(folder)
    else:
        dense = host_of(model_class)
    descriptions: list[dict[str, object]] = []
    added: set[str] = set()

    class Configs:
        """Reads the config of the dense model."""

        @staticmethod
        def from_pretrained(*args: object, **options: object) -> object:
            read = dense.config_class.from_pretrained(*args, **options)
            descriptions.append(take_description(read[0], folder))
            return read

    def build(self: Any, config: object, *args: object, **kwargs: object) -> None:
        # The host's code must not see the class that only opens the folder: models ask for their own.
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
    if with_report:
        return model, report
    return model


def _class_of(folder: str | Path) -> object:
    """Return the model class in a folder's config.json."""
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    take_description(config, folder)
    name = next(iter(config.architectures or ()), None)
    dense = getattr(transformers, str(name), None)
    if not isinstance(dense, type) or not issubclass(dense, transformers.PreTrainedModel):
        raise ValueError(f"config.json in {str(folder)!r} names {name!r}, which is no model of transformers")
    return dense
