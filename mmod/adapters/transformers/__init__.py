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
    take_description,  # noqa: F401
)
from mmod.adapters.transformers.vision import (
    find_tower,  # noqa: F401
    vision_part,
)

SUPPORTED = (
    "language models of layers with `self_attn`, `mlp` and a cache, such as Llama, Mistral, Qwen, Phi-3 and Gemma, "
    "alone or in a vision-language model; vision models and towers whose layers pass a trial"
)
# transformers saves models, with their routing in config.json.
SAVING = None


def find_parts(model: nn.Module) -> dict[str, Part]:
    """Return the parts of a transformers model, or of one that peft wraps: "language", "image", or both."""
    parts: dict[str, Part] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) and is_decoder_layer(module[0]):
            parts["language"] = functools.partial(find_language, model, name, module)
            break
    vision = vision_part(model)
    if vision is not None:
        parts["image"] = vision
    if not parts:
        raise ValueError(f"cannot route {type(model).__name__}: supported are {SUPPORTED}")
    return parts
