"""timm: models whose residual blocks can run on some of their tokens, and how blocks and their halves are called.

Axes: B images, N tokens, D channels.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
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
from timm.models._features import FeatureGetterNet
from torch import Tensor, nn

from mmod.adapters import tokens
from mmod.adapters.base import BlockStack, NamedArguments, Part
from mmod.adapters.projections import projections_of
from mmod.adapters.saving import Saving, check_keys, parameters
from mmod.blocks import Arguments, GridSource, Halves, grid_of_map, host_class, parameters_of_block
from mmod.config import ROUTING_FIELDS
from mmod.ops.context import ProjectionName
from mmod.plain import without

PRE_NORM = (vision_transformer.Block, eva.EvaBlock, beit.Block)
POST_NORM = (vision_transformer.ResPostBlock, eva.EvaBlockPostNorm)
# Attention and MLP run beside each other.
PARALLEL = (
    vision_transformer.ParallelScalingBlock,
    vision_transformer.DiffParallelScalingBlock,
    vision_transformer.ParallelThingsBlock,
)
BLOCKS: tuple[type[nn.Module], ...] = (*PRE_NORM, *POST_NORM, *PARALLEL)
PLAIN_NORMS = (nn.LayerNorm, LayerNorm, RmsNorm)
# Additional arguments of routed entries in timm's registry.
ROUTING_ARGUMENTS = {"preset", *ROUTING_FIELDS}
# Fields that tell timm where to find published weights.
_SOURCES = {"url", "file", "state_dict", "hf_hub_id", "hf_hub_filename", "source"}
ARGUMENTS = {"attn_mask", "is_causal", "rope", "shared_rel_pos_bias"}


def find_parts(model: nn.Module) -> dict[str, Part]:
    """Return the only part of a timm model, "image"."""
    return {"image": functools.partial(find_blocks, model)}


def find_blocks(model: nn.Module) -> BlockStack:
    """Return the residual blocks of a timm model: by what is known of their classes, or else after a trial."""
    known = [name for name, module in model.named_modules() if _has_known_blocks(module)]
    owner = model
    if known:
        owner = model.get_submodule(known[0].rpartition(".")[0])
    prefix = getattr(owner, "num_prefix_tokens", None)
    dim = getattr(owner, "embed_dim", None)
    # Code around timm's blocks may have several lists of them, or none of timm's attributes: a trial tells.
    if tokens.is_declared(model) or len(known) != 1 or prefix is None or dim is None:
        return tokens.find_blocks(model, "timm")
    block_list: Any = model.get_submodule(known[0])
    return BlockStack(
        block_list=known[0],
        blocks=tuple(block_list),
        prefix=int(prefix),
        dim=int(dim),
        class_token=any(key.rpartition(".")[2] == "cls_token" for key, _ in owner.named_parameters()),
        call_of=lambda block, config: _call_of(block, int(prefix)),
        host="timm",
        grid=_grid_source(owner),
    )


def _has_known_blocks(module: nn.Module) -> bool:
    """Return whether a module is a list of blocks of which all is known."""
    is_list = isinstance(module, (nn.Sequential, nn.ModuleList)) and len(module) > 0
    return is_list and all(map(_is_known, module.children()))


def _is_known(block: nn.Module) -> bool:
    # BEiT's blocks may each make a bias for all pairs of tokens, of which a trial says why it is refused.
    makes_bias = getattr(getattr(block, "attn", None), "relative_position_bias_table", None) is not None
    return isinstance(block, BLOCKS) and not makes_bias and parameters_of_block(block).keys() <= ARGUMENTS


def _grid_source(owner: nn.Module) -> GridSource | None:
    """Return where a model shows its grid: the projection to patches, or the embedding of a NaFlex model."""
    if isinstance(owner, naflexvit.NaFlexVit):
        # Returned beside the tokens; None for a batch of several sizes.
        return GridSource(owner.embeds, operator.itemgetter(1))
    projection = getattr(getattr(owner, "patch_embed", None), "proj", None)
    if projection is None:
        return None
    published = getattr(owner, "pretrained_cfg", None) or {}
    std = published.get("std")
    if std is not None:
        std = tuple(std)
    return GridSource(projection, grid_of_map, std)


def _call_of(block: nn.Module, prefix: int) -> NamedArguments:
    parameters = parameters_of_block(block)
    rows: tuple[str, ...] = ()
    rope_prefix = 0
    if "rope" in parameters:
        rows = ("rope",)
        # Blocks that do not say it leave out the prefix of the model.
        rope_prefix = int(getattr(getattr(block, "attn", None), "num_prefix_tokens", prefix))
    attentions = {name: module for name, module in block.named_modules() if hasattr(module, "fused_attn")}
    projections: list[ProjectionName] = []
    attention_calls = 0
    for name, module in attentions.items():
        projections += projections_of(name, module)
        attention_calls += 1
        if isinstance(module, DiffAttention):
            # It subtracts two maps, from two calls.
            attention_calls += 1
    operators = {}
    fused_norm = "in_norm"
    if isinstance(block, PRE_NORM):
        operators = {"attention": "attn", "mlp": "mlp"}
        fused_norm = "norm1"
    norm = getattr(block, fused_norm, None)
    if norm is None or host_class(norm) not in PLAIN_NORMS:
        fused_norm = ""
    mask = "attn_mask"
    if "shared_rel_pos_bias" in parameters:
        mask = "shared_rel_pos_bias"
    return NamedArguments(
        parameters=parameters,
        mask=mask,
        rows=rows,
        rope_prefix=rope_prefix,
        fused=bool(attentions) and all(module.fused_attn for module in attentions.values()),
        attention_calls=attention_calls,
        operators=operators,
        halves=None if isinstance(block, PARALLEL) else HALVES,
        projections=tuple(projections),
        draws_paths=True,
        packs_prefix=True,
        fused_norm=fused_norm,
    )


def describe(model: nn.Module, architecture: str | Mapping[str, object] | None = None) -> dict[str, object]:
    """Return what `build` needs to rebuild the model.

    Args:
        architecture: Must be None: a timm model stores it.
    """
    if architecture is not None:
        raise ValueError("timm models store their architecture: leave it out")
    # Wrappers forward attribute look-ups, so only the instance dictionary counts.
    if "pretrained_cfg" not in vars(model) or "_model_args" not in vars(model):
        raise ValueError(
            f"cannot save this {type(model).__name__}: only a model returned by timm.create_model can be rebuilt. Save "
            "the model itself, not a wrapper, a compiled model or a feature extractor"
        )
    if isinstance(model, FeatureGetterNet):
        raise ValueError(
            "cannot save this FeatureGetterNet, which features_only=True made: create and route its model without "
            "features_only, save that, and load it back inside, features.model = mmod.load_pretrained(folder)"
        )
    cfg = filter_pretrained_cfg(dict(vars(model)["pretrained_cfg"]), remove_source=True, remove_null=True)
    cfg.pop("state_dict", None)
    arguments = {**vars(model)["_model_args"], **get_model_args(model)}
    name = cfg.pop("architecture")
    if hasattr(model, "dense_entry"):
        # A routed entry of timm's registry: its routing is saved separately, and the model as the dense one.
        name = model.dense_entry
        arguments = without(arguments, ROUTING_ARGUMENTS)
    return {"architecture": name, "arguments": arguments, "pretrained_cfg": cfg}


def build(description: Mapping[str, Any]) -> nn.Module:
    """Return the dense model of a description, with new weights."""
    architecture = description["architecture"]
    if not timm.is_model(architecture):
        raise ValueError(f"timm {timm.__version__} knows no model {architecture!r}")
    cfg = {}
    for name, value in description["pretrained_cfg"].items():
        # JSON has no tuples.
        cfg[name] = tuple(value) if isinstance(value, list) else value
    cfg["architecture"] = architecture
    return timm.create_model(architecture, pretrained_cfg=cfg, **description["arguments"])


def _check_description(description: Mapping[str, object]) -> None:
    if not isinstance(description["architecture"], str):
        raise ValueError(f"architecture in a saved folder must be a string, got {description['architecture']!r}")
    check_keys("arguments", description["arguments"], _arguments())
    fields = {field.name for field in dataclasses.fields(PretrainedCfg)} - _SOURCES
    check_keys("pretrained_cfg", description["pretrained_cfg"], fields)


@functools.cache
def _arguments() -> frozenset[str]:
    classes = (
        vision_transformer.VisionTransformer,
        deit.VisionTransformerDistilled,
        eva.Eva,
        beit.Beit,
        naflexvit.NaFlexVit,
        resnet.ResNet,
    )
    fields = {field.name for field in dataclasses.fields(naflexvit.NaFlexVitCfg)}
    return frozenset(fields.union(*map(parameters, classes)))


SAVING = Saving("timm", ("architecture", "arguments", "pretrained_cfg"), describe, _check_description, build)


class TimmHalves(Halves):
    """The halves of timm's blocks, whose residual sums are repeated with the host's modules: nothing runs in vain."""

    def attend(self, block: Any, x_BND: Tensor, arguments: Arguments) -> Tensor:
        """Return tokens (B, N, D) after a block's attention."""
        if isinstance(block, POST_NORM):
            return x_BND + block.drop_path1(block.norm1(block.attn(x_BND, **arguments)))
        return x_BND + block.drop_path1(_scaled(block, 1, block.attn(block.norm1(x_BND), **arguments)))

    def feed(self, block: Any, x_BND: Tensor, arguments: Arguments) -> Tensor:
        """Return tokens (B, N, D) after a block's MLP."""
        if isinstance(block, POST_NORM):
            return x_BND + block.drop_path2(block.norm2(block.mlp(x_BND)))
        return x_BND + block.drop_path2(_scaled(block, 2, block.mlp(block.norm2(x_BND))))


HALVES = TimmHalves()


def _scaled(block: nn.Module, half: int, update_BND: Tensor) -> Tensor:
    """Apply the layer scale of a half: a module in some families, a parameter or None in others."""
    if isinstance(block, vision_transformer.Block):
        return getattr(block, f"ls{half}")(update_BND)
    gamma = getattr(block, f"gamma_{half}")
    if gamma is None:
        return update_BND
    return gamma * update_BND
