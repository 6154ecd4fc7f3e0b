"""From a config to a vision-language model, routed or dense, and its processor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmod import RoutingConfig, is_routed, route_, routed_blocks
from mmod.adapters import find_parts
from mmod.adapters.transformers.loading import take_description
from mmod.blocks import RoutedBlock, model_hooks
from mmod.io.tensors import check_complete
from mmod.pretrained import apply_again, load_pretrained
from mmod.routing import BorrowedScore
from mmod.training.chat.config import WITHOUT_WEIGHTS, ModelConfig, TrainConfig
from mmod.training.chat.words import create_word_processor
from mmod.training.engine.config import resolve_routing
from mmod.values import refuse_unknown

__all__ = ["check_routers_learn", "create_model", "create_processor", "router_parameters"]

_WORDS = "words"
# Where LLaVA-like models of transformers keep their parts.
_PREFIXES = {
    "vision": ("vision_tower", "visual"),
    "projector": ("multi_modal_projector", "visual.merger"),
    "language": ("language_model",),
}


def create_model(config: TrainConfig, on_meta: bool = False) -> tuple[Any, Any]:
    """Make the model to train and its processor: weights, then routing, then frozen parts, then adapters.

    Args:
        config: The run's config.
        on_meta: Make the model without weights, on the meta device.

    Returns:
        The model, in training mode, and the processor.

    Raises:
        ValueError: If the checkpoint is damaged, the model is routed already, has no such part, an option of LoRA is
            unknown, text is to be protected that no layer could skip, or routers would not learn.
    """
    processor = create_processor(config.model)
    model = _create_dense(config, processor, on_meta)
    if config.model.image_size is not None:
        resize_images(model, config.model.image_size)
    if config.routing is not None:
        if is_routed(model):
            raise ValueError(f"{config.model.checkpoint!r} is routed already; set `routing: null` to train it as it is")
        route_(model, **resolve_parts(model, config.routing))
    _check_protected(model, config.data.protected)
    _freeze(model, config.frozen)
    if config.lora is not None:
        model = _add_adapters(model, config.lora)
    for parameter in router_parameters(model).values():
        parameter.requires_grad_(True)
    check_routers_learn(model)
    return model.train(), processor


def create_processor(config: ModelConfig) -> Any:
    """Make the processor that a model's config names.

    Args:
        config: The model's config.

    Raises:
        ValueError: If "words" is asked for and the config does not say how large images and patches are.
    """
    from transformers import AutoProcessor

    if config.processor != _WORDS:
        processor = AutoProcessor.from_pretrained(config.processor or config.checkpoint)
        return processor if config.image_size is None else _at_size(processor, config.image_size)
    vision = (config.config or {}).get("vision_config", {})
    if not {"image_size", "patch_size"} <= set(vision):
        raise ValueError("processor 'words' needs model.config.vision_config with image_size and patch_size")
    return create_word_processor(config.image_size or vision["image_size"], vision["patch_size"])


def _at_size(processor: Any, side: int) -> Any:
    """Make a processor give images of another size."""
    images = processor.image_processor
    for name in ("size", "crop_size"):
        given = dict(getattr(images, name, None) or {})
        own = {key: side for key in ("height", "width", "shortest_edge") if given.get(key) is not None}
        if name == "size" and not own:
            raise ValueError(f"model.image_size: {type(images).__name__} takes images of any size, with size={given}")
        setattr(images, name, own or given)
    return processor


def resize_images(model: Any, side: int) -> None:
    """Make a LLaVA-like model of transformers read images of another size, in place.

    Args:
        model: The model; its vision tower has one position embedding for each patch.
        side: Side of its images in pixels.

    Raises:
        ValueError: A tower without such embeddings, or a side that its patches do not divide.
    """
    found: list[Any] = [module for module in model.modules() if hasattr(module, "interpolate_pos_encoding")]
    towers = [module for module in found if isinstance(getattr(module, "position_embedding", None), nn.Embedding)]
    if len(towers) != 1:
        raise ValueError(f"model.image_size: the tower of {type(model).__name__} has no position embedding of patches")
    tower, vision = towers[0], model.config.vision_config
    if side % tower.patch_size:
        raise ValueError(f"model.image_size must be a multiple of {tower.patch_size}, the side of a patch, got {side}")
    patches, rest = (side // tower.patch_size) ** 2, tower.num_positions - tower.num_patches
    weight = tower.position_embedding.weight
    with torch.no_grad():
        table = tower.interpolate_pos_encoding(weight.new_empty(1, rest + patches, weight.shape[1]), side, side)[0]
    tower.position_embedding = nn.Embedding.from_pretrained(table.clone(), freeze=not weight.requires_grad)
    tower.register_buffer("position_ids", torch.arange(len(table), device=weight.device)[None], persistent=False)
    tower.num_patches, tower.num_positions, tower.image_size, vision.image_size = patches, len(table), side, side
    if hasattr(model.config, "image_seq_length"):
        model.config.image_seq_length = patches


def resolve_parts(model: nn.Module, routing: Mapping[str, Mapping[str, Any]]) -> dict[str, RoutingConfig]:
    """Make the routing config of each part; presets are told how deep the part is.

    Args:
        model: The model, not routed.
        routing: Name of each part to fields of `RoutingConfig`, `preset: NAME` with changes, or `plan: FILE`.

    Raises:
        ValueError: If the model has no such part, or a field is unknown.
    """
    parts = find_parts(model)
    unknown = sorted(set(routing) - set(parts))
    if unknown:
        raise ValueError(f"this model has no part {', '.join(unknown)}; it has {', '.join(parts)}")
    configs = {}
    for name, fields in routing.items():
        known = {"depth": len(parts[name]().blocks)} if "preset" in fields else {}
        configs[name] = resolve_routing({**known, **fields})
    return configs


def router_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a model's routers by name, a shared one once.

    Args:
        model: Any model.
    """
    routers = [module.router for module in model.modules() if isinstance(module, RoutedBlock)]
    shared = [router.score.held for router in routers if isinstance(router.score, BorrowedScore)]
    wanted = {id(parameter) for part in (*routers, *shared) for parameter in part.parameters()}
    # peft keeps what it has copied to train as it was.
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if id(parameter) in wanted and ".original_module." not in name
    }


