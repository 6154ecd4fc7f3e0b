"""Ways to make a model cheaper without training, as `mmod.advise` tries them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from mmod.adapters import BlockStack
from mmod.config import Plan, RoutingConfig
from mmod.model import apply_, route_
from mmod.planning.presets import preset
from mmod.planning.schedules import drop_once, ratio_decay, stage_drop
from mmod.planning.search import search_plan

# The part of a model that has no other.
ONLY = "image"
# Shares of the FLOPs that image tokens add, for which plans are searched.
_BUDGETS = (0.7, 0.5, 0.35)
_LAST = {"name": "attention", "importance": "last_token"}


class Recipe(NamedTuple):
    """A way to make a model cheaper without training.

    Args:
        options: What `mmod.route_` or `mmod.apply_` takes: fields of a preset, of a routing config or of a method.
        advice: What to do, as an English imperative.
    """

    name: str
    options: Mapping[str, Any]
    advice: str = ""

    def apply_(self, model: nn.Module, part: str, depth: int) -> None:
        """Change a model in place."""
        options = dict(self.options)
        if "preset" in options:
            route_(model, **{part: preset(options.pop("preset"), depth, **options)})
        elif "kind" in options:
            apply_(model, options)
        else:
            route_(model, **{part: RoutingConfig(**options)})

    def config(self, part: str, depth: int) -> str:
        """Return the key of a training config that applies it."""
        options = {"depth": depth, **self.options} if "preset" in self.options else dict(self.options)
        if "kind" in options:
            return f"methods: {json.dumps([options])}"
        return f"routing: {json.dumps(options if part == ONLY else {part: options})}"

    def code(self, part: str, depth: int) -> str:
        """Return the line of Python that applies it."""
        options = dict(self.options)
        if "kind" in options:
            kind = str(options.pop("kind")).capitalize()
            return f"mmod.apply_(model, mmod.methods.{kind}({_arguments(options)}))"
        if "preset" in options:
            name = options.pop("preset")
            config = f"mmod.preset({name!r}, {_arguments({'depth': depth, **options})})"
        else:
            config = f"mmod.RoutingConfig({_arguments(options)})"
        return f"mmod.route_(model, {part}={config})"


def _arguments(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def image_recipes(stack: BlockStack, side: int, patch: int | None) -> list[Recipe]:
    """Return the recipes that `advise` tries on an image model."""
    depth = len(stack.blocks)
    recipes = [Recipe(f"gradual {mean:g}", {"preset": "gradual", "mean": mean}) for mean in (0.8, 0.7, 0.6, 0.5)]
    merge = {"router": "attention", "skipped": "merge", "blocks": "late"}
    recipes += [Recipe(f"merge late {share:g}", {**merge, "capacity": share}) for share in (0.7, 0.5)]
    recipes += [Recipe(f"a-mod {share:g}", {"preset": "a-mod", "capacity": share}) for share in (0.75, 0.5)]
    recipes.append(Recipe("random 0.5", {"router": "random", "capacity": 0.5}))
    if patch is not None:
        grid = side // patch
        sizes = sorted({patch * round(grid * share) for share in (0.875, 0.75, 0.625)}, reverse=True)
        recipes += [
            Recipe(f"images of {size} px", {"kind": "resize", "size": size}, f"use images of {size} px")
            for size in sizes
            if 0 < size < side
        ]
        tokens = grid**2
        recipes += [
            Recipe(f"ToMe r={r}", {"kind": "merge", "r": r}, f"merge {r} tokens in each block, as in ToMe")
            for r in sorted({max(1, round(tokens * share / depth)) for share in (0.5, 0.75)})
        ]
        blocks = tuple(sorted({max(1, depth * quarter // 4) for quarter in (1, 2, 3)}))
        recipes += [Recipe(f"prune {keep:g}", {"kind": "prune", "keep": keep, "blocks": blocks}) for keep in (0.8, 0.6)]
    return recipes


def language_recipes(
    model: nn.Module, part: str, depth: int, batches: Sequence[Mapping[str, Any]], folder: Path | None
) -> list[Recipe]:
    """Return the recipes that `advise` tries on a language model that reads images.

    Args:
        batches: Prompts on which plans are searched.
        folder: Keeps the scores of the search, with which it resumes.
    """
    scores = None if folder is None else folder / "search.jsonl"
    search = search_plan(model, batches, _BUDGETS[0], part=part, cost="image_flops", router=_LAST, progress_file=scores)
    least = search.costs.least_share
    plans = {f"searched {budget:g}": search.plan_for(budget) for budget in _BUDGETS if budget >= least}
    schedules = {"as p-MoD": ratio_decay(depth), "as PyramidDrop": stage_drop(depth), "as FastV": drop_once(depth)}
    recipes = [_planned(name, plan, _LAST) for name, plan in (plans | schedules).items()]
    recipes.append(_planned("random 0.5", drop_once(depth), "random"))
    recipes += [
        Recipe(f"frozen after {first}", {"blocks": tuple(range(first, depth)), "capacity": 0, "context": "all"})
        for first in sorted({depth // 2, 3 * depth // 4})
    ]
    return recipes


def _planned(name: str, plan: Plan, router: Any) -> Recipe:
    config = RoutingConfig.from_plan(plan, router=router)
    ways = {} if config.operator == "block" else {"operator": config.operator}
    ways |= {} if config.context == "kept" else {"context": config.context}
    return Recipe(name, {"router": router, "blocks": plan.blocks, "capacity": plan.capacities, **ways})
