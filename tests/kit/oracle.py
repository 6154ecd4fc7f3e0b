"""Slow definitions of routing, as a forward pass that tests compare models with, of duplicate patches, and of max-min
selection."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn

from mmod.benchmarks.oracle import ImageLoop


def reference_forward(model: nn.Module, images: Tensor) -> Tensor:
    """Run a routed timm model by its definition; gradients reach the model's parameters."""
    loop = ImageLoop(model)
    return torch.cat([loop.run(image)[0] for image in images.split(1)])


def duplicates_by_loop(
    pixels_RCHE: Tensor, tolerance: float, cell: int | None, levels: tuple[float, ...]
) -> tuple[list[float], list[int]]:
    """Return, patch by patch of a picture, the difference to the patch that stands for it, and that patch.

    Args:
        pixels_RCHE: Pixels in float64: R rows and C columns of patches, H channels of E pixels.
        levels: Grey levels of a unit of each channel.
    """
    rows, columns = pixels_RCHE.shape[:2]
    side = max(rows, columns) if cell is None else cell
    differences: list[float] = []
    stands: list[int] = []
    for row, column in itertools.product(range(rows), range(columns)):
        differences.append(256.0 if row % side == column % side == 0 else 255.0)
        stands.append(row * columns + column)
        nearest = math.inf
        joined = stands[-1]
        for up, left in ((0, 1), (1, 0), (1, 1)):
            if row % side < up or column % side < left:
                continue
            other = stands[(row - up) * columns + column - left]
            apart_H = (pixels_RCHE[row, column] - pixels_RCHE[other // columns, other % columns]).abs().amax(dim=1)
            apart = max(float(value) * level for value, level in zip(apart_H, levels))
            if apart < nearest:
                nearest = apart
                joined = other
        differences[-1] = min(differences[-1], nearest)
        # Pixels in fp32 are exact to a fraction of a level.
        if nearest <= tolerance + (tolerance > 0) / 64:
            stands[-1] = joined
    return differences, stands


def max_min_order(x_ND: Tensor, weight_N: Tensor) -> list[int]:
    """Return the tokens in the order in which max-min selection takes them."""
    unit = torch.nn.functional.normalize(x_ND.double(), dim=-1)
    far = 1 - unit @ unit.T
    taken: list[int] = []
    for _ in range(len(x_ND)):
        value = {}
        for one in set(range(len(x_ND))) - set(taken):
            others = taken or [other for other in range(len(x_ND)) if other != one]
            value[one] = float(weight_N[one] * min(far[one, other] for other in others))
        taken.append(max(value, key=value.__getitem__))
    return taken
