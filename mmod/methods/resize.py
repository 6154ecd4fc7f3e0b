"""Smaller images: a model resizes its input images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mmod.adapters import BlockStack
from mmod.blocks import convert
from mmod.methods.base import Method, register_method


@register_method("resize")
@dataclass(frozen=True)
class Resize(Method, size="[1, inf)"):
    """Images are resized before the patch embedding; timm resamples position embeddings in the forward pass.

    No weights are added, so a model can train on small images first and on full-size images afterwards. A model with an
    output per patch returns fewer outputs.

    Args:
        size: Side of square images in pixels, or height and width, each a multiple of the patch's. The aspect ratio of
            an image must be kept up to one patch: any other image is refused with a ValueError.

    Source: progressive learning of EfficientNetV2, Tan and Le, arXiv 2104.00298, where the size grows in steps.

    Example:
        >>> import timm, torch, mmod
        >>> model = mmod.apply_(timm.create_model("test_vit", dynamic_img_size=True).eval(), Resize(size=80))
        >>> model.forward_features(torch.zeros(1, 3, 160, 160)).shape[1]
        26
    """

    size: int | tuple[int, int] = 160

    def check(self, model: nn.Module, stack: BlockStack) -> None:
        """Raise a ValueError unless the model takes images of any size."""
        if not getattr(model, "dynamic_img_size", False):
            raise ValueError(
                f"this {type(model).__name__} takes images of a fixed size: pass dynamic_img_size=True to "
                "timm.create_model, or in model.args"
            )
        patch_embed: Any = model.patch_embed
        for length, side in zip(_height_and_width(self.size), patch_embed.patch_size):
            if length % side:
                raise ValueError(f"size={self.size} is no multiple of {side}, the side of a patch")

    def change(self, model: nn.Module, stack: BlockStack) -> None:
        """Make the patch embedding resize its input."""
        convert(model.get_submodule("patch_embed"), _ResizingPatches, self.size)


def _height_and_width(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


class _ResizingPatches(nn.Module):
    """Mixin of a patch embedding that first resizes its images (B, C, H, W) to `mod_state`, a method's size."""

    mod_state: int | tuple[int, int]
    patch_size: tuple[int, int]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        size = self._resized(x.shape[2], x.shape[3])
        if (x.shape[2], x.shape[3]) != size:
            x = F.interpolate(x, size=size, mode="bicubic", antialias=True)
        return super().forward(x, *args, **kwargs)

    def dynamic_feat_size(self, img_size: tuple[int, int]) -> tuple[int, int]:
        """Return the grid of an image's patches, which timm reshapes its features to."""
        return super().dynamic_feat_size(self._resized(*img_size))  # type: ignore[misc]

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of a resized image; a ValueError if its aspect ratio would change."""
        rows, columns = _height_and_width(self.mod_state)
        if abs(rows * width - columns * height) >= self.patch_size[1] * height:
            side = self.patch_size[1]
            fitting = max(side, side * round(rows * width / (height * side)))
            raise ValueError(
                f"size={self.mod_state} changes the aspect ratio of images of {height} x {width} pixels: use "
                f"Resize(size=({rows}, {fitting})), or other multiples of the patch's sides that keep it"
            )
        return rows, columns