def check_routers_learn(model: nn.Module) -> None:
    """Refuse to train a model whose routers would stay as they were drawn.

    Args:
        model: Any model.

    Raises:
        ValueError: All weights of its routers are frozen, or nothing sends a score a gradient.
    """
    weights = router_parameters(model)
    if weights and not any(weight.requires_grad for weight in weights.values()):
        raise ValueError(
            f"the routers would not learn: all of their {len(weights)} weights are frozen (as {next(iter(weights))}). "
            "Call requires_grad_(True) on them, or, with peft, name them in modules_to_save=['router']"
        )
    for name, block in routed_blocks(model).items() if is_routed(model) else ():
        config = block.router.config
        # A network that predicts what is kept takes the loss in the score's place.
        losses = set(config.losses) - ({"membership"} if config.language.predictor else set())
        if config.router.learns and config.gate.name == "identity" and not losses:
            raise ValueError(
                f"the router of {name} would not learn: gate 'identity' sends its score no gradient and no loss does. "
                "Set another gate, or losses such as {'membership': 0.01}"
            )


def _create_dense(config: TrainConfig, processor: Any, on_meta: bool) -> Any:
    from transformers import AutoConfig, AutoModelForImageTextToText

    source = config.model
    if source.config is None and not on_meta:
        assert source.checkpoint is not None
        check_complete(source.checkpoint)
        if _was_routed(source.checkpoint):
            return load_pretrained(source.checkpoint, **source.args)
        return AutoModelForImageTextToText.from_pretrained(source.checkpoint, **source.args)
    if source.config is None:
        described = AutoConfig.from_pretrained(str(source.checkpoint))
    else:
        described = AutoConfig.for_model(
            **_with_words(source.config, processor) if source.processor == _WORDS else source.config
        )
    routed = source.checkpoint is not None and _was_routed(source.checkpoint)
    taken = take_description(described, str(source.checkpoint)) if routed else None
    torch.manual_seed(config.seed)
    known = {name: source.args[name] for name in WITHOUT_WEIGHTS if name in source.args}
    with torch.device("meta" if on_meta else "cpu"):
        model = AutoModelForImageTextToText.from_config(described, **known)
        if taken is not None:
            apply_again(model, taken)
    return model


def _was_routed(folder: str) -> bool:
    path = Path(folder) / "config.json"
    return path.is_file() and "mmod" in json.loads(path.read_text())


def _with_words(fields: Mapping[str, Any], processor: Any) -> dict[str, Any]:
    """Fill in what the tokenizer decides."""
    tokenizer = processor.tokenizer
    text = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    return {
        **fields,
        "image_token_index": processor.image_token_id,
        "text_config": {**text, **fields.get("text_config", {})},
    }


def _check_protected(model: nn.Module, protected: str | None) -> None:
    if protected is not None and not any(getattr(hook, "tokens", None) == "all" for hook in model_hooks(model)):
        raise ValueError(
            f"data.protected: {protected} would change nothing, as no layer may skip text here: set "
            "`routing.language.tokens: all`, or data.protected: null"
        )


def _freeze(model: nn.Module, parts: list[str]) -> None:
    for part in parts:
        frozen = 0
        for name, parameter in model.named_parameters():
            found = [kind for kind, prefixes in _PREFIXES.items() if any(f"{prefix}." in name for prefix in prefixes)]
            # A projector can lie inside the tower; its longer prefix is the one that tells.
            kind = "projector" if "projector" in found else next(iter(found), "language")
            if kind == part:
                parameter.requires_grad_(False)
                frozen += 1
        if not frozen:
            raise ValueError(f"{type(model).__name__} has no part {part!r} to freeze")


def _add_adapters(model: nn.Module, fields: Mapping[str, Any]) -> nn.Module:
    from dataclasses import fields as fields_of

    from peft import LoraConfig, get_peft_model

    refuse_unknown("option of LoRA", fields, [item.name for item in fields_of(LoraConfig)])
    return get_peft_model(model, LoraConfig(**fields))
