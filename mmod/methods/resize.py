"""Smaller images: a model resizes its input images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

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
        size: Side of the resized images in pixels, a multiple of the patch size.

    Source: progressive learning of EfficientNetV2, Tan and Le, arXiv 2104.00298, where the size grows in steps.

    Example:
        >>> import timm, torch, mmod
        >>> model = mmod.apply_(timm.create_model("test_vit", dynamic_img_size=True).eval(), Resize(size=80))
        >>> model.forward_features(torch.zeros(1, 3, 160, 160)).shape[1]
        26
    """

    size: Annotated[int, "[1, inf)"] = 160

    def check(self, model: nn.Module, stack: BlockStack) -> None:
        """Raise a ValueError unless the model takes images of any size."""
        owner: Any = owner_of(model, stack)
        if not getattr(owner, "dynamic_img_size", False):
            raise ValueError(
                f"this {type(owner).__name__} takes images of a fixed size: pass dynamic_img_size=True to "
                "timm.create_model, or in model.args"
            )
        side, _ = owner.patch_embed.patch_size
        if self.size % side:
            raise ValueError(f"size={self.size} is no multiple of {side}, the side of a patch")

    def change(self, model: nn.Module, stack: BlockStack) -> None:
        """Make the model and its patch embedding resize their input."""
        owner = owner_of(model, stack)
        convert(owner, ResizingModel, self.size)
        # For code of others that embeds patches itself.
        convert(owner.get_submodule("patch_embed"), ResizingPatches, self.size)


class ResizingModel(nn.Module):
    """Mixin of a model that first resizes its images (B, C, H, W) to a side of `mod_state` pixels.

    The host reads the size of a map of features from the images, so they are resized before it sees them.
    """

    keeps_name = True
    mod_state: int

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
    """Mixin of a patch embedding that first resizes its images (B, C, H, W) to a side of `mod_state` pixels."""

    mod_state: int

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the patches of the resized images."""
        return super().forward(resized(x, self.mod_state), *args, **kwargs)


def resized(images: Tensor, side: int) -> Tensor:
    """Return images resized to squares (B, C, side, side)."""
    if tuple(images.shape[-2:]) == (side, side):
        return images
    # A CPU does not interpolate in half precision.
    x = images.to(torch.promote_types(images.dtype, torch.float32))
    return F.interpolate(x, size=(side, side), mode="bicubic", antialias=True).to(images.dtype)
