"""Vision towers: supported encoders, how their layers are called, and the importance of image tokens in them.

Axes: B images or samples, I images, N tokens, K slots per image, H heads, E channels of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmod.adapters.base import BlockStack, NamedArguments
from mmod.adapters.masks import hide_empty_slots
from mmod.adapters.transformers.layers import OPERATORS, TUPLES
from mmod.blocks import GridSource, ModelHook, grid_of_map, host_class
from mmod.blocks.passes import recomputing
from mmod.ops import attention_with_importance, class_token_importance
from mmod.routing import Routing
from mmod.threads import PerThread

# Class of an encoder layer -> number of prefix tokens.
LAYERS = {"CLIPEncoderLayer": 1, "SiglipEncoderLayer": 0}


class EncoderLayerCall(NamedArguments):
    """How transformers calls a layer of a vision tower: without a mask, and with keywords to pass on."""

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments by name."""
        arguments = {**dict(zip(self.names, args)), **kwargs}
        if arguments.get("attention_mask") is not None:
            raise ValueError("a routed vision tower takes no attention mask: remove attention_mask")
        return arguments

    def can_pack(self, block: nn.Module, arguments: Mapping[str, Any]) -> bool:
        """Return whether attention is sdpa, the only implementation that supports packed rows."""
        attention: Any = block.get_submodule("self_attn")
        return bool(attention.config._attn_implementation == "sdpa")

    def select_tokens(self, arguments: Mapping[str, Any], x_BND: Tensor, routing: Routing | None) -> dict[str, Any]:
        """Hide empty slots."""
        assert routing is not None
        if routing.kept.image_S is not None:
            return dict(arguments)
        return {**arguments, "attention_mask": hide_empty_slots(None, routing.kept.valid_BK, x_BND.dtype)}


def is_encoder_layer(layer: nn.Module) -> bool:
    """Return whether a layer belongs to a supported vision tower."""
    config = getattr(getattr(layer, "self_attn", None), "config", None)
    # Layers of a CLIP text tower have the same class.
    return host_class(layer).__name__ in LAYERS and hasattr(config, "patch_size")


def find_vision(model: nn.Module, name: str, layers: nn.ModuleList) -> BlockStack:
    """Return the layers of a vision tower."""
    first = layers[0]
    # The tower is around the list of layers, in its `encoder`.
    tower = model.get_submodule(name.rpartition(".")[0].rpartition(".")[0])
    patches = getattr(getattr(tower, "embeddings", None), "patch_embedding", None)
    return BlockStack(
        library="transformers",
        names=tuple(f"{name}.{index}" for index in range(len(layers))),
        blocks=tuple(layers),
        prefix=LAYERS[host_class(first).__name__],
        dim=int(first.self_attn.config.hidden_size),  # type: ignore[union-attr,arg-type]
        call_of=lambda layer, config: EncoderLayerCall(("attention_mask",), operators=OPERATORS, tuples=TUPLES),
        grid=None if patches is None else GridSource(patches, grid_of_map),
    )


class Projected(ModelHook):
    """Hook that stores a projection's last output of each thread, until it is taken."""

    def __init__(self) -> None:
        self._last: PerThread[Tensor | None] = PerThread(type(None))

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Do nothing before the call."""

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """Store the output."""
        if isinstance(output, Tensor) and not recomputing():
            self._last.value = output.detach()

    def take(self) -> Tensor | None:
        """Return the last output and drop it."""
        last = self._last.value
        self._last.value = None
        return last


class TowerEnd(ModelHook):
    """Hook of the module that runs the tower: drops outputs that no layer has read, as after a pass that failed."""

    def __init__(self, *projections: Projected) -> None:
        self.projections = projections
        # Whether a call runs in a thread.
        self._runs: PerThread[bool] = PerThread(bool)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Drop what an interrupted call left: torch calls no hook after a KeyboardInterrupt."""
        if self._runs.value:
            self._drop()
        self._runs.value = True

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """Drop the outputs."""
        self._runs.value = False
        self._drop()

    def _drop(self) -> None:
        for projection in self.projections:
            projection.take()


class TowerImportance:
    """Reads the class token's attention to patches in the layer of the vision tower that provides the features.

    In a tower without a class token, it is the mean attention of all patches. `entry` inserts image features into the
    embedded tokens.

    Source: VisionZip, Yang et al., arXiv 2412.04467, section 3.2: its dominant tokens.
    """

    def __init__(self, entry: nn.Module) -> None:
        config: Any = getattr(entry, "config", None)
        lists = [item for item in entry.modules() if isinstance(item, nn.ModuleList) and len(item)]
        layers = next((item for item in lists if is_encoder_layer(item[0])), None)
        if type(entry).__name__ != "LlavaModel" or layers is None:
            raise ValueError(
                "router.importance='vision_tower' needs a LLaVA whose image tokens are the patches of a CLIP or SigLIP "
                f"tower: this is a {type(entry).__name__}"
            )
        chosen = config.vision_feature_layer
        last = chosen if isinstance(chosen, int) else chosen[-1]
        # Hidden states begin with the embeddings, before the first layer.
        attention: Any = layers[last if last < 0 else max(last - 1, 0)].self_attn
        self.class_token = bool(LAYERS[host_class(layers[0]).__name__])
        self.dropped = int(config.vision_feature_select_strategy == "default")
        self.heads = int(attention.num_heads)
        self.scale = float(attention.scale)
        self.query = Projected()
        self.key = Projected()
        self.hooks: list[tuple[nn.Module, ModelHook]] = [
            (attention.q_proj, self.query),
            (attention.k_proj, self.key),
            (entry, TowerEnd(self.query, self.key)),
        ]

    def of(self, image_BN: Tensor) -> Tensor:
        """Return the importance of image tokens (B, N), 0 at all other tokens."""
        query, key = self.query.take(), self.key.take()
        if query is None or key is None:
            raise ValueError(
                "router.importance='vision_tower' needs the tower to process the images: pass pixel_values"
            )
        importance_IN = self._importance(query, key)[:, self.dropped :]
        tokens = int(image_BN.sum())
        values = importance_IN.numel()
        if values and tokens % values == 0 and tokens // values * importance_IN.shape[0] == image_BN.shape[0]:
            # generate() repeats prompts with one image each, whose features it computed once.
            importance_IN = importance_IN.repeat_interleave(tokens // values, dim=0)
        if importance_IN.numel() != tokens:
            raise ValueError(f"the vision tower processed {values} patches, the prompts have {tokens} image tokens")
        score_BN = torch.zeros(image_BN.shape, dtype=importance_IN.dtype, device=image_BN.device)
        return score_BN.masked_scatter(image_BN, importance_IN.to(image_BN.device))

    def _importance(self, query_IND: Tensor, key_IND: Tensor) -> Tensor:
        q_IHNE, k_IHNE = (rows.unflatten(-1, (self.heads, -1)).transpose(1, 2) for rows in (query_IND, key_IND))
        if self.class_token:
            return class_token_importance(q_IHNE, k_IHNE, scale=self.scale)
        with torch.no_grad():
            return attention_with_importance(q_IHNE, k_IHNE, k_IHNE, scale=self.scale)[1]
