"""From a config to a vision-language model, routed or dense, and its processor."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Iterable, Mapping
from itertools import chain
from textwrap import shorten
from typing import Any

import torch
from torch import nn

from mmod.adapters import used_parameters
from mmod.methods.route import is_routed, routed_blocks, routers_of
from mmod.model import change_
from mmod.names import one_line
from mmod.opening.open import TRANSFORMERS, open_model
from mmod.random_state import kept_random_state
from mmod.training.chat.config import BUILT, WITHOUT_WEIGHTS, TrainConfig
from mmod.training.chat.processor import create_processor
from mmod.training.engine.config import config_as
from mmod.training.engine.kind import Kind
from mmod.training.engine.optim import check_optimizer
from mmod.values import check_value, refuse_unknown

_HALF = (torch.bfloat16, torch.float16)
# Options of LoRA that choose modules.
_CHOOSING = ("target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern")
# Starts of the names of initial adapters that are decomposed weights.
_DECOMPOSING = ("pissa", "olora", "orthogonal")
# What peft raises for options that it does not take.
_REFUSALS = (AttributeError, ImportError, IndexError, RuntimeError, TypeError, ValueError, re.error)
# Names of the parts of LLaVA-like models in transformers.
_PREFIXES = {
    "image": ("vision_tower", "vision_model", "visual"),
    "projector": (
        *("multi_modal_projector", "image_newline", "connector"),
        *("visual.merger", "visual.deepstack_merger_list"),
    ),
    "language": ("language_model", "text_model"),
}


def create(kind: Kind) -> nn.Module:
    """Create the model that a run starts from; see `mmod.training.engine.kind.create`."""
    return create_with_processor(config_as(kind.config, TrainConfig))[0]


def create_with_processor(config: TrainConfig, on_meta: bool = False) -> tuple[Any, object]:
    """Create the model to train, in training mode, and its processor: weights, methods, frozen parts, then adapters."""
    processor = create_processor(config)
    model = create_dense(config, processor, on_meta)
    for method in config.applied:
        change_(model, method)
    if config.data.protected is not None:
        _check_protected(model, config.data.protected)
    freeze_parts(model, config.frozen)
    if config.lora is not None:
        model = _with_adapters(model, config.lora)
    for parameter in router_parameters(model).values():
        parameter.requires_grad_(True)
        # Half precision loses small steps. FSDP splits layers of one dtype, and DeepSpeed keeps copies.
        if parameter.dtype in _HALF and not config.is_sharded:
            parameter.data = parameter.data.float()
    check_routers_learn(model)
    return model.train(), processor


def sketch_to_train(config: TrainConfig) -> tuple[nn.Module, Any]:
    """Create the model to train on the meta device, and its processor.

    A ValueError if nothing of it would be trained, or by no optimiser that is known: an evaluation needs neither.
    """
    if config.optim is not None:
        check_optimizer(config.optim)
    with kept_random_state():
        model, processor = create_with_processor(config, on_meta=True)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"frozen: {config.frozen} leaves no weight to train: leave out a part, or set routing or lora")
    return model, processor


def _check_protected(model: nn.Module, protected: str) -> None:
    """Raise a ValueError if text is to be protected that no layer may skip."""
    from mmod.adapters.transformers.groups import group_reader

    reader = group_reader(model)
    if reader is None or reader.tokens != "all":
        raise ValueError(
            f"data.protected: {protected} would change nothing, as no layer may skip text here: set "
            "`routing.language.tokens: all`, or data.protected: null"
        )


def _with_adapters(model: nn.Module, fields: Mapping[str, Any]) -> nn.Module:
    """Return a model with adapters of peft, which trains and saves its routers beside them.

    Args:
        fields: Fields of `peft.LoraConfig`.
    """
    from peft import LoraConfig, NoMatchingPeftModuleError, get_peft_model

    refuse_unknown("option of LoRA", fields, [item.name for item in dataclasses.fields(LoraConfig)])
    if fields.get("inference_mode"):
        raise ValueError("lora.inference_mode would train no adapter: leave it out")
    # By full names, because hosts have routers of their own; those without weights have nothing to save.
    names = {id(module): name for name, module in model.named_modules()}
    routers = [router for router in routers_of(model) if next(router.parameters(), None) is not None]
    learning = [names[id(router)] for router in routers]
    saved = _modules_to_save(names.values(), fields.get("modules_to_save"))
    decomposed = str(fields.get("init_lora_weights")).startswith(_DECOMPOSING)
    if decomposed and any(parameter.is_meta for parameter in model.parameters()):
        # Weights without values, of which shapes alone matter.
        fields = {**fields, "init_lora_weights": True}
    try:
        options = LoraConfig(**fields)
        options.modules_to_save = [*saved, *learning]
        with warnings.catch_warnings():
            # peft's own reading of a property that transformers has renamed; no key of a config has this name.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            return get_peft_model(model, options)
    except torch.OutOfMemoryError:
        raise
    except _REFUSALS as error:
        # Without these, peft chooses for models that it knows.
        is_open = not (fields.get("target_modules") or fields.get("target_parameters"))
        if isinstance(error, NoMatchingPeftModuleError) or (is_open and isinstance(error, ValueError)):
            raise ValueError(_no_match(model, fields)) from error
        given = ", ".join(f"{name}={value!r}" for name, value in fields.items())
        # Some messages print whole modules.
        reason = shorten(one_line(error), 300, placeholder=" ...")
        raise ValueError(f"lora with {given} is refused by peft: {reason}") from error


def _modules_to_save(names: Iterable[str], given: Any) -> list[str]:
    """Return the modules that are trained beside adapters as a list, each of which names one of the model."""
    listed = given or []
    if isinstance(given, str):
        listed = [given]
    check_value("lora.modules_to_save", listed, list[str])
    # As peft compares them.
    known = tuple(names)
    for name in listed:
        if not any(module.endswith(name) for module in known):
            raise ValueError(f"lora.modules_to_save: no module of the model is named {name!r}, or ends so")
    return list(listed)


def _no_match(model: nn.Module, fields: Mapping[str, object]) -> str:
    """Return the message of options of LoRA that choose no module, with names of linear layers that can be chosen."""
    # Routers are trained beside adapters, without any.
    ours = set(chain.from_iterable(router.modules() for router in routers_of(model)))
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module not in ours]
    # The language model has most adapters.
    linear.sort(key=lambda name: _owner(name) != "language")
    ends = list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in linear))
    chosen = {"target_modules": None} | {name: fields[name] for name in _CHOOSING if name in fields}
    given = ", ".join(f"{name}={value!r}" for name, value in chosen.items())
    return (
        f"lora with {given} matches no module of {type(model).__name__}: set lora.target_modules to a list of names, "
        f"such as {', '.join(ends[:8])}, or to a pattern of full names, such as '.*{ends[0]}'"
    )


def resize_images(model: Any, side: int) -> None:
    """Make a LLaVA-like model read images of `side` pixels, in place."""
    resizable: list[Any] = [module for module in model.modules() if hasattr(module, "interpolate_pos_encoding")]
    towers = [module for module in resizable if isinstance(getattr(module, "position_embedding", None), nn.Embedding)]
    if len(towers) != 1:
        raise ValueError(f"model.image_size: the tower of {type(model).__name__} has no position embedding of patches")
    tower = towers[0]
    vision = model.config.vision_config
    if side % tower.patch_size:
        raise ValueError(f"model.image_size must be a multiple of {tower.patch_size}, the side of a patch, got {side}")
    patches = (side // tower.patch_size) ** 2
    prefix = tower.num_positions - tower.num_patches
    weight = tower.position_embedding.weight
    with torch.no_grad():
        # The host's own interpolation, of tokens of the right shape.
        like = weight.new_empty(1, prefix + patches, weight.shape[1])
        table = tower.interpolate_pos_encoding(like, side, side)[0]
    tower.position_embedding = nn.Embedding.from_pretrained(table.clone(), freeze=not weight.requires_grad)
    tower.register_buffer("position_ids", torch.arange(len(table), device=weight.device)[None], persistent=False)
    tower.num_patches = patches
    tower.num_positions = len(table)
    tower.image_size = side
    vision.image_size = side
    if hasattr(model.config, "image_seq_length"):
        model.config.image_seq_length = patches


def router_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a model's routers by name, shared ones once."""
    parameters = chain.from_iterable(module.parameters() for module in routers_of(model))
    wanted = {id(parameter) for parameter in parameters}
    return {name: parameter for name, parameter in used_parameters(model).items() if id(parameter) in wanted}


