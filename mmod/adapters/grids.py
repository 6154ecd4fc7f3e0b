"""The grid of patches that a model makes of its images, as its host shows it in a forward pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mmod.adapters.base import BlockStack
from mmod.adapters.find import find_stacks
from mmod.adapters.images import image_facts
from mmod.config import Grid


@dataclass
class SeenGrid:
    """The grid of a model's last forward pass.

    Attributes:
        grid: Rows and columns of an image's patches; None before a pass, or where the images had no common grid.
    """

    grid: Grid | None = None


def image_stack(model: nn.Module) -> BlockStack | None:
    """Return the blocks of the part that sees images; None for a model without one that can be routed."""
    try:
        return find_stacks(model).get("image")
    except ValueError:
        return None


def patch_grid(model: nn.Module, image_size: tuple[int, int]) -> Grid:
    """Return rows and columns of the patches that a model, possibly wrapped, makes of images of a size.

    Args:
        image_size: Height and width in pixels.

    Raises:
        ValueError: No module of the model makes patches as timm's do, and no config names their size.

    Example:
        >>> import timm
        >>> patch_grid(timm.create_model("test_vit"), (128, 288))
        (8, 18)
    """
    embed: Any = next((module for module in model.modules() if hasattr(module, "dynamic_feat_size")), None)
    if embed is not None:
        rows, columns = embed.dynamic_feat_size(image_size)
        return rows, columns
    patch = image_facts(model).patch
    if patch is None:
        raise ValueError(f"this {type(model).__name__} has no patch embedding of timm, so its grid is unknown")
    return image_size[0] // patch[0], image_size[1] // patch[1]


@contextmanager
def watch_grid(model: nn.Module) -> Iterator[SeenGrid]:
    """Watch the grid of patches in the forward passes within the context.

    Example:
        >>> import timm, torch
        >>> model = timm.create_model("test_vit", dynamic_img_size=True).eval()
        >>> with watch_grid(model) as seen:
        ...     _ = model(torch.zeros(1, 3, 128, 288))
        >>> seen.grid
        (8, 18)
    """
    seen = SeenGrid()
    stack = image_stack(model)
    source = None if stack is None else stack.grid
    if source is None:
        yield seen
        return

    def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        seen.grid = source.read(output)

    handle = source.module.register_forward_hook(keep)
    try:
        yield seen
    finally:
        handle.remove()


def resized(x_BNC: Tensor, grid: tuple[int, int], target: tuple[int, int]) -> Tensor:
    """Interpolate a grid of logits or features (B, N, C), row by row, to other rows and columns.

    Raises:
        ValueError: The grid has another number of patches.

    Example:
        >>> import torch
        >>> resized(torch.arange(8.0).view(1, 8, 1), (2, 4), (4, 8)).shape
        torch.Size([1, 32, 1])
    """
    if grid == target:
        return x_BNC
    if math.prod(grid) != x_BNC.shape[1]:
        raise ValueError(f"{x_BNC.shape[1]} outputs are no grid of {grid[0]} x {grid[1]} patches")
    x_BCHW = x_BNC.transpose(1, 2).unflatten(2, grid)
    return F.interpolate(x_BCHW, size=target, mode="bilinear").flatten(2).transpose(1, 2)


def resized_to_labels(model: nn.Module, x_BNC: Tensor, images: Tensor, labels: int) -> Tensor:
    """Interpolate a model's outputs for the patches of images (B, C, H, W) to the patches that have labels.

    Args:
        labels: Number of labels per image, one for each square of pixels.
    """
    outputs = x_BNC.shape[1]
    if outputs == labels:
        return x_BNC
    height, width = images.shape[-2:]
    target = grid_of_squares(labels, height, width)
    if any(hasattr(module, "dynamic_feat_size") for module in model.modules()):
        grid: Grid | None = patch_grid(model, (height, width))
    else:
        # A model that shows no patches has square ones, as labels do.
        grid = grid_of_squares(outputs, height, width)
    if target is None or grid is None:
        raise ValueError(
            f"{outputs} outputs for {labels} patches: grids that differ must both be of squares that tile images of "
            f"{height} x {width} pixels"
        )
    return resized(x_BNC, grid, target)


def grid_of_squares(count: int, height: int, width: int) -> Grid | None:
    """Return rows and columns of squares that tile an image; None if this number does not."""
    rows = math.isqrt(count * height // width)
    columns = count // max(rows, 1)
    if rows * columns == count and rows * width == columns * height:
        return rows, columns
    return None
