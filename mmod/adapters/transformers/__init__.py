"""transformers: language models and vision towers, alone or as the parts of a vision-language model."""

from __future__ import annotations

import functools

from torch import nn

from mmod.adapters.base import Part
from mmod.adapters.transformers.families import is_decoder_layer
from mmod.adapters.transformers.language import find_language
from mmod.adapters.transformers.saving import (
    describe_methods,  # noqa: F401
    load,  # noqa: F401
)
from mmod.adapters.transformers.vision import find_vision, is_encoder_layer

SUPPORTED = (
    "language models of layers with `self_attn`, `mlp` and a cache, such as Llama, Mistral, Qwen, Phi-3 and Gemma, "
    "alone or in a vision-language model; CLIP and SigLIP vision towers"
)
# transformers saves models, with their routing in config.json.
SAVING = None
# Part -> predicate of its layers, and function that describes a list of layers.
_PARTS = {"language": (is_decoder_layer, find_language), "vision": (is_encoder_layer, find_vision)}


def find_parts(model: nn.Module) -> dict[str, Part]:
    """Return the parts of a transformers model, or of one that peft wraps: "language", "vision", or both."""
    stacks = [(name, item) for name, item in model.named_modules() if isinstance(item, nn.ModuleList) and len(item)]
    parts: dict[str, Part] = {}
    for part, (is_layer, find) in _PARTS.items():
        stack = next(((name, layers) for name, layers in stacks if is_layer(layers[0])), None)
        if stack is not None:
            parts[part] = functools.partial(find, model, *stack)
    if not parts:
        raise ValueError(f"cannot route {type(model).__name__}: supported are {SUPPORTED}")
    return parts
