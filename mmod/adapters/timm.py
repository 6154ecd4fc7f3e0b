"""timm: which models have residual blocks that can run on some of their tokens, and how they are called."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import timm
from timm.layers import DiffAttention, LayerNorm, RmsNorm
from timm.models import (
    PretrainedCfg,
    beit,
    deit,
    eva,
    filter_pretrained_cfg,
    get_model_args,
    naflexvit,
    resnet,
    vision_transformer,
)
from torch import nn

from mmod.adapters.base import BlockStack, NamedArguments, Part
from mmod.adapters.described import Saving, check_keys, parameters
from mmod.adapters.halves import HALVES, PRE_NORM, SPLIT
from mmod.blocks import host_class
from mmod.config import ROUTING_FIELDS

BLOCKS: tuple[type[nn.Module], ...] = (
    vision_transformer.Block,
    vision_transformer.ResPostBlock,
    vision_transformer.ParallelScalingBlock,
    vision_transformer.DiffParallelScalingBlock,
    vision_transformer.ParallelThingsBlock,
    eva.EvaBlock,
    eva.EvaBlockPostNorm,
    beit.Block,
)
PLAIN_NORMS = (nn.LayerNorm, LayerNorm, RmsNorm)
# What entries of timm's registry that route take beside the dense model's arguments.
ROUTING_ARGUMENTS = {"preset", *ROUTING_FIELDS}
# Where timm looks for published weights.
_SOURCES = {"url", "file", "state_dict", "hf_hub_id", "hf_hub_filename", "source"}
ARGUMENTS = ("attn_mask", "is_causal", "rope", "shared_rel_pos_bias")
SUPPORTED = (
    "timm families vit, deit (distilled too), deit3, dinov2, dinov3, siglip, aimv2, vit with registers, eva, eva02, "
    "pe, rope-vit, naflexvit, and beit with a bias shared by its blocks"
)


def find_parts(model: nn.Module) -> dict[str, Part]:
    """Return the single part of a timm model, its blocks."""
    return {"image": functools.partial(find_blocks, model)}


def find_blocks(model: nn.Module) -> BlockStack:
    """Return the residual blocks of a timm model.

    Args:
        model: A model made by `timm.create_model`.

    Raises:
        ValueError: A family whose blocks cannot run on some of their tokens; the message says why.
    """
    found = _block_lists(model)
    title = type(model).__name__
    if len(found) != 1:
        raise ValueError(
            f"cannot route {title}: it has {len(found) or 'no'} lists of blocks where one is needed, through which "
            f"tokens pass without a change in number or meaning. Supported: {SUPPORTED}"
        )
    name, container = found[0]
    blocks = tuple(container)
    for block in blocks:
        _check_block(block, title)
    owner = model.get_submodule(name.rpartition(".")[0])
    prefix = getattr(owner, "num_prefix_tokens", None)
    dim = getattr(owner, "embed_dim", None)
    if prefix is None or dim is None:
        raise ValueError(f"cannot route {title}: it does not say how many prefix tokens it has. Supported: {SUPPORTED}")
    return BlockStack(
        library="timm",
        names=tuple(f"{name}.{index}" for index in range(len(blocks))),
        blocks=blocks,
        prefix=int(prefix),
        dim=int(dim),
        class_token=any(key.rpartition(".")[2] == "cls_token" for key, _ in owner.named_parameters()),
        call_of=lambda block, config: _call_of(block, int(prefix), title),
        hands_on="timm",
    )


def _block_lists(model: nn.Module) -> list[tuple[str, nn.Sequential | nn.ModuleList]]:
    """Return the lists of blocks that tokens pass, by name; what makes the tokens may have stages of blocks itself."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "blocks"
        and "patch_embed" not in name.split(".")
        and isinstance(module, (nn.Sequential, nn.ModuleList))
        and len(module)
    ]


def _check_block(block: nn.Module, title: str) -> None:
    if not isinstance(block, BLOCKS):
        host = host_class(block)
        raise ValueError(
            f"cannot route {title}: its blocks are {host.__module__}.{host.__qualname__}, which are not among those "
            f"known to run on a part of their tokens. Supported: {SUPPORTED}"
        )
    if getattr(getattr(block, "attn", None), "relative_position_bias_table", None) is not None:
        raise ValueError(
            f"cannot route {title}: every block builds its own relative position bias for all pairs of tokens inside "
            f"attention, where kept tokens cannot be told apart. Supported: {SUPPORTED}"
        )


