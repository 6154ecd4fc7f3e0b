"""open_clip: image and text towers of CLIP models as parts, and the padding of captions.

Axes: B captions or images, L token ids, N tokens, K slots, H heads.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import open_clip
import timm
import torch
from open_clip import model as clip_models
from open_clip import transformer
from open_clip.coca_model import CoCa
from open_clip.hf_model import HFTextEncoder
from open_clip.timm_model import TimmModel
from torch import Tensor, nn

from mmod.adapters import timm as timm_adapter
from mmod.adapters.base import BlockStack, NamedArguments, Part
from mmod.adapters.halves import Branches
from mmod.adapters.masks import narrow_queries
from mmod.adapters.projections import projections_of
from mmod.adapters.saving import Saving, check_keys, parameters
from mmod.blocks import (
    Arguments,
    GridSource,
    ModelHook,
    Span,
    grid_of_map,
    host_class,
    parameters_of_block,
)
from mmod.config import RoutingConfig
from mmod.ops.views import is_visible
from mmod.routing import Routing, TokenMasks

BLOCKS: tuple[type[nn.Module], ...] = (
    transformer.ResidualAttentionBlock,
    transformer.CustomResidualAttentionBlock,
)
MODELS: tuple[type[nn.Module], ...] = (clip_models.CLIP, clip_models.CustomTextCLIP, CoCa)
# Key of a tower's config -> prefix of the options that refer to a model of another library.
_TOWERS = {"vision_cfg": "timm_model", "text_cfg": "hf_model"}
# The start token, and the token that the embedding is read from.
PROTECTED_IN_TEXT = 2


def find_parts(model: object) -> dict[str, Part]:
    """Return the parts of an open_clip model: "image" and "text"; a tower alone is one part."""
    if isinstance(model, MODELS):
        # A CLIP model holds the modules of its text tower itself.
        text = functools.partial(_text_tower, model)
        if getattr(model, "text", None) is not None:
            text = functools.partial(_text_tower, model.text, "text")
        return {"image": lambda: _image_tower(model.visual).below("visual"), "text": text}
    if isinstance(model, (transformer.VisionTransformer, TimmModel, clip_models.ModifiedResNet)):
        return {"image": functools.partial(_image_tower, model)}
    if isinstance(model, (transformer.TextTransformer, HFTextEncoder)):
        return {"text": functools.partial(_text_tower, model)}
    supported = ", ".join(model_class.__name__ for model_class in MODELS)
    raise ValueError(
        f"cannot route open_clip's {type(model).__name__}: supported are {supported}, and their towers "
        "VisionTransformer, TimmModel and TextTransformer"
    )


def _image_tower(tower: Any) -> BlockStack:
    if isinstance(tower, TimmModel):
        stack = timm_adapter.find_blocks(tower.trunk).below("trunk")
        if stack.grid is None or not hasattr(tower, "image_std"):
            return stack
        # open_clip normalises images for the tower, whatever timm says of the trunk.
        return dataclasses.replace(stack, grid=stack.grid._replace(std=tuple(tower.image_std)))
    stack = _stack(tower, prefix=1)
    std = getattr(tower, "image_std", None)
    if std is not None:
        std = tuple(std)
    grid = GridSource(tower.conv1, grid_of_map, std)
    return dataclasses.replace(stack, class_token=True, host="open_clip", grid=grid)


def _text_tower(tower: Any, path: str = "") -> BlockStack:
    # Messages about captions name the blocks as the full model does.
    stack = _stack(tower, PROTECTED_IN_TEXT).below(path)
    # The embedding has number 0 in a pass of captions.
    captions = Span(stack.calls, ("the token embedding", *stack.names))
    hook = (tower.token_embedding, _caption_hook(tower, captions))
    return dataclasses.replace(
        stack,
        captions=captions,
        text_tower=tower,
        call_of=functools.partial(_call_of, dim=stack.dim, blocks=tuple(stack.blocks), captions=captions),
        hooks=lambda routing: [hook],
        sequence=int(tower.context_length),
    )


def _stack(tower: nn.Module, prefix: int) -> BlockStack:
    """Return the blocks of a tower, or of a model that holds the modules of its text tower itself."""
    runs: Any = getattr(tower, "transformer", None)
    blocks = tuple(getattr(runs, "resblocks", ()))
    if not blocks or not all(isinstance(block, BLOCKS) for block in blocks) or not runs.batch_first:
        raise ValueError(
            f"cannot route the tower {host_class(tower).__name__}: it must have a transformer of open_clip with "
            f"batch_first=True, of blocks {' or '.join(block.__name__ for block in BLOCKS)}, or a model of timm. The "
            "other tower can be routed alone, by mmod.route_(model, image=config) or mmod.route_(model, text=config)"
        )
    return BlockStack(
        block_list="transformer.resblocks",
        blocks=blocks,
        prefix=prefix,
        dim=int(runs.width),
        call_of=functools.partial(_call_of, dim=int(runs.width), blocks=blocks),
    )


def _call_of(
    block: nn.Module,
    config: RoutingConfig | None,
    dim: int,
    blocks: tuple[nn.Module, ...],
    captions: Span | None = None,
) -> ClipBlock:
    # Adapters of peft hold the attention.
    attention: Any = getattr(block.attn, "base_layer", block.attn)
    multihead = isinstance(attention, nn.MultiheadAttention)
    branches = Branches(
        attention="attn",
        attention_in_tuple=2 if multihead else 0,
        mlp="mlp",
        silent_attention=("attn",),
        idle_attention=("ln_1",),
        silent_mlp=("mlp",),
        idle_mlp=("ln_2",),
        halves=True,
    )
    if not isinstance(getattr(block, "ln_attn", nn.Identity()), nn.Identity):
        # The bias of a norm after attention makes a zero output nonzero.
        branches = dataclasses.replace(
            branches, attention="", silent_attention=("ln_attn",), idle_attention=("ln_1", "attn")
        )
    return ClipBlock(
        **branches.options(block, dim),
        mask="attn_mask",
        parameters=parameters_of_block(block),
        fused=multihead or (attention.use_fsdpa and attention.logit_scale is None),
        projections=projections_of("attn", attention),
        heads=int(attention.num_heads),
        flat_masks=multihead,
        captions=captions,
        number=blocks.index(block) + 1,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipBlock(NamedArguments):
    """How open_clip calls a block: with tokens and an optional mask.

    Args:
        flat_masks: Attention takes masks (B H, N, N), as torch.nn.MultiheadAttention does.
        captions: Finds passes of a text tower, whose embedding is read from one token; None in an image tower.
        number: The block's number in these passes.
    """

    heads: int = 1
    flat_masks: bool = True
    captions: Span | None = None
    number: int = 0

    @property
    def masks_always(self) -> bool:  # type: ignore[override]
        """Whether `masks` says something even if the block gets the tokens alone."""
        return self.captions is not None

    def masks(self, arguments: Arguments, x_BND: Tensor) -> TokenMasks:
        """Return which tokens of a caption are padding, and which are always kept: the first, and the one that is read.

        A token is padding if the one that the embedding is read from does not see it.
        """
        if self.captions is None:
            return TokenMasks()
        caption = self.captions.find(x_BND, self.number)
        if caption is None or caption.shape != x_BND.shape[:2]:
            raise RuntimeError(
                f"a routed text tower needs token ids: run encode_text or the tower, not its blocks on "
                f"{tuple(x_BND.shape)}"
            )
        # Once for all blocks of the pass, which get the same mask.
        if caption.masks is None:
            caption.masks = self._masks_of(caption.read_B1, arguments, x_BND)
        return caption.masks

    def _masks_of(self, read_B1: Tensor | None, arguments: Arguments, x_BND: Tensor) -> TokenMasks:
        position_BN = torch.arange(x_BND.shape[1], device=x_BND.device).expand(x_BND.shape[0], -1)
        protect_BN = position_BN == 0
        if read_B1 is None:
            return TokenMasks(None, protect_BN)
        protect_BN = protect_BN | (position_BN == read_B1)
        mask = self._unflat(arguments).get("attn_mask")
        if mask is None:
            return TokenMasks(None, protect_BN)
        row_BN = narrow_queries(mask, read_B1, x_BND.shape[1])[:, 0, 0]
        return TokenMasks(is_visible(row_BN) | protect_BN, protect_BN)

    def select_tokens(self, arguments: Arguments, x_BND: Tensor, routing: Routing | None) -> dict[str, Any]:
        """Return the mask of the kept tokens, in the host's shape."""
        assert routing is not None
        mask = arguments.get("attn_mask")
        if self.captions is not None and mask is not None and mask.ndim == 2:
            # Kept tokens are in order and precede empty slots, so the causal mask of slots is that of tokens.
            slots = routing.kept.index_BK.shape[1]
            return {**arguments, "attn_mask": mask[:slots, :slots]}
        narrowed = super().select_tokens(self._unflat(arguments), x_BND, routing)
        if routing.kept.image_S is None:
            return narrowed
        return self.with_mask(narrowed, narrowed.get("attn_mask"))

    def narrow_queries(self, arguments: Arguments, tokens: int, routing: Routing) -> dict[str, Any]:
        """Return the arguments for kept queries and all keys."""
        narrowed = super().narrow_queries(self._unflat(arguments), tokens, routing)
        mask = narrowed.get("attn_mask")
        if mask is None:
            return narrowed
        return {**narrowed, "attn_mask": self._flat(mask, routing.kept.index_BK.shape[1])}

    def _unflat(self, arguments: Arguments) -> dict[str, Any]:
        """Split the axes of a mask per caption and head (B H, N, N)."""
        mask = arguments.get("attn_mask")
        if mask is None or mask.ndim != 3:
            return dict(arguments)
        return {**arguments, "attn_mask": mask.unflatten(0, (-1, self.heads))}

    def with_mask(self, arguments: Arguments, mask: Tensor | None) -> dict[str, object]:
        """Return the arguments with a mask or bias (B, 1 or H, 1 or K, K), in the host's shape."""
        if mask is not None:
            mask = self._flat(mask, mask.shape[-1])
        return super().with_mask(arguments, mask)

    def _flat(self, mask: Tensor, queries: int) -> Tensor:
        """Expand a mask over heads and queries and join captions and heads, if the host needs that."""
        if self.flat_masks:
            return mask.expand(-1, self.heads, queries, -1).flatten(0, 1)
        return mask


