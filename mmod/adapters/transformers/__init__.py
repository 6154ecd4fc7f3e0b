"""transformers: language models and vision towers, alone or as the parts of a vision-language model."""

from __future__ import annotations

import functools

from torch import nn

from mmod.adapters.base import Part
from mmod.adapters.transformers.language import find_language, language_model
from mmod.adapters.transformers.saving import load
from mmod.adapters.transformers.vision import find_vision, vision_encoder

SUPPORTED = (
    "causal language models of the families Llama, Mistral, Qwen2, Qwen2.5, Qwen3, Phi-3, Gemma, Gemma 2 and Gemma 3, "
    "LLaVA, LLaVA-NeXT, LLaVA-OneVision, Qwen2-VL and Qwen2.5-VL with them, and CLIP and SigLIP vision towers"
)


def find_parts(model: nn.Module) -> dict[str, Part]:
    """Return the parts of a transformers model, or of one that peft wraps: "language", "vision", or both.

    Args:
        model: A `PreTrainedModel` or a `PeftModel`.

    Raises:
        ValueError: It has neither part.
    """
    parts: dict[str, Part] = {}
    language = language_model(model)
    if language is not None:
        parts["language"] = functools.partial(find_language, model, *language)
    vision = vision_encoder(model)
    if vision is not None:
        parts["vision"] = functools.partial(find_vision, model, *vision)
    if not parts:
        raise ValueError(f"cannot route {type(model).__name__}: supported are {SUPPORTED}")
    return parts


__all__ = ["SUPPORTED", "find_parts", "load"]
