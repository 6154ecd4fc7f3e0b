"""Vision towers of small vision-language models, and images of three sizes for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.kit.made import made_once
from tests.kit.vlm_zoo import MERGED, lively, make_joint

ALL = (
    *("llava", "llava-next", "llava-onevision", "internvl", "idefics3", "smolvlm", "mistral3"),
    *("qwen2-vl", "qwen2.5-vl", "qwen3-vl"),
)
# Those that run all images as one sequence.
IN_SEQUENCE = ("mistral3", "qwen2-vl", "qwen2.5-vl", "qwen3-vl")
# Those that take images of several sizes at once.
UNEQUAL = ("idefics3", "smolvlm", *IN_SEQUENCE)
# Rows and columns of patches of three images.
_SIDES = ((3, 3), (4, 2), (2, 3))


@made_once
def make_deep(name: str, layers: int = 6, attention: str = "sdpa", **changes: Any) -> nn.Module:
    """Return a vision-language model whose tower has more layers, and other settings changed."""
    config: Any = make_joint(name).config
    vision = config.vision_config
    for field in ("depth", "num_hidden_layers"):
        if hasattr(vision, field):
            setattr(vision, field, layers)
    for field, value in changes.items():
        setattr(vision, field, value)
    config._attn_implementation = attention
    torch.manual_seed(0)
    return lively(transformers.AutoModelForImageTextToText.from_config(config))


def tower_of(model: Any) -> Any:
    """Return the vision tower of a model."""
    names = ("vision_tower", "visual", "vision_model")
    return next(getattr(model.model, name) for name in names if hasattr(model.model, name))


def images(name: str, numbers: tuple[int, ...] = (0, 1, 2)) -> dict[str, Tensor]:
    """Return the arguments of a tower for some of three images, of different sizes where it takes such."""
    generator = torch.Generator().manual_seed(3)
    side = 24 if name in MERGED else 12
    pixels_ICHW = torch.randn(3, 3, side, side, generator=generator)
    sides = [_SIDES[number] for number in numbers]
    if name.startswith("qwen"):
        patches = [torch.randn(rows * columns, 48, generator=generator) for rows, columns in _SIDES]
        grid = torch.tensor([[1, *side] for side in sides])
        return {"hidden_states": torch.cat([patches[number] for number in numbers]), "grid_thw": grid}
    arguments = {"pixel_values": pixels_ICHW[list(numbers)]}
    if name == "mistral3":
        arguments["image_sizes"] = 4 * torch.tensor(sides)
    if name in ("idefics3", "smolvlm"):
        arguments["patch_attention_mask"] = torch.zeros(len(numbers), 6, 6, dtype=torch.bool)
        for mask, (rows, columns) in zip(arguments["patch_attention_mask"], sides):
            mask[:rows, :columns] = True
    return arguments


def by_image(name: str, tokens: Tensor, numbers: tuple[int, ...] = (0, 1, 2)) -> list[Tensor]:
    """Return a tower's tokens image by image, without padding."""
    lengths = [rows * columns for rows, columns in map(_SIDES.__getitem__, numbers)]
    if name in IN_SEQUENCE:
        return list(tokens.view(-1, tokens.shape[-1]).split(lengths))
    if name in ("idefics3", "smolvlm"):
        masks = images(name, numbers)["patch_attention_mask"]
        return [rows_ND[mask.flatten()] for rows_ND, mask in zip(tokens, masks)]
    return list(tokens)
