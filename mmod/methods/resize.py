"""Smaller images: a model resizes its input images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmod.adapters import BlockStack
from mmod.blocks import convert
from mmod.methods.base import Method, owner_of, register_method


@register_method("resize")
@dataclass(frozen=True)
class Resize(Method):
    """Images are resized before the patch embedding; timm resamples position embeddings in the forward pass.

    No weights are added, so a model can train on small images first and on full-size images afterwards. Whatever the
    model returns is what it returns for the resized images: outputs per patch, and maps of features, are smaller.

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

    size: Annotated[int | tuple[int, int], "[1, inf)"] = 160

    def check(self, model: nn.Module, stack: BlockStack) -> None:
        """Raise a ValueError unless the model takes images of any size."""
        owner: Any = owner_of(model, stack)
        if not getattr(owner, "dynamic_img_size", False):
            raise ValueError(
                f"this {type(owner).__name__} takes images of a fixed size: pass dynamic_img_size=True to "
                "timm.create_model, or in model.args"
            )
        for length, side in zip(_height_and_width(self.size), owner.patch_embed.patch_size):
            if length % side:
                raise ValueError(f"size={self.size} is no multiple of {side}, the side of a patch")

    def change(self, model: nn.Module, stack: BlockStack) -> None:
        """Make the model and its patch embedding resize their input."""
        owner = owner_of(model, stack)
        patch_embed: Any = owner.get_submodule("patch_embed")
        target = Target(*_height_and_width(self.size), patch_width=int(patch_embed.patch_size[1]))
        convert(owner, ResizingModel, target)
        # For code of others that embeds patches itself.
        convert(patch_embed, ResizingPatches, target)


class Target(NamedTuple):
    """The size of resized images in pixels, and the width of a patch."""

    height: int
    width: int
    patch_width: int


def _height_and_width(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


class ResizingModel(nn.Module):
    """Mixin of a model that first resizes its images (B, C, H, W) to the size `mod_state`.

    The host reads the size of a map of features from the images, so they are resized before it sees them.
    """

    keeps_name = True
    mod_state: Target

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns for the resized images."""
        return super().forward(resized(x, self.mod_state), *args, **kwargs)

    def forward_features(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the tokens of the resized images."""
        host: Any = super()
        return host.forward_features(resized(x, self.mod_state), *args, **kwargs)

    def forward_intermediates(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the maps of the resized images."""
        host: Any = super()
        return host.forward_intermediates(resized(x, self.mod_state), *args, **kwargs)


class ResizingPatches(nn.Module):
    """Mixin of a patch embedding that first resizes its images (B, C, H, W) to the size `mod_state`."""

    mod_state: Target

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the patches of the resized images."""
        return super().forward(resized(x, self.mod_state), *args, **kwargs)

    def dynamic_feat_size(self, img_size: tuple[int, int]) -> tuple[int, int]:
        """Return the grid of the patches of images of a size, which are resized first."""
        host: Any = super()
        rows, columns = host.dynamic_feat_size((self.mod_state.height, self.mod_state.width))
        return rows, columns


def resized(images: Tensor, target: Target) -> Tensor:
    """Return resized images (B, C, H, W).

    Raises:
        ValueError: The aspect ratio would change by more than a patch.
    """
    height, width = images.shape[2:]
    if (height, width) == (target.height, target.width):
        return images
    if abs(target.height * width - target.width * height) >= target.patch_width * height:
        patches = round(target.height * width / (height * target.patch_width))
        fitting = target.patch_width * max(1, patches)
        size = target.height if target.height == target.width else (target.height, target.width)
        raise ValueError(
            f"size={size} changes the aspect ratio of images of {height} x {width} pixels: use "
            f"Resize(size=({target.height}, {fitting})), or other multiples of the patch's sides that keep it"
        )
    # A CPU does not interpolate in half precision.
    x = images.to(torch.promote_types(images.dtype, torch.float32))
    x = F.interpolate(x, size=(target.height, target.width), mode="bicubic", antialias=True)
    return x.to(images.dtype)
