"""Smaller images: a model resizes its input images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmod.adapters import BlockStack, find_stacks
from mmod.adapters.probe import PIXELS, inputs_of_call
from mmod.blocks import Arguments, Mixin, ModelHook, attach, convert, host_class, parameters_of, positional_names
from mmod.methods.base import Method, owner_of, register_method

# The option of transformers' models that resamples position embeddings.
_INTERPOLATE = "interpolate_pos_encoding"


@register_method("resize")
@dataclass(frozen=True)
class Resize(Method):
    """Images are resized before the patch embedding; the host resamples position embeddings in the forward pass.

    A timm model needs `dynamic_img_size=True`; a model of transformers takes `interpolate_pos_encoding`, or any size.
    No weights are added, so a model can train on small images first and on full-size images afterwards. All outputs
    are those of the resized images, so outputs per patch and feature maps are smaller. Images that are prepared at the
    smaller size from their files differ slightly, so a few answers may differ too.

    Args:
        size: Side of square images in pixels, or height and width, each a multiple of the patch's. The aspect ratio of
            an image must be kept up to one patch: any other image is refused with a ValueError.
        training_only: Change the model in training mode alone; in evaluation it is dense.

    Source: progressive learning of EfficientNetV2, Tan and Le, arXiv 2104.00298, where the size grows in steps.

    Example:
        >>> import timm, torch, mmod
        >>> model = mmod.apply_(timm.create_model("test_vit", dynamic_img_size=True).eval(), Resize(size=80))
        >>> model.forward_features(torch.zeros(1, 3, 160, 160)).shape[1]
        26
    """

    size: Annotated[int | tuple[int, int], "[1, inf)"] = 160
    training_only: bool = False

    def check(self, model: nn.Module, stack: BlockStack) -> None:
        """Raise a ValueError unless the model takes images of any size."""
        owner: Any = owner_of(model, stack)
        title = type(model).__name__
        if hasattr(owner, "dynamic_img_size"):
            if not owner.dynamic_img_size:
                raise ValueError(
                    f"this {type(owner).__name__} takes images of a fixed size: pass dynamic_img_size=True to "
                    "timm.create_model, or in model.args"
                )
            sides = owner.patch_embed.patch_size
        else:
            sides = getattr(_projection(stack), "stride", ())
            if len(sides) != 2 or any(other.language for other in find_stacks(model).values()):
                raise ValueError(f"this {title} takes more than images whose patches one projection makes")
        height, width = _height_and_width(self.size)
        for length, side in zip((height, width), sides):
            if length % side:
                raise ValueError(f"size={self.size} is no multiple of {side}, the side of a patch")
        if not hasattr(owner, "dynamic_img_size"):
            self._try(model, stack, (height // sides[0]) * (width // sides[1]))

    def _try(self, model: nn.Module, stack: BlockStack, patches: int) -> None:
        """Raise a ValueError unless a call of a copy shows that images of the size give this many patches."""
        name, options = _image_model(model, stack)
        blocks = stack.block_list.removeprefix(f"{name}.")
        inner = model.get_submodule(name)
        pixels = next((pixels for pixels in PIXELS if pixels in parameters_of(inner)), "")
        projection: Any = _projection(stack)
        try:
            # A model that is being loaded is on the meta device.
            with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
                images = torch.randn(2, projection.in_channels, *_height_and_width(self.size))
                first = inputs_of_call(inner, blocks, {pixels: images, **options})
            tokens = first.x_BND.shape[1]
            reason = f"It makes {tokens} tokens of an image of size={self.size}, not {stack.prefix + patches}"
        # A host may raise anything for a size that it was not made for.
        except Exception as error:
            tokens = 0
            reason = f"It raised: {error}"
        if tokens != stack.prefix + patches:
            raise ValueError(
                f"this {type(model).__name__} takes images of a fixed size: let its forward resample the position "
                f"embeddings to the grid of the patches, as by torch.nn.functional.interpolate. {reason}"
            )

    def change(self, model: nn.Module, stack: BlockStack) -> None:
        """Make the model resize its images, in timm the patch embedding."""
        owner = owner_of(model, stack)
        height, width = _height_and_width(self.size)
        if not hasattr(owner, "dynamic_img_size"):
            name, options = _image_model(model, stack)
            side: Any = stack.grid.module.stride  # type: ignore[union-attr]
            target = TargetSize(height, width, int(side[1]))
            inner = model.get_submodule(name)
            known = (*positional_names(inner)[:1], *PIXELS)
            attach(inner, ModelHook(partial(resize_images, target, known, options)))
            return
        patch_embed: Any = owner.get_submodule("patch_embed")
        convert(patch_embed, ResizingPatches, TargetSize(height, width, patch_width=int(patch_embed.patch_size[1])))


def _projection(stack: BlockStack) -> nn.Module | None:
    """Return the module that makes the patches of an image, where the host shows one."""
    if stack.grid is None:
        return None
    return stack.grid.module


def _image_model(model: nn.Module, stack: BlockStack) -> tuple[str, dict[str, bool]]:
    """Return the outermost model around the blocks that takes images alone, by name, and the options for any size."""
    path = stack.block_list.split(".")[:-1]
    outermost = None
    options: dict[str, bool] = {}
    for depth in range(len(path) + 1):
        name = ".".join(path[:depth])
        names = parameters_of(model.get_submodule(name))
        if outermost is None and names.keys() & set(PIXELS) and "input_ids" not in names:
            outermost = name
        if _INTERPOLATE in names:
            options = {_INTERPOLATE: True}
    return outermost or "", options


def resize_images(
    target: TargetSize, known: Sequence[str], options: Arguments, module: nn.Module, arguments: Arguments
) -> dict[str, object]:
    """Return the arguments of a model with resized images.

    Args:
        known: What arguments that are images are called.
        options: Further arguments by which the model takes images of any size.
    """
    names = [name for name in known if arguments.get(name) is not None] or _unnamed_images(module, arguments)
    images = {name: resized(arguments[name], target) for name in names}
    return {**arguments, **images, **options}


def _unnamed_images(module: nn.Module, arguments: Arguments) -> list[str]:
    """Return the argument that is the images, among those for which the forward of a model has no name.

    Raises:
        ValueError: Not one of them may be the images.
    """
    named = parameters_of(module)
    others = [name for name in arguments if name not in named]
    maps = [name for name in others if isinstance(arguments[name], Tensor) and arguments[name].ndim == 4]
    if others and len(maps) != 1:
        raise ValueError(
            f"which argument of this {host_class(module).__name__} is its images is unknown: its forward names none, "
            f"and of {', '.join(others)}, {len(maps)} are tensors (images, channels, height, width): pass the images "
            "in order, before all others"
        )
    return maps


class TargetSize(NamedTuple):
    """The size of resized images in pixels, and the width of a patch."""

    height: int
    width: int
    patch_width: int


def _height_and_width(size: int | tuple[int, int]) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    return size


class ResizingPatches(Mixin):
    """Mixin of a patch embedding that first resizes its images (B, C, H, W) to the size `mod_state`.

    timm's models ask it, too, for the size of a map of features.
    """

    mod_state: TargetSize

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Return the patches of the resized images."""
        return super().forward(resized(x, self.mod_state), *args, **kwargs)

    def dynamic_feat_size(self, img_size: tuple[int, int]) -> tuple[int, int]:
        """Return the grid of the patches of images of a size, which are resized first."""
        host: Any = super()
        rows, columns = host.dynamic_feat_size((self.mod_state.height, self.mod_state.width))
        return rows, columns


def resized(images: Tensor, target: TargetSize) -> Tensor:
    """Return resized images (B, C, H, W).

    Raises:
        ValueError: The aspect ratio would change by more than a patch.
    """
    height, width = images.shape[2:]
    if (height, width) == (target.height, target.width):
        return images
    # At the target's height, the image would be a patch wider or narrower than the target.
    if abs(target.height * width - target.width * height) >= target.patch_width * height:
        patches = round(target.height * width / (height * target.patch_width))
        fitting = target.patch_width * max(1, patches)
        size = f"{target.height}"
        if target.height != target.width:
            size = f"({target.height}, {target.width})"
        raise ValueError(
            f"size={size} changes the aspect ratio of images of {height} x {width} pixels: use "
            f"Resize(size=({target.height}, {fitting})), or other multiples of the patch's sides that keep it"
        )
    # A CPU does not interpolate in half precision.
    x = images.to(torch.promote_types(images.dtype, torch.float32))
    x = F.interpolate(x, size=(target.height, target.width), mode="bicubic", antialias=True)
    return x.to(images.dtype)