def _caption_hook(tower: nn.Module, span: Span) -> ModelHook:
    """Return the hook of a text tower's embedding.

    The tower is a `TextTransformer`, or a `CLIP` model, which has the same attributes.
    """
    if isinstance(tower, clip_models.CLIP):
        pool, eos = tower.text_pool_type, tower.text_eos_id
        class_token = False
    else:
        pool, eos = tower.pool_type, tower.eos_id
        # It stands behind all other tokens, and the embedding is read from it whatever `pool` says.
        class_token = tower.cls_emb is not None
    return ModelHook(functools.partial(_begin_captions, span, str(pool), int(eos), class_token))


def _begin_captions(
    span: Span, pool: str, eos: int, class_token: bool, module: nn.Module, arguments: Arguments
) -> None:
    """Begin a forward pass with token ids (B, L), with a fact that its blocks do not know: what is read."""
    (text_BL,) = arguments.values()
    started = span.begin(text_BL)
    started.shape = (text_BL.shape[0], text_BL.shape[1] + int(class_token))
    position_BL = torch.arange(text_BL.shape[1], device=text_BL.device).expand_as(text_BL)
    # As the host finds the position (B, 1); with pool "none" it reads all.
    if class_token:
        started.read_B1 = position_BL[:, -1:] + 1
    elif pool != "none":
        started.read_B1 = transformer.text_global_pool(position_BL.unsqueeze(-1), text_BL, pool, eos_token_id=eos)


