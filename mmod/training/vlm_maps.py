"""Pictures of the image tokens that routed vision-language models kept for a question."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mmod import is_routed, trace
from mmod.data.chat import ChatCollator
from mmod.data.conversations import Talk
from mmod.data.questions import IMAGE
from mmod.measuring.plots import draw_routing_maps

__all__ = ["draw_maps"]

# Letters of a line of the question beside its picture.
_LINE = 18


def draw_maps(models: Mapping[str, Any], collator: ChatCollator, talks: Sequence[Talk], folder: Path) -> list[Path]:
    """Draw which image tokens each routed layer kept of questions about one image.

    Args:
        models: Name of each model to the model; dense ones are passed over.
        collator: Encodes questions for all of them.
        talks: Conversations with one image each.
        folder: Where `maps-NAME.png` is written.

    Returns:
        The files; none where an image's tokens are no square grid over its pixels, as in models that cut images into
        tiles.
    """
    prompts = collator.prompts(talks)
    pixels = prompts.get("pixel_values")
    image_BN = prompts["input_ids"] == collator.processor.image_token_id
    tokens = int(image_BN.sum()) // len(talks)
    side = math.isqrt(tokens)
    if pixels is None or pixels.ndim != 4 or side * side != tokens:
        return []
    low, high = pixels.amin(), pixels.amax()
    labels = [textwrap.fill(talk.messages[-2].text.replace(IMAGE, "").strip(), _LINE) for talk in talks]
    written = []
    for name, model in models.items():
        if not is_routed(model):
            continue
        with torch.inference_mode(), trace(model) as decisions:
            model(**{key: value.to(model.device) for key, value in prompts.items()}, logits_to_keep=1)
        figure = draw_routing_maps((pixels - low) / (high - low), decisions, 0, (side, side), labels, image_BN)
        written.append(folder / f"maps-{name}.png")
        figure.savefig(written[-1], dpi=150, bbox_inches="tight")
    return written
