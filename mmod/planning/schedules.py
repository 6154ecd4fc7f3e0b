"""Capacity as a function of depth."""

from __future__ import annotations

import math

from mmod.config import Plan
from mmod.values import one_of

SHAPES = ("cosine", "linear")


def ratio_decay(
    depth: int, *, shift: float = 0.5, ceiling: float = 0.85, floor: float = 0.15, shape: str = "cosine"
) -> Plan:
    """Return the progressive ratio decay of p-MoD: full capacity early, little late.

    Block l of L keeps `0.5 cos(pi l / (L - 1)) + shift`; above `ceiling` it stays dense, below `floor` it keeps
    `floor`. The "linear" shape is `0.5 - l / (L - 1) + shift`.

    Args:
        depth: Number of blocks L, at least 2.
        shift: Mean capacity before clipping.
        ceiling: Blocks above this capacity stay dense.
        floor: Least capacity.
        shape: "cosine" or "linear".

    Raises:
        ValueError: A depth below 2, bounds that are no capacities, or no routed block left.

    Source: p-MoD, arXiv 2412.04449, and its released code (`shiftedcos_decay_0.85_0.15`).

    Example:
        >>> plan = ratio_decay(32)
        >>> plan.blocks[0], round(plan.mean_capacity, 4)
        (8, 0.5375)
    """
    one_of("shape", shape, SHAPES)
    if depth < 2:
        raise ValueError(f"a decay needs at least 2 blocks, got depth {depth}")
    if not 0 < floor <= ceiling <= 1:
        raise ValueError(f"floor and ceiling must satisfy 0 < floor <= ceiling <= 1, got {floor} and {ceiling}")
    blocks, capacities = [], []
    for block in range(depth):
        place = block / (depth - 1)
        ratio = (0.5 * math.cos(math.pi * place) if shape == "cosine" else 0.5 - place) + shift
        if ratio <= ceiling:
            blocks.append(block)
            capacities.append(round(min(1.0, max(floor, ratio)), 6))
    return Plan(blocks=tuple(blocks), capacities=tuple(capacities), depth=depth)