def describe(model: nn.Module, architecture: str | Mapping[str, Any] | None = None) -> dict[str, object]:
    """Return what `build` needs to rebuild the model.

    Args:
        architecture: The name passed to open_clip, or its config: `embed_dim`, `vision_cfg`, `text_cfg` ...
    """
    if not isinstance(model, MODELS):
        raise ValueError(f"cannot save a {type(model).__name__} alone: save the full model")
    name = architecture if isinstance(architecture, str) else None
    if isinstance(architecture, Mapping):
        config = dict(architecture)
    else:
        config = open_clip.get_model_config(name or "")
    if config is None:
        raise ValueError(
            f"a {type(model).__name__} does not store its architecture: pass architecture, its config or a name like "
            f"'ViT-B-32', got {architecture!r}; open_clip {open_clip.__version__} knows no model of this name"
        )
    config = copy.deepcopy(config)
    # By it open_clip's factory chooses the class, which is named below.
    config.pop("custom_text", None)
    # The weights are in the folder, so nothing is downloaded.
    for tower, key in _TOWERS.items():
        if f"{key}_name" in config[tower]:
            config[tower][f"{key}_pretrained"] = False
    norms = [module for module in model.modules() if isinstance(module, transformer.LayerNormFp32)]
    return {
        "architecture": name,
        "class": host_class(model).__name__,
        "config": config,
        "norms_in_fp32": bool(norms),
        "output_dict": bool(getattr(model, "output_dict", False)),
        "preprocess": getattr(model.visual, "preprocess_cfg", None),
    }


