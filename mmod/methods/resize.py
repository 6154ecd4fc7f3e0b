"""Smaller images: a model sees its images at another size than they are given in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from mmod.adapters import BlockStack
from mmod.blocks import convert
from mmod.methods.base import Method, register_method
from mmod.methods.reduction import pooling
from mmod.values import check_fields


@register_method("resize")
@dataclass(frozen=True)
class Resize(Method):
    """Images are resized before they are cut into patches; position embeddings are resampled by timm as they pass.

    Nothing is added, so that a model can be trained on small images first and on whole ones afterwards.

    Args:
        size: Side of the images that the model sees, in pixels; a multiple of its patches' side.

    Source: progressive learning of EfficientNetV2, Tan and Le, arXiv 2104.00298, where sizes grow in steps.

    Example:
        >>> import timm, torch, mmod
        >>> model = mmod.apply_(timm.create_model("test_vit", dynamic_img_size=True).eval(), Resize(size=80))
        >>> model.forward_features(torch.zeros(1, 3, 160, 160)).shape[1]
        26
    """

    adds_weights: ClassVar[bool] = False
    size: int = 160

    def __post_init__(self) -> None:
        check_fields(self, "method", size="[1, inf)")

    def check(self, model: nn.Module, stack: BlockStack) -> None:
        """Raise a ValueError unless the model takes images of any size and answers for whole ones."""
        if not getattr(model, "dynamic_img_size", False):
            raise ValueError(
                f"this {type(model).__name__} takes images of one size alone: give timm.create_model, or model.args, "
                "dynamic_img_size=True"
            )
        if pooling(model) == "":
            raise ValueError("a model that answers for every patch would answer for fewer and larger ones")
        patch_embed: Any = model.patch_embed
        side, _ = patch_embed.patch_size
        if self.size % side:
            raise ValueError(f"size={self.size} is no multiple of {side}, the side of a patch")

    def change(self, model: nn.Module, stack: BlockStack) -> None:
        """Let the patch embedding resize what it is given."""
        convert(model.get_submodule("patch_embed"), _ResizingPatches, self.size)


class _ResizingPatches(nn.Module):
    """Mixin of a patch embedding that resizes its images (B, C, H, W) first.

    Attributes:
        mod_state: Side of the resized images in pixels.
    """

    mod_state: int

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return what the host's embedding makes of the resized images."""
        side = self.mod_state
        if tuple(x.shape[-2:]) != (side, side):
            x = F.interpolate(x, size=(side, side), mode="bicubic", antialias=True)
        patches: Tensor = super().forward(x, *args, **kwargs)
        return patches
