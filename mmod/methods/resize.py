"""Smaller images: a model resizes its input images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch.nn.functional as F
from torch import Tensor, nn

from mmod.adapters import BlockStack
from mmod.blocks import convert
from mmod.methods.base import Method, register_method


@register_method("resize")
@dataclass(frozen=True)
class Resize(Method):
    """Images are resized before the patch embedding; timm resamples position embeddings in the forward pass.

    No weights are added, so a model can train on small images first and on full-size images afterwards. A model with an
    output per patch returns fewer outputs.

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
        if not getattr(model, "dynamic_img_size", False):
            raise ValueError(
                f"this {type(model).__name__} takes images of a fixed size: pass dynamic_img_size=True to "
                "timm.create_model, or in model.args"
            )
        patch_embed: Any = model.patch_embed
        side, _ = patch_embed.patch_size
        if self.size % side:
            raise ValueError(f"size={self.size} is no multiple of {side}, the side of a patch")

    def change(self, model: nn.Module, stack: BlockStack) -> None:
        """Make the patch embedding resize its input."""
        convert(model.get_submodule("patch_embed"), _ResizingPatches, self.size)


class _ResizingPatches(nn.Module):
    """Mixin of a patch embedding that first resizes its images (B, C, H, W) to a side of `mod_state` pixels."""

    mod_state: int

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        side = self.mod_state
        if tuple(x.shape[-2:]) != (side, side):
            x = F.interpolate(x, size=(side, side), mode="bicubic", antialias=True)
        return super().forward(x, *args, **kwargs)