def _call_of(block: nn.Module, prefix: int, title: str) -> NamedArguments:
    parameters = list(inspect.signature(host_class(block).forward).parameters)[2:]
    unknown = sorted(set(parameters) - set(ARGUMENTS))
    if unknown:
        raise ValueError(f"cannot route {title}: its blocks take {unknown}, which mmod cannot narrow to kept tokens")
    rope_prefix = int(getattr(getattr(block, "attn", None), "num_prefix_tokens", prefix))
    if rope_prefix > prefix:
        raise ValueError(
            f"cannot route {title}: attention sets {rope_prefix} tokens apart from rotary positions, "
            f"the model only {prefix}"
        )
    attentions = {name: module for name, module in block.named_modules() if hasattr(module, "fused_attn")}
    fused = bool(attentions) and all(module.fused_attn for module in attentions.values())
    projections = [projection for name, module in attentions.items() for projection in _projections(name, module)]
    return NamedArguments(
        names=tuple(parameters),
        rope_prefix=rope_prefix,
        fused=fused,
        draws_paths=True,
        projections=tuple(projections),
        # Differential attention subtracts two maps, each from a call of its own.
        attention_calls=sum(2 if isinstance(module, DiffAttention) else 1 for module in attentions.values()),
        fused_norm=_fused_norm(block),
        operators={"attention": "attn", "mlp": "mlp"} if isinstance(block, PRE_NORM) else {},
        halves=HALVES if isinstance(block, SPLIT) else None,
    )


def _fused_norm(block: nn.Module) -> str:
    """Name the norm that a block starts with where it is a plain one."""
    name = "norm1" if isinstance(block, PRE_NORM) else "in_norm"
    norm = getattr(block, name, None)
    return name if norm is not None and host_class(norm) in PLAIN_NORMS else ""


def _projections(name: str, attention: nn.Module) -> list[tuple[str, int]]:
    """Name the weights in front of an attention, with how many leading features serve the token itself."""
    own: dict[str, int] = {}
    for child, module in attention.named_children():
        # By its size and not its class, which an adapter layer (LoRA) around it does not share.
        features = getattr(module, "out_features", None)
        if not isinstance(features, int):
            continue
        if child == "qkv":
            own[child] = features // 3
        elif child in ("q_proj", "gate"):
            own[child] = features
        elif child in ("k_proj", "v_proj"):
            own[child] = 0
        elif child == "in_proj":
            # MLP, query, key and value in one; keys and values are as wide as the tokens.
            own[child] = features - 2 * int(module.in_features)  # type: ignore[arg-type]
    return [(".".join(filter(None, (name, child, "weight"))), features) for child, features in own.items()]


def describe(model: nn.Module, architecture: str | Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what `build` needs to make the model again.

    Args:
        model: A model that `timm.create_model` returned.
        architecture: Must be None: a timm model knows it.

    Raises:
        ValueError: Another model, or an architecture is given.
    """
    if architecture is not None:
        raise ValueError("timm models know their architecture: leave it out")
    # Wrappers pass attribute look-ups on, so the attribute must be the model's own.
    if "pretrained_cfg" not in vars(model) or "_model_args" not in vars(model):
        raise ValueError(
            f"cannot save this {type(model).__name__}: only a model that timm.create_model returned says how to build "
            "it again. Save the model itself, not what wraps, compiles or extracts features from it"
        )
    cfg = filter_pretrained_cfg(dict(vars(model)["pretrained_cfg"]), remove_source=True, remove_null=True)
    cfg.pop("state_dict", None)
    arguments = {**vars(model)["_model_args"], **get_model_args(model)}
    name = cfg.pop("architecture")
    if hasattr(model, "dense_entry"):
        # An entry of timm's registry that routes: its routing is saved as such, the model as the dense one.
        name = model.dense_entry
        arguments = {key: value for key, value in arguments.items() if key not in ROUTING_ARGUMENTS}
    return {"architecture": name, "arguments": arguments, "pretrained_cfg": cfg}


def build(description: Mapping[str, Any]) -> nn.Module:
    """Make the dense model that `describe` described, with fresh weights.

    Args:
        description: What `describe` returned, possibly read from JSON.

    Raises:
        ValueError: This timm does not know the model.
    """
    architecture = description["architecture"]
    if not timm.is_model(architecture):
        raise ValueError(f"timm {timm.__version__} knows no model {architecture!r}")
    cfg = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in description["pretrained_cfg"].items()
    }
    cfg["architecture"] = architecture
    model: nn.Module = timm.create_model(architecture, pretrained_cfg=cfg, **description["arguments"])
    return model


def _check_description(description: Mapping[str, Any]) -> None:
    if not isinstance(description["architecture"], str):
        raise ValueError(f"a saved folder gives architecture as a text, got {description['architecture']!r}")
    check_keys("arguments", description["arguments"], _arguments())
    check_keys("pretrained_cfg", description["pretrained_cfg"], _pretrained_fields())


@functools.cache
def _arguments() -> frozenset[str]:
    """Return the arguments of the classes of timm that can be changed."""
    classes = (
        vision_transformer.VisionTransformer,
        deit.VisionTransformerDistilled,
        eva.Eva,
        beit.Beit,
        naflexvit.NaFlexVit,
        resnet.ResNet,
    )
    fields = {field.name for field in dataclasses.fields(naflexvit.NaFlexVitCfg)}
    return frozenset(fields | {name for kind in classes for name in parameters(kind)})


@functools.cache
def _pretrained_fields() -> frozenset[str]:
    return frozenset({field.name for field in dataclasses.fields(PretrainedCfg)} - _SOURCES)


SAVING = Saving("timm", ("architecture", "arguments", "pretrained_cfg"), describe, _check_description, build)
