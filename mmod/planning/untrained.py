"""Ways to make a model cheaper without training, which `mmod.advise` tries."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmod.adapters import BlockStack, find_part, find_stacks
from mmod.analysis.counting import meta_copy, pass_flops
from mmod.analysis.flop_count import Size, flops
from mmod.analysis.table import DENSE
from mmod.config import RoutingConfig
from mmod.io.configs import shipped_config
from mmod.io.yaml import read_yaml
from mmod.model import copy_of
from mmod.planning.budgets import at_budgets
from mmod.planning.candidate import Candidate
from mmod.planning.divergence import PromptBatch
from mmod.planning.schedules import drop_once, ratio_decay, stage_drop
from mmod.planning.search import search_plan

# Shares of the FLOPs that image tokens add, for which plans are searched.
_BUDGETS = (0.7, 0.5, 0.35)
_LAST = {"name": "attention", "importance": "last_token"}
# Evaluated beside the recipes that choose tokens.
_RANDOM = "random 0.5"
BEFORE_BLOCK = {"before": "block"}
"""Where tokens merge in blocks whose halves cannot run one after the other at the cost of one block."""
FASTER_SHARES = (1, 0.92, 0.85, 0.65)
"""Budgets for a wanted speed-up, as shares of what would be as fast if time fell as FLOPs do: it often falls less."""


def image_series() -> list[Candidate]:
    """Return what is made from a dense model of images at each budget, by the config `my-model`; numbers are to be fit.

    What it has without a budget is left out.
    """
    # By its path: a user may have a file of that name.
    fields = read_yaml(shipped_config("tradeoff/my-model") or "my-model")
    candidates = []
    for series, known in fields["routers"].items():
        for budget, changes in known.pop("budgets", {}).items():
            control = fields.get("controls", {}).get(series)
            candidate = Candidate(
                f"{series}-{budget:g}",
                routing={**known, **changes},
                series=series,
                budget=budget,
                control=control and f"{control}-{budget:g}",
            )
            candidates.append(candidate)
    for series, methods in fields["baselines"].items():
        for budget, method in methods.items():
            if method["kind"] == "resolution":
                # A study prepares smaller images anew, and advice resizes those of the model.
                method = {"kind": "resize", "size": method["image_size"]}
            candidates.append(Candidate(f"{series}-{budget:g}", methods=(method,), series=series, budget=budget))
    return candidates


def image_candidates(
    model: nn.Module,
    part: str,
    depth: int,
    image: Tensor,
    patch: tuple[int, int] | None,
    faster: float | None = None,
) -> tuple[list[Candidate], dict[str, str]]:
    """Return the candidates of an image model, at shares of its FLOPs, and why others are left out, by name.

    Args:
        image: An image of the size that is advised on (1, C, H, W).
        patch: Height and width of its patches in pixels; None where the model does not say.
        faster: A wanted speed-up, for which all but those at random come at other shares, see `FASTER_SHARES`.
    """
    series = image_series()
    if faster is not None:
        of_series = {one.series: dataclasses.replace(one, control=None) for one in series if not one.at_random}
        series = []
        for name, one in of_series.items():
            for budget in (round(share / faster, 2) for share in FASTER_SHARES):
                series.append(dataclasses.replace(one, name=f"{name}-{budget:g}", budget=budget))
    if attends_twice(find_part(model, part)[1]):
        series = [_before_blocks(one) for one in series]
    path, inputs, size = counted_part(model, part, image)

    # Counts need no weights, of which a first copy is free, and each further one has less to copy.
    sketch = meta_copy(model)

    def flops_of(candidate: Candidate) -> float:
        if candidate.name == DENSE:
            # Says why a model cannot be counted.
            return flops(model.get_submodule(path), size).routed
        changed = copy_of(sketch)
        candidate.apply_(changed, part, depth)
        return pass_flops(changed.get_submodule(path), inputs)

    patches = 1 if patch is None else math.prod(image.shape[2:]) // math.prod(patch)
    sizes = [] if patch is None else _smaller_sizes((image.shape[2], image.shape[3]), patch)
    candidates: list[Candidate] = []
    left_out: dict[str, str] = {}
    for one in series:
        if patch is None and one.methods:
            left_out[one.series] = "its sizes and numbers follow from the patches, and the model shows no grid of them"
        else:
            candidates.append(one)
    fitted, unfitted = at_budgets(candidates, flops_of, sizes, patches, strict=False)
    # Its cost follows from the images, so that no budget is fitted.
    pixelprune = Candidate("pixelprune", routing={"preset": "pixelprune"})
    return [*fitted, pixelprune], left_out | unfitted


def attends_twice(stack: BlockStack) -> bool:
    """Return whether what is decided between attention and MLP runs the attention of most blocks twice, or has none."""
    calls = [stack.call_of(block, None) for block in stack.blocks]
    twice = [call for call in calls if call.halves is None or call.halves.attends_twice]
    return 2 * len(twice) >= len(calls)


def _before_blocks(candidate: Candidate) -> Candidate:
    """Return a candidate that merges tokens before blocks, where it would between attention and MLP."""
    if candidate.routing is None or candidate.routing.get("preset") != "gradual":
        return candidate
    return dataclasses.replace(candidate, routing={**candidate.routing, "skipped": BEFORE_BLOCK})


def counted_part(model: nn.Module, part: str, image: Tensor) -> tuple[str, Mapping[str, Tensor], Size]:
    """Return what is counted of a dense model for an image: a module's path, its inputs, and what `flops` takes.

    Args:
        image: One image (1, C, H, W).
    """
    is_only = len(find_stacks(model)) <= 1
    inputs = {"image" if is_only else part: image.to("meta", next(model.parameters()).dtype)}
    _, channels, height, width = image.shape
    size: Size = (channels, height, width) if is_only else inputs
    # A model of transformers that reads texts too, of which no method here changes a thing.
    if hasattr(model, "get_image_features"):
        # Here, because importing it needs transformers.
        from mmod.adapters.transformers.vision import find_tower

        tower = find_tower(model, find_part(model, part)[1].block_list)
        if tower is not None:
            return tower[0], inputs, size
    return "", inputs, size


def _smaller_sizes(size: tuple[int, int], patch: tuple[int, int]) -> list[object]:
    """Return smaller sizes in whole patches, the smallest first: one side of square images, or height and width."""
    rows, columns = size[0] // patch[0], size[1] // patch[1]
    sizes: list[object] = []
    for fewer in range(1, rows):
        height, width = patch[0] * fewer, patch[1] * max(1, round(columns * fewer / rows))
        sizes.append(height if size[0] == size[1] and height == width else (height, width))
    return sizes


def language_candidates(
    model: nn.Module, part: str, depth: int, batches: Iterable[PromptBatch], store: Path | None
) -> list[Candidate]:
    """Return the candidates of a language model that reads images.

    Args:
        batches: Prompts on which plans are searched.
        store: File that keeps the scores of the search, see `search_plan`.
    """
    # One search: plans for other budgets follow from the same scores.
    search = search_plan(model, batches, _BUDGETS[0], part=part, cost="image_flops", router=_LAST, store=store)
    least = search.costs.least_share
    plans = {f"searched {budget:g}": search.plan_for(budget) for budget in _BUDGETS if budget >= least}
    plans |= {"as p-MoD": ratio_decay(depth), "as PyramidDrop": stage_drop(depth), "as FastV": drop_once(depth)}
    # Only FastV keeps as many tokens in the same blocks as random ones do.
    controls = {"as FastV": _RANDOM}
    candidates = [_planned(name, plan, _LAST, controls.get(name)) for name, plan in plans.items()]
    candidates.append(_planned(_RANDOM, drop_once(depth), "random"))
    candidates += [
        Candidate(f"evenly-spread-{keep:g}", routing={"preset": "evenly-spread", "capacity": keep})
        for keep in (0.5, 0.25)
    ]
    candidates.append(Candidate("pixelprune", routing={"preset": "pixelprune-language"}))
    for first in sorted({depth // 2, 3 * depth // 4}):
        frozen = {"blocks": tuple(range(first, depth)), "capacity": 0, "context": "all"}
        candidates.append(Candidate(f"frozen after {first}", routing=frozen))
    return candidates


def smaller_images(
    model: Any, batches: Sequence[PromptBatch], limits: Mapping[str, int] | None
) -> tuple[list[Candidate], dict[str, str]]:
    """Return candidates that read smaller images, by the share of patches or pixels, and why there are none.

    Args:
        batches: Prompts with the images as they are read today.
        limits: Fewest and most pixels of an image, where the processor limits them.
    """
    grids = [batch["image_grid_thw"] for batch in batches if batch.get("image_grid_thw") is not None]
    if limits is None:
        candidates = _smaller_sides(model)
        reason = "the model reads images of any size, and its processor has no limit of their pixels"
    elif grids:
        candidates = _fewer_pixels(torch.cat(grids).prod(1) * model.config.vision_config.patch_size**2, limits)
        reason = ""
    else:
        candidates = []
        reason = "no prompt has an image_grid_thw, from which the pixels of images follow"
    return candidates, {} if candidates else {"smaller images": reason}


def _fewer_pixels(pixels_I: Tensor, limits: Mapping[str, int]) -> list[Candidate]:
    """Return candidates whose images have shares of their pixels (I: images) in all, of which small ones lose none."""
    candidates = []
    for share in _BUDGETS:
        most = _level(sorted(pixels_I.tolist()), share)
        # Small images would else be enlarged beyond the limit of large ones.
        size = {"shortest_edge": min(limits["shortest_edge"], most), "longest_edge": most}
        name = f"fewer-pixels-{share:g}"
        candidates.append(Candidate(name, image_size=size, series="fewer-pixels", budget=share))
    return candidates


def _level(values: Sequence[int], share: float) -> int:
    """Return the level to which the largest of ascending values are cut, so that a share of the sum remains."""
    remaining = share * sum(values)
    for number, value in enumerate(values):
        level = remaining / (len(values) - number)
        if level <= value:
            return int(level)
        remaining -= value
    return values[-1]


def _smaller_sides(model: nn.Module) -> list[Candidate]:
    """Return candidates that read images of smaller sides; none for images of any size."""
    vision = getattr(model.config, "vision_config", None)
    size, patch = getattr(vision, "image_size", None), getattr(vision, "patch_size", None)
    if not isinstance(size, int) or not isinstance(patch, int):
        return []
    whole = size // patch
    # The share of patches is that of a side, squared.
    rows = dict.fromkeys(round(whole * math.sqrt(budget)) for budget in _BUDGETS)
    candidates = []
    for fewer in (number for number in rows if 0 < number < whole):
        share = (fewer / whole) ** 2
        candidates.append(
            Candidate(
                f"smaller-image-{share:.2g}",
                image_size=patch * fewer,
                series="smaller-image",
                budget=share,
            )
        )
    return candidates


def _planned(name: str, plan: RoutingConfig, router: object, control: str | None = None) -> Candidate:
    config = plan.replace(router=router)
    routing = {"router": router, "blocks": plan.blocks, "capacity": plan.capacity}
    # Only what differs from the defaults, so that the line to copy is short.
    if config.operator != "block":
        routing["operator"] = config.operator
    if config.context != "kept":
        routing["context"] = config.context
    return Candidate(name, routing=routing, control=control)
