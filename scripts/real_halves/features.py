"""Features of pictures by the vision tower, computed once: what the projector reads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmod.io.progress import progress_bar

_CHUNK = 500


def features_of(model: Any, processor: Any, pictures: Sequence[Path], target: Path) -> Tensor:
    """Return patch features (pictures, N, D) in half precision, of which finished chunks are read from `target`.

    Args:
        model: The vision-language model.
        processor: Its processor, which says how large images are.
        pictures: Files of the pictures.
        target: Folder of the chunks, for these pictures at this size.
    """
    target.mkdir(parents=True, exist_ok=True)
    chunks = []
    for start in progress_bar(range(0, len(pictures), _CHUNK), desc="features"):
        file = target / f"{start}.safetensors"
        if not file.exists():
            partial = file.with_suffix(".partial")
            save_file({"features": _chunk(model, processor, pictures[start : start + _CHUNK])}, partial)
            partial.rename(file)
        chunks.append(load_file(file)["features"])
    return torch.cat(chunks)


@torch.inference_mode()
def _chunk(model: Any, processor: Any, pictures: Sequence[Path]) -> Tensor:
    found = []
    for start in range(0, len(pictures), 20):
        images = [Image.open(file) for file in pictures[start : start + 20]]
        pixels = processor.image_processor(images, return_tensors="pt")["pixel_values"]
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.model.vision_tower(pixels, output_hidden_states=True).hidden_states
        found.append(hidden[model.config.vision_feature_layer][:, 1:].half())
    return torch.cat(found)
