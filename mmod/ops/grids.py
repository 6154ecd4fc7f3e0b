"""Outputs for a square grid of patches, interpolated to another number of patches."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor


def resized(x_BNC: Tensor, patches: int) -> Tensor:
    """Interpolate a square grid of logits or features (B, N, C), row by row, to another number of patches.

    Example:
        >>> import torch
        >>> resized(torch.arange(4.0).view(1, 4, 1), 16).shape
        torch.Size([1, 16, 1])
    """
    if x_BNC.shape[1] == patches:
        return x_BNC
    old_side = math.isqrt(x_BNC.shape[1])
    new_side = math.isqrt(patches)
    if old_side**2 != x_BNC.shape[1] or new_side**2 != patches:
        raise ValueError(f"{x_BNC.shape[1]} outputs for {patches} patches: grids that differ must both be square")
    grid = x_BNC.transpose(1, 2).unflatten(2, (old_side, old_side))
    return F.interpolate(grid, size=(new_side, new_side), mode="bilinear").flatten(2).transpose(1, 2)