def build(description: Mapping[str, Any]) -> nn.Module:
    """Return the dense model of a description, with new weights."""
    classes = {model_class.__name__: model_class for model_class in MODELS}
    if description["class"] not in classes:
        raise ValueError(f"open_clip models are {', '.join(classes)}, not {description['class']!r}")
    try:
        # Any half precision makes open_clip create norms that compute in fp32.
        dtype = torch.bfloat16 if description["norms_in_fp32"] else None
        model: Any = classes[description["class"]](**copy.deepcopy(description["config"]), cast_dtype=dtype)
    except TypeError as error:
        raise ValueError(f"open_clip {open_clip.__version__} cannot build this config: {error}") from error
    if description["output_dict"]:
        model.output_dict = True
    if description["preprocess"] is not None:
        clip_models.set_model_preprocess_cfg(model, description["preprocess"])
    return model


def _check_description(description: Mapping[str, Any]) -> None:
    config = description["config"]
    known = (open_clip.get_model_config(name) or {} for name in open_clip.list_models())
    texts = {config.get("text_cfg", {}).get("hf_model_name") for config in known} - {None}
    check_keys("config", config, set().union(*map(parameters, MODELS)))
    for tower, key in _TOWERS.items():
        fields = config.get(tower)
        if not isinstance(fields, Mapping):
            raise ValueError(f"{tower} in a saved folder must be a mapping, got {fields!r}")
        name = fields.get(f"{key}_name")
        if key == "hf_model":
            is_known = name in texts
        else:
            is_known = isinstance(name, str) and timm.is_model(name)
        pretrained = fields.get(f"{key}_pretrained", False)
        if pretrained is not False or not (name is None or is_known):
            raise ValueError(
                f"a saved folder may not download weights or refer to another model: {tower} has {key}_name {name!r} "
                f"and {key}_pretrained {pretrained!r}"
            )


SAVING = Saving(
    "open_clip_torch",
    ("architecture", "class", "config", "norms_in_fp32", "output_dict", "preprocess"),
    describe,
    _check_description,
    build,
)
