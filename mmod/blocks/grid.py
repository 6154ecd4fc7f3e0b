"""What the patch embedding tells a forward pass: rows and columns of patches, and what a score sees of their pixels.

Axes: B images, R rows and C columns of patches, H channels, E pixels of a patch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmod.blocks.hook import ModelHook
from mmod.blocks.passes import StackCalls
from mmod.config import Grid, Patches
from mmod.threads import PerThread


class GridSource(NamedTuple):
    """Where a host shows its grid.

    Args:
        module: The module that makes the patches of an image.
        read: Returns the grid from the module's output; None where a batch has no common one.
        std: What each channel of an image was divided by when it was normalised; None where the host does not say.
    """

    module: nn.Module
    read: Callable[[Any], Grid | None]
    std: tuple[float, ...] | None = None


def grid_of_map(output: Any) -> Grid | None:
    """Return the grid of a feature map (B, C, rows, columns), which the projection to patches of most hosts returns."""
    return (output.shape[2], output.shape[3]) if isinstance(output, Tensor) and output.ndim == 4 else None


def check_cuts(module: nn.Module) -> None:
    """Raise a ValueError, with the property that is missing, unless a layer makes each patch of pixels of its own."""
    if not isinstance(module, nn.Conv2d):
        raise ValueError(f"they are made by a {type(module).__name__} and by no convolution of images")
    if module.stride != module.kernel_size or module.dilation != (1, 1) or module.padding not in ((0, 0), "valid"):
        raise ValueError(
            f"their convolution has kernel_size={module.kernel_size}, stride={module.stride}, padding={module.padding} "
            f"and dilation={module.dilation}, so patches share pixels or skip some"
        )
    if module.in_channels > len("RGBA"):
        raise ValueError(f"their convolution reads {module.in_channels} channels of features, and no pixels")


def cut_patches(module: nn.Conv2d, image_BHYX: Tensor) -> Tensor:
    """Return the pixels of each patch (B, R, C, H, E) that a convolution makes, see `check_cuts`.

    Example:
        >>> cut_patches(nn.Conv2d(3, 8, 4, 4), torch.zeros(2, 3, 8, 13)).shape
        torch.Size([2, 2, 3, 3, 16])
    """
    height, width = module.kernel_size
    rows, columns = image_BHYX.shape[2] // height, image_BHYX.shape[3] // width
    image_BHYX = image_BHYX[:, :, : rows * height, : columns * width]
    cut = image_BHYX.unflatten(3, (columns, width)).unflatten(2, (rows, height))
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(4)


class GridHook(ModelHook):
    """Tells the forward pass that begins after the patch embedding what is known of the images' patches.

    Args:
        read: See `GridSource`.
        see: Returns what a score needs of the pixels of patches (B, R, C, H, E); None where it needs nothing.
    """

    def __init__(
        self,
        calls: PerThread[StackCalls],
        read: Callable[[Any], Grid | None],
        see: Callable[[Tensor], tuple[Tensor, ...]] | None = None,
    ) -> None:
        self.calls = calls
        self.read = read
        self.see = see

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Do nothing before the call."""

    def after(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """Read the grid and the pixels; there is no output of a call that failed."""
        if output is None:
            return
        seen = None
        if self.see is not None:
            (image_BHYX,) = args or kwargs.values()
            with torch.no_grad():
                seen = self.see(cut_patches(module, image_BHYX))
        self.calls.value.show_patches(Patches(self.read(output), seen))


class PatchesOfPass:
    """Returns what is known of the patches of the forward pass that entered a block last in this thread."""

    def __init__(self, calls: PerThread[StackCalls]) -> None:
        self.calls = calls

    def __call__(self) -> Patches:
        """Return rows and columns, and what a score has seen."""
        entered = self.calls.value.entered
        return Patches() if entered is None else entered.patches
