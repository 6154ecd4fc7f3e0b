"""Which way of saving compute pays for a model, measured on its images. N: images, R: rows of outputs, F: features."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mmod.adapters import BlockStack, find_part
from mmod.analysis.modes import in_mode
from mmod.analysis.redundancy import redundancy
from mmod.analysis.statistics import Estimate, estimate_of, resampled_means
from mmod.analysis.timing import interleave, ratios
from mmod.config import RoutingConfig
from mmod.io.journal import Journal
from mmod.io.progress import progress_bar
from mmod.methods.base import methods_of
from mmod.model import apply_, route_
from mmod.planning.advice import AGREEMENT, Advice, RecipeResult
from mmod.planning.divergence import outputs, resized
from mmod.planning.presets import preset
from mmod.values import check_value

DENSE = "dense"
# The part of a model that has no other.
ONLY = "image"
ROUNDS = 5
# Images of the first look at all recipes; the others are run for recipes near the front.
FIRST_LOOK = 64
# A recipe is dropped after the first look if another one is as fast and agrees more by this share.
SLACK = 0.02
_AT_ONCE = 32
_DRAWS = 2000


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


def default_recipes(stack: BlockStack, side: int, patch: int | None) -> list[Recipe]:
    """Return the recipes that `advise` tries."""
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


def advise(
    model: nn.Module,
    batches: Iterable[Tensor | Sequence[Tensor]],
    *,
    part: str | None = None,
    images: int = 256,
    batch_size: int = 8,
    tolerance: float = 0.02,
    recipes: Sequence[Recipe] | None = None,
    folder: str | Path | None = None,
    note: str = "",
    progress: bool = True,
) -> Advice:
    """Try recipes that need no training and say which one pays on these images and this machine.

    All recipes run on the first 64 images and are timed in turns; those near the Pareto front run on all images. A
    model with a head is judged by how often its top class is the dense model's, another one by the cosine of features,
    and one with an output per patch (`global_pool=""`) by the cosine of its patches. Where batches have labels, the
    change of accuracy decides.

    Args:
        model: A dense image model of timm, or a CLIP model of open_clip; it runs in evaluation mode and is unchanged.
        batches: Images (B, C, H, W), or pairs of images and labels (B,), such as a loader; preprocessed for the model.
        part: The part to make cheaper; None takes "image" where there are several.
        images: Number of images, the first of the batches.
        batch_size: Images of a timed batch.
        tolerance: Share of agreement, or of accuracy, that may be lost, in [0, 1).
        recipes: What to try; None takes `default_recipes`: gradual and late merging, a-mod and random routing, smaller
            images, ToMe and pruning.
        folder: Write `advice.json`, `advice.md` and `advice.png` here, and `journal.jsonl`, with which the same call
            resumes. None writes nothing.
        note: A sentence about the data, for the report.
        progress: Show a bar.

    Raises:
        TypeError: A batch that is no tensor.
        ValueError: The model is changed already or cannot be routed, there are no images, or the folder belongs to
            another model or other images.

    Example:
        >>> import timm, torch
        >>> model = timm.create_model("test_vit", dynamic_img_size=True)
        >>> advice = advise(model, [torch.randn(4, 3, 160, 160)], batch_size=2, progress=False)
        >>> len(advice.rows), advice.rows[0].speedup.median >= advice.rows[-1].speedup.median
        (16, True)
    """
    check_value("images", images, int, "[1, inf)")
    check_value("batch_size", batch_size, int, "[1, inf)")
    check_value("tolerance", tolerance, float, "[0, 1)")
    if methods_of(model):
        raise ValueError(f"this {type(model).__name__} is changed already: call mmod.undo_ first")
    part, stack = _image_part(model, part)
    pixels, labels = _first_images(batches, images)
    sides = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    patch = sides[0] if isinstance(sides, tuple) else None
    if recipes is None:
        recipes = default_recipes(stack, pixels.shape[-1], patch)
    depth = len(stack.blocks)
    with in_mode(False, model), torch.no_grad():
        trials = _Trials(model, part, stack.prefix, pixels, labels, batch_size)
        trials.prepare(recipes, depth)
        identity = {
            "model": type(model).__name__, "images": len(pixels), "batch_size": batch_size, "part": part,
            "recipes": {name: recipe.code(part, 0) for name, recipe in trials.recipes.items()},
            "outputs": f"{float(trials.dense_NRF.double().abs().mean()):.6e}",
        }  # fmt: skip
        journal = Journal(None if folder is None else Path(folder) / "journal.jsonl", identity, "advice")
        trials.run(journal, progress)
    advice = Advice(
        tuple(trials.rows(depth)),
        trials.refused,
        trials.measure,
        None if trials.labels is None else float(trials.correct[DENSE].mean()),
        float(np.median(trials.times[DENSE])),
        batch_size,
        len(pixels),
        tolerance,
        None if patch is None else redundancy(pixels, patch),
        note,
    )
    if folder is not None:
        advice.save(folder)
    return advice


def _image_part(model: nn.Module, part: str | None) -> tuple[str, BlockStack]:
    try:
        part, stack = find_part(model, part)
    except ValueError:
        if part is not None:
            raise
        part, stack = find_part(model, "image")
    if stack.language or part == "text":
        raise ValueError(f"advice is for image models, and {stack.names[0]} reads text: use mmod.search_plan")
    return part, stack


def _first_images(batches: Iterable[Any], images: int) -> tuple[Tensor, Tensor | None]:
    pixels: list[Tensor] = []
    labels: list[Tensor] = []
    for batch in batches:
        x, *more = batch if isinstance(batch, (tuple, list)) else (batch,)
        if not isinstance(x, Tensor) or x.ndim != 4:
            raise TypeError(f"batches must hold images (B, C, H, W), or pairs of images and labels, got {type(x)}")
        pixels.append(x)
        labels += more[:1]
        if sum(map(len, pixels)) >= images:
            break
    if not sum(map(len, pixels)):
        raise ValueError("no images: batches is empty")
    together = torch.cat(pixels)[:images]
    return together, torch.cat(labels)[:images] if len(labels) == len(pixels) else None


@dataclass
class _Trials:
    """Runs the dense model and the changed ones on the same images."""

    model: nn.Module
    part: str
    prefix: int
    pixels: Tensor
    labels: Tensor | None
    batch_size: int
    recipes: dict[str, Recipe] = field(default_factory=dict)
    models: dict[str, nn.Module] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    scores: dict[str, np.ndarray] = field(default_factory=dict)
    correct: dict[str, np.ndarray] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device
        has_classes = self.part == ONLY and getattr(self.model, "num_classes", 0) > 0
        self.dense_NRF = self._outputs(self.model, 0, len(self.pixels))
        patches = self.dense_NRF.shape[1] > 1
        self.measure = AGREEMENT if has_classes and not patches else f"cosine of {'patches' if patches else 'features'}"
        if self.measure != AGREEMENT:
            self.labels = None
        self.scores[DENSE], self.correct[DENSE] = self._judge(self.dense_NRF, 0)

    def prepare(self, recipes: Sequence[Recipe], depth: int) -> None:
        """Change a copy of the model, with the same weights, for every recipe; remember why one cannot be applied."""
        for recipe in recipes:
            shared = {id(tensor): tensor for tensor in [*self.model.parameters(), *self.model.buffers()]}
            changed = copy.deepcopy(self.model, shared)
            try:
                recipe.apply_(changed, self.part, depth)
                outputs(changed, self.pixels[:1].to(self.device), self.part)
            except ValueError as refusal:
                self.refused[recipe.name] = str(refusal)
                continue
            self.recipes[recipe.name], self.models[recipe.name] = recipe, changed.eval()

    def run(self, journal: Journal, progress: bool) -> None:
        """Judge all recipes on few images, time them, and judge those near the front on all images."""
        first = min(FIRST_LOOK, len(self.pixels))
        with progress_bar(desc="advise", total=2 * len(self.models) + 1, shown=progress, leave=False) as bar:
            for name in self.models:
                self._add(journal, name, 0, first)
                bar.update()
            saved = [record["times"] for record in journal.records if "times" in record]
            if not saved:
                saved = [self._time()]
                journal.add({"times": saved[0]})
            self.times = saved[0]
            bar.update()
            for name in self.near_front() if first < len(self.pixels) else ():
                self._add(journal, name, first, len(self.pixels))
                bar.update()

    def near_front(self) -> list[str]:
        """Return the recipes to which no other one is clearly superior."""
        points = self._points()
        return [
            name
            for name in self.models
            if not any(fast >= points[name][0] and high > points[name][1] + SLACK for fast, high in points.values())
        ]

    def _points(self) -> dict[str, tuple[float, float]]:
        """Return speed-up and mean score by recipe, the dense model included."""
        dense = self.times[DENSE]
        return {
            name: (ratios(dense, times).median, float(self.scores[name].mean())) for name, times in self.times.items()
        }

    def rows(self, depth: int) -> Iterable[RecipeResult]:
        """Return the rows of the table, the fastest first."""
        points = self._points()
        for name in sorted(self.models, key=lambda name: -points[name][0]):
            (speed, score), count, recipe = points[name], len(self.scores[name]), self.recipes[name]
            yield RecipeResult(
                name,
                ratios(self.times[DENSE], self.times[name]),
                _mean(self.scores[name]),
                None if self.labels is None else _mean(self.correct[name] - self.correct[DENSE][:count]),
                count,
                recipe.code(self.part, depth),
                recipe.config(self.part, depth),
                recipe.advice,
                not any(
                    fast >= speed and high >= score and (fast, high) != (speed, score) for fast, high in points.values()
                ),
            )

    def _add(self, journal: Journal, name: str, start: int, stop: int) -> None:
        key = {"recipe": name, "start": start, "stop": stop}
        record = next((record for record in journal.records if key.items() <= record.items()), None)
        if record is None:
            scores, correct = self._judge(self._outputs(self.models[name], start, stop), start)
            record = {**key, "scores": scores.tolist(), "correct": correct.tolist()}
            journal.add(record)
        for values, field_name in ((self.scores, "scores"), (self.correct, "correct")):
            values[name] = np.concatenate([values.get(name, np.zeros(0)), np.array(record[field_name])])

    def _outputs(self, model: nn.Module, start: int, stop: int) -> Tensor:
        """Return the outputs (N, R, F): one row per image, or one per patch."""
        batches = []
        for chunk in self.pixels[start:stop].split(_AT_ONCE):
            rows_NRF = outputs(model, chunk.to(self.device), self.part).unflatten(0, (len(chunk), -1))
            batches.append(rows_NRF[:, self.prefix :].half().cpu() if rows_NRF.shape[1] > 1 else rows_NRF.cpu())
        return torch.cat(batches)

    def _judge(self, changed_NRF: Tensor, start: int) -> tuple[np.ndarray, np.ndarray]:
        """Return agreement with the dense model and, with labels, whether the top class is right, by image."""
        dense_NRF = self.dense_NRF[start : start + len(changed_NRF)].float()
        changed_NRF = resized(changed_NRF.float(), dense_NRF.shape[1])
        correct = np.zeros(0)
        if self.measure != AGREEMENT:
            return torch.cosine_similarity(changed_NRF, dense_NRF, dim=-1).mean(1).double().numpy(), correct
        top_N, dense_N = changed_NRF[:, 0].argmax(-1), dense_NRF[:, 0].argmax(-1)
        if self.labels is not None:
            correct = (top_N == self.labels[start : start + len(top_N)].cpu()).double().numpy()
        return (top_N == dense_N).double().numpy(), correct

    def _time(self) -> dict[str, list[float]]:
        x = self.pixels[torch.arange(self.batch_size) % len(self.pixels)].to(self.device)
        calls = {name: (lambda model=model: model(x)) for name, model in {DENSE: self.model, **self.models}.items()}
        return interleave(calls, seconds=0, rounds=ROUNDS, device=self.device, warmup=1)


def _mean(values: np.ndarray) -> Estimate:
    return estimate_of(float(values.mean()), resampled_means(values[:, None], _DRAWS, seed=0)[:, 0])
