"""Ways to make a model cheaper without training, which `mmod.advise` tries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mmod.adapters import BlockStack, find_stacks
from mmod.analysis.flops import flops
from mmod.config import RoutingConfig
from mmod.planning.budgets import fitted, named_by_share
from mmod.planning.candidate import Candidate, copy_of
from mmod.planning.options import FIT
from mmod.planning.schedules import drop_once, ratio_decay, stage_drop
from mmod.planning.search import search_plan

# Shares of the FLOPs that image tokens add, for which plans are searched.
_BUDGETS = (0.7, 0.5, 0.35)
_LAST = {"name": "attention", "importance": "last_token"}


def image_candidates(stack: BlockStack, size: tuple[int, int], patch: tuple[int, int] | None) -> list[Candidate]:
    """Return the candidates of an image model.

    Args:
        size: Height and width of its images in pixels.
        patch: Height and width of its patches in pixels; None where the model does not say.
    """
    depth = len(stack.blocks)
    candidates = [
        Candidate(f"gradual {mean:g}", routing={"preset": "gradual", "mean": mean}) for mean in (0.8, 0.7, 0.6, 0.5)
    ]
    merge = {"router": "attention", "skipped": "merge", "blocks": "late"}
    candidates += [
        Candidate(f"merge late {capacity:g}", routing={**merge, "capacity": capacity}) for capacity in (0.7, 0.5)
    ]
    candidates += [
        Candidate(f"a-mod {capacity:g}", routing={"preset": "a-mod", "capacity": capacity}) for capacity in (0.75, 0.5)
    ]
    candidates.append(Candidate("random 0.5", routing={"router": "random", "capacity": 0.5}))
    candidates.append(Candidate("pixelprune", routing={"preset": "pixelprune"}))
    if patch is None:
        return candidates
    grid = (size[0] // patch[0], size[1] // patch[1])
    smaller = {(round(grid[0] * share), round(grid[1] * share)) for share in (0.875, 0.75, 0.625)}
    for rows, columns in sorted(smaller, reverse=True):
        if 0 < rows < grid[0] and 0 < columns < grid[1]:
            candidates.append(_smaller(size, (patch[0] * rows, patch[1] * columns)))
    for r in sorted({max(1, round(math.prod(grid) * share / depth)) for share in (0.5, 0.75)}):
        advice = f"merge {r} tokens in each block, as in ToMe"
        candidates.append(Candidate(f"ToMe r={r}", methods=({"kind": "merge", "r": r},), advice=advice))
    blocks = tuple(sorted({max(1, depth * quarter // 4) for quarter in (1, 2, 3)}))
    for keep in (0.8, 0.6):
        prune = {"kind": "prune", "keep": keep, "blocks": blocks}
        candidates.append(Candidate(f"prune {keep:g}", methods=(prune,)))
    return candidates


def faster_candidates(
    model: nn.Module, part: str, depth: int, image: Tensor, patch: tuple[int, int] | None, faster: float
) -> tuple[list[Candidate], dict[str, str]]:
    """Return few candidates of about the FLOPs at which a model may be faster by a factor, and why others are refused.

    Each kind comes at two shares of the dense FLOPs: that of the factor, and a tenth less, as time falls less than
    FLOPs.

    Args:
        image: An image of the size that is advised on (1, C, H, W).
        patch: See `image_candidates`.
    """
    size: Any = {part: image} if len(find_stacks(model)) > 1 else tuple(image.shape[1:])
    whole = flops(model, size).routed

    def share_of(candidate: Candidate) -> float | None:
        changed = copy_of(model)
        candidate.apply_(changed, part, depth)
        return flops(changed, size).routed / whole

    sides: list[int] = []
    patches = 1
    if patch is not None:
        patches = math.prod(image.shape[2:]) // math.prod(patch)
        if len({*image.shape[2:]}) == len({*patch}) == 1:
            sides = [patch[0] * count for count in range(1, image.shape[3] // patch[0])]
    merge = {"router": "attention", "skipped": "merge", "blocks": "late", "capacity": FIT}
    kinds: dict[str, dict[str, Any]] = {
        "gradual": {"routing": {"preset": "gradual", "capacity": FIT}},
        "merge late": {"routing": merge},
        "evenly spread": {"routing": {"router": "stride", "blocks": "late", "capacity": FIT}},
        "smaller-image": {"methods": ({"kind": "resize", "size": FIT},)},
    }
    candidates: list[Candidate] = []
    refused: dict[str, str] = {}
    for name, fields in kinds.items():
        for share in (1 / faster, 0.9 / faster):
            fitting = Candidate(f"{name}-{share:.2f}", series=name, budget=round(share, 2), **fields)
            try:
                candidates.append(fitted(fitting, share_of, sides, patches))
            except ValueError as refusal:
                refused[fitting.name] = str(refusal)
    return named_by_share(candidates, share_of), refused


def _smaller(size: tuple[int, int], resized: tuple[int, int]) -> Candidate:
    """Return the candidate of smaller images: one side for square ones, height and width for others."""
    height, width = resized
    if size[0] == size[1] and height == width:
        resize: dict[str, Any] = {"kind": "resize", "size": height}
        return Candidate(f"images of {height} px", methods=(resize,), advice=f"use images of {height} px")
    name = f"images of {height} x {width} px"
    return Candidate(name, methods=({"kind": "resize", "size": resized},), advice=f"use {name}")


def language_candidates(
    model: nn.Module, part: str, depth: int, batches: Sequence[Mapping[str, Any]], store: Path | None
) -> list[Candidate]:
    """Return the candidates of a language model that reads images.

    Args:
        batches: Prompts on which plans are searched.
        store: File that keeps the scores of the search, see `search_plan`.
    """
    search = search_plan(model, batches, _BUDGETS[0], part=part, cost="image_flops", router=_LAST, store=store)
    least = search.costs.least_share
    plans = {f"searched {budget:g}": search.plan_for(budget) for budget in _BUDGETS if budget >= least}
    plans |= {"as p-MoD": ratio_decay(depth), "as PyramidDrop": stage_drop(depth), "as FastV": drop_once(depth)}
    candidates = [_planned(name, plan, _LAST) for name, plan in plans.items()]
    candidates.append(_planned("random 0.5", drop_once(depth), "random"))
    candidates += [
        Candidate(f"evenly spread {keep:g}", routing={"preset": "evenly-spread", "capacity": keep})
        for keep in (0.5, 0.25)
    ]
    candidates.append(Candidate("pixelprune", routing={"preset": "pixelprune-language"}))
    for first in sorted({depth // 2, 3 * depth // 4}):
        frozen = {"blocks": tuple(range(first, depth)), "capacity": 0, "context": "all"}
        candidates.append(Candidate(f"frozen after {first}", routing=frozen))
    return candidates


def _planned(name: str, plan: RoutingConfig, router: Any) -> Candidate:
    config = plan.replace(router=router)
    routing = {"router": router, "blocks": plan.blocks, "capacity": plan.capacity}
    # Only what differs from the defaults, so that the line to copy is short.
    if config.operator != "block":
        routing["operator"] = config.operator
    if config.context != "kept":
        routing["context"] = config.context
    return Candidate(name, routing=routing)
