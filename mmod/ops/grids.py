"""Outputs for a grid of patches, interpolated to another grid."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor


def resized(x_BNC: Tensor, grid: tuple[int, int], asked: tuple[int, int]) -> Tensor:
    """Interpolate a grid of logits or features (B, N, C), row by row, to other rows and columns.

    Raises:
        ValueError: The grid has another number of patches.

    Example:
        >>> import torch
        >>> resized(torch.arange(8.0).view(1, 8, 1), (2, 4), (4, 8)).shape
        torch.Size([1, 32, 1])
    """
    if grid == asked:
        return x_BNC
    if math.prod(grid) != x_BNC.shape[1]:
        raise ValueError(f"{x_BNC.shape[1]} outputs are no grid of {grid[0]} x {grid[1]} patches")
    x_BCHW = x_BNC.transpose(1, 2).unflatten(2, grid)
    return F.interpolate(x_BCHW, size=asked, mode="bilinear").flatten(2).transpose(1, 2)