def warn_of_halves(model: nn.Module, config: TrainConfig) -> None:
    """Warn of weights that are trained in half precision, without copies in float32."""
    halves = [value for value in model.parameters() if value.requires_grad and value.dtype in _HALF]
    if halves and not config.trainer.get("deepspeed"):
        warnings.warn(
            f"{len(halves)} weights are trained in {halves[0].dtype} without copies in float32, so that updates below "
            "about 1/256 of a weight are lost: set model.args.dtype to float32 and trainer.bf16, or lora, or "
            "trainer.deepspeed",
            stacklevel=2,
        )


def check_routers_learn(model: nn.Module) -> None:
    """Refuse to train a model whose routers would stay random."""
    if not is_routed(model):
        return
    for name, block in routed_blocks(model).items():
        config = block.router.config
        losses = set(config.losses)
        if config.language.predictor:
            # A predictor of the kept tokens takes the loss in place of the score.
            losses.discard("membership")
        if config.router.learns and config.gate.name == "identity" and not losses:
            raise ValueError(
                f"the router of {name} would not learn: gate 'identity' sends its score no gradient and no loss does. "
                "Set another gate, or losses such as {'membership': 0.01}"
            )


def create_dense(config: TrainConfig, processor: object, on_meta: bool) -> Any:
    """Create the model before methods are applied; a processor of None leaves the vocabulary to its config."""
    model = _opened(config, processor, on_meta)
    if config.routing is not None and is_routed(model):
        raise ValueError(
            f"{config.model.checkpoint!r} is routed already: set `routing: null` to train it as it is; to route it "
            "otherwise, name the dense model that it was made from as model.checkpoint"
        )
    if config.model.image_size is not None:
        resize_images(model, config.model.image_size)
    return model


