"""Routing configs with capacity as a function of depth, and those of training-free methods."""

from __future__ import annotations

import math

from mmod.config import RoutingConfig
from mmod.config.plan import DEPTH
from mmod.values import check_value, one_of

SHAPES = ("cosine", "linear")


def ratio_decay(
    depth: int, *, shift: float = 0.5, ceiling: float = 0.85, floor: float = 0.15, shape: str = "cosine"
) -> RoutingConfig:
    """Return the progressive ratio decay of p-MoD: full capacity in early blocks, low capacity in late ones.

    Block l of L keeps `0.5 cos(pi l / (L - 1)) + shift`. Above `ceiling` it stays dense; below `floor` it keeps
    `floor`. The "linear" shape is `0.5 - l / (L - 1) + shift`.

    Args:
        depth: Number of blocks L, at least 2.
        shift: Mean capacity before clipping.

    Source: p-MoD, arXiv 2412.04449, and its released code (`shiftedcos_decay_0.85_0.15`).

    Example:
        >>> plan = ratio_decay(32)
        >>> plan.blocks[0], round(plan.mean_capacity, 4)
        (8, 0.5375)
    """
    one_of("shape", shape, SHAPES)
    check_value("depth", depth, int, DEPTH)
    for name, value in (("shift", shift), ("ceiling", ceiling), ("floor", floor)):
        check_value(name, value, float)
    if depth < 2:
        raise ValueError(f"a decay needs at least 2 blocks, got depth {depth}")
    if not 0 < floor <= ceiling <= 1:
        raise ValueError(f"floor and ceiling must satisfy 0 < floor <= ceiling <= 1, got {floor} and {ceiling}")
    blocks = []
    capacities = []
    for block in range(depth):
        depth_share = block / (depth - 1)
        ratio = (0.5 * math.cos(math.pi * depth_share) if shape == "cosine" else 0.5 - depth_share) + shift
        # Above it, a block would pay for a decision that saves hardly a token.
        if ratio <= ceiling:
            blocks.append(block)
            capacities.append(round(min(1.0, max(floor, ratio)), 6))
    return RoutingConfig(blocks=tuple(blocks), capacity=tuple(capacities), depth=depth)


def stage_drop(depth: int, *, stages: int = 4, keep: float = 0.5) -> RoutingConfig:
    """Return the plan of PyramidDrop: tokens are dropped at the end of every stage.

    Blocks of stage s of S, counted from 0, keep `keep ** s`; the first stage is dense. With a router that blocks share,
    such as "attention" or "diversity", a token that is skipped once is skipped in every later block. Two differences to
    the source: dropped tokens remain in the model's output, and tokens are ranked once, at the end of the first stage.

    Args:
        depth: Number of blocks, at least as many as stages.
        stages: Number of stages S, at least 2.
        keep: Share of tokens kept from one stage to the next, in (0, 1).

    Source: PyramidDrop, Xing et al., arXiv 2410.17247, section 3.2 (four stages, keep=0.5).

    Example:
        >>> plan = stage_drop(8)
        >>> plan.blocks, plan.capacity
        ((2, 3, 4, 5, 6, 7), (0.5, 0.5, 0.25, 0.25, 0.125, 0.125))
    """
    check_value("depth", depth, int, DEPTH)
    check_value("stages", stages, int, f"[2, {depth}]")
    check_value("keep", keep, float, "(0, 1)")
    # As equal as whole blocks allow.
    stage_of = [block * stages // depth for block in range(depth)]
    blocks = tuple(block for block in range(depth) if stage_of[block])
    capacities = tuple(round(keep ** stage_of[block], 6) for block in blocks)
    return RoutingConfig(blocks=blocks, capacity=capacities, depth=depth)


def drop_once(depth: int, *, after: int = 2, keep: float = 0.5) -> RoutingConfig:
    """Return the plan of FastV: all blocks after the first few keep the same share of the tokens.

    With the router "attention" the routed blocks share the importance of the last dense block, so they keep the same
    tokens. `mmod.score("attention", importance="last_token")` reads the query of the last token alone, as the source
    does.

    Args:
        depth: Number of blocks.
        after: Number of dense blocks at the start; 0 works only with a score that reads no attention.
        keep: Share of tokens kept, in (0, 1).

    Source: FastV, Chen et al., arXiv 2403.06764, section 4 (after=2, keep=0.5).

    Example:
        >>> drop_once(6).blocks
        (2, 3, 4, 5)
    """
    check_value("depth", depth, int, DEPTH)
    _check_first("after", after, depth)
    check_value("keep", keep, float, "(0, 1)")
    return RoutingConfig(blocks=tuple(range(after, depth)), capacity=(keep,) * (depth - after), depth=depth)


def falling(depth: int, mean: float = 0.6, *, steps: int = 5, start: int = 1) -> RoutingConfig:
    """Return a plan whose capacity falls in a few equal steps, from the second block on or a later one.

    Blocks of step s of S, counted from 1, keep `1 - 2 s (1 - mean) / (S + 1)`. Every step takes a routing decision,
    which costs time, so a few steps are faster than one per block.

    Args:
        depth: Number of blocks.
        mean: Mean capacity of the routed blocks, if all steps have the same length.
        steps: Number of steps S, at most as many as routed blocks.
        start: First routed block; those before it stay dense.

    Example:
        >>> plan = falling(11, 0.6)
        >>> plan.blocks[0], plan.capacity[::2]
        (1, (0.866667, 0.733333, 0.6, 0.466667, 0.333333))
    """
    check_value("depth", depth, int, DEPTH)
    _check_first("start", start, depth)
    check_value("steps", steps, int, f"[1, {depth - start}]")
    # The last of equal steps must still keep a token.
    check_value("mean", mean, float, f"({(steps - 1) / (2 * steps):g}, 1]")
    # Equal steps below 1, whose mean is the one that is asked for.
    fall = 2 * (1 - mean) / (steps + 1)
    blocks = tuple(range(start, depth))
    capacities = tuple(round(1 - fall * (1 + (block - start) * steps // len(blocks)), 6) for block in blocks)
    return RoutingConfig(blocks=blocks, capacity=capacities, depth=depth)


def _check_first(name: str, block: int, depth: int) -> None:
    """Raise a ValueError if a model has no block from the first routed one on; most callers give its depth alone."""
    check_value(name, block, int, "[0, inf)")
    if block >= depth:
        raise ValueError(f"{name}={block} keeps all blocks dense: depth must be at least {block + 1}, got {depth}")
