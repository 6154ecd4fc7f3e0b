"""Vision towers: supported encoders, and how their layers are called.

Axes: B images, N tokens, K slots per image.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from mmod.adapters.base import BlockStack, NamedArguments
from mmod.adapters.masks import hide_empty_slots
from mmod.adapters.transformers.layers import OPERATORS, TUPLES
from mmod.blocks import host_class
from mmod.routing import Routing

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

    def select_tokens(self, arguments: Mapping[str, Any], x_BND: Tensor, routing: Routing) -> dict[str, Any]:
        """Hide empty slots."""
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
    return BlockStack(
        library="transformers",
        names=tuple(f"{name}.{index}" for index in range(len(layers))),
        blocks=tuple(layers),
        prefix=LAYERS[host_class(first).__name__],
        dim=int(first.self_attn.config.hidden_size),  # type: ignore[union-attr,arg-type]
        call_of=lambda layer, config: EncoderLayerCall(("attention_mask",), operators=OPERATORS, tuples=TUPLES),
    )