def _opened(config: TrainConfig, processor: object, on_meta: bool) -> nn.Module:
    source = config.model
    spec: Any = source.config
    if source.checkpoint is not None:
        spec = source.folder or f"{TRANSFORMERS}{source.checkpoint}"
    elif source.processor in BUILT and processor is not None:
        spec = _with_vocabulary(spec, processor)
    if source.checkpoint is not None and not on_meta:
        return open_model(spec, args=source.args).model
    torch.manual_seed(config.seed)
    known = {name: source.args[name] for name in WITHOUT_WEIGHTS if name in source.args}
    device = "meta" if on_meta else "cpu"
    with torch.device(device):
        return open_model(spec, pretrained=False, args=known).model


def _with_vocabulary(fields: Mapping[str, Any], processor: Any) -> dict[str, object]:
    """Return a model's config with the tokenizer's vocabulary and special tokens."""
    tokenizer = processor.tokenizer
    text = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    text = {"vocab_size": len(tokenizer), **text, **fields.get("text_config", {})}
    return {**fields, "image_token_index": processor.image_token_id, "text_config": text}


def freeze_parts(model: nn.Module, parts: list[str]) -> None:
    """Freeze parts of a vision-language model in place: "image", "projector" or "language"."""
    owners = {name: _owner(name) for name, _ in model.named_parameters()}
    for part in parts:
        if part not in owners.values():
            raise ValueError(f"{type(model).__name__} has no part {part!r} to freeze")
    for name, parameter in model.named_parameters():
        if owners[name] in parts:
            parameter.requires_grad_(False)


def _owner(name: str) -> str:
    """Return the part that a parameter belongs to."""
    matches = []
    for part, prefixes in _PREFIXES.items():
        if any(f"{prefix}." in f"{name}." for prefix in prefixes):
            matches.append(part)
    # A projector can lie inside the tower.
    if "projector" in matches:
        return "projector"
    return next(iter(matches), "language")
