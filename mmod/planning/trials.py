"""Which way of saving compute pays for a model, measured on images or prompts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from mmod.adapters import BlockStack, find_part, find_stacks
from mmod.analysis.modes import in_mode
from mmod.analysis.statistics import Estimate, change_of, estimate_of, resampled_means, share_of
from mmod.analysis.timing import interleave, ratios
from mmod.io.journal import Journal
from mmod.io.progress import progress_bar
from mmod.methods.base import methods_of
from mmod.planning.advice import Advice, RecipeResult
from mmod.planning.recipes import Recipe, image_recipes, language_recipes
from mmod.planning.samples import Images, Prompts, Samples, first_images, first_prompts
from mmod.values import check_value

DENSE = "dense"
ROUNDS = 5
# A recipe is dropped after the first look if another one is as fast and agrees more by this share.
SLACK = 0.02
_DRAWS = 2000


def advise(
    model: nn.Module,
    batches: Iterable[Any],
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
    """Try recipes that need no training and say which one pays on these images or prompts and this machine.

    All recipes run on the first 64 images and are timed in turns; those near the Pareto front run on all images. A
    model with a head is judged by how often its top class is the dense model's, another one by the cosine of features,
    and one with an output per patch (`global_pool=""`) by the cosine of its patches. A language model is judged by how
    often its next token is the dense model's, and timed by the prefill. Where batches have labels, the change of
    accuracy decides.

    Args:
        model: A dense image model of timm, a CLIP model of open_clip, or a language model of transformers that reads
            images; it runs in evaluation mode and is unchanged.
        batches: Images (B, C, H, W), or pairs of images and labels (B,), such as a loader; preprocessed for the model.
            For a language model, what its processor returns, perhaps with `labels`; plans are searched on the first
            fifth of these batches, and all recipes are judged on the others.
        part: The part to make cheaper; None takes "image" where there are several, or "language".
        images: Number of images or prompts, the first of the batches.
        batch_size: Images of a timed batch; for a language model it is the first batch.
        tolerance: Share of agreement, or of accuracy, that may be lost, in [0, 1).
        recipes: What to try. None takes gradual and late merging, a-mod and random routing, smaller images, ToMe and
            pruning; for a language model plans of `search_plan`, the schedules of p-MoD, PyramidDrop and FastV, image
            tokens that late layers do not update, and random ones.
        folder: Write `advice.json`, `advice.md` and `advice.png` here, and `journal.jsonl`, with which the same call
            resumes. None writes nothing.
        note: A sentence about the data, for the report.
        progress: Show a bar.

    Raises:
        TypeError: A batch that holds no images, or no prompts.
        ValueError: The model is changed already or cannot be routed, there are no images, one batch alone to search
            plans and judge them, or the folder belongs to another model or other images.

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
    part, stack = _part_to_change(model, part)
    folder, depth = None if folder is None else Path(folder), len(stack.blocks)
    samples: Samples
    with in_mode(False, model), torch.no_grad():
        if stack.language:
            samples, chosen = _prompts(model, part, depth, batches, images, recipes, folder)
        else:
            pixels, labels = first_images(batches, images)
            samples = Images(model, part, stack.prefix, pixels, labels, batch_size)
            chosen = image_recipes(stack, pixels.shape[-1], samples.patch) if recipes is None else recipes
        trials = _Trials(model, part, samples)
        trials.prepare(chosen, depth)
        identity = {
            "model": type(model).__name__, "images": len(samples), "batch_size": samples.batch_size, "part": part,
            "recipes": {name: recipe.code(part, 0) for name, recipe in trials.recipes.items()},
            "outputs": samples.fingerprint,
        }  # fmt: skip
        journal = Journal(None if folder is None else folder / "journal.jsonl", identity, "advice")
        trials.run(journal, progress)
        rows = tuple(trials.rows(depth))
    advice = Advice(
        rows,
        trials.refused,
        samples.measure,
        float(trials.correct[DENSE].mean()) if samples.has_labels else None,
        float(np.median(trials.times[DENSE])),
        samples.batch_size,
        len(samples),
        tolerance,
        samples.redundancy,
        note,
        samples.cache_bytes(model),
    )
    if folder is not None:
        advice.save(folder)
    return advice


def _prompts(
    model: nn.Module, part: str, depth: int, batches: Iterable[Any], count: int, recipes: Sequence[Recipe] | None,
    folder: Path | None,
) -> tuple[Samples, Sequence[Recipe]]:  # fmt: skip
    """Return prompts to judge recipes on, and the recipes; others are searched on a fifth of the batches."""
    prompts = first_prompts(batches, count, next(model.parameters()).device)
    if recipes is not None:
        return Prompts(model, part, prompts), recipes
    searched = -(-len(prompts) // 5)
    if searched == len(prompts):
        raise ValueError("one batch of prompts cannot both find plans and judge them: pass two or more")
    recipes = language_recipes(model, part, depth, prompts[:searched], folder)
    return Prompts(model, part, prompts[searched:]), recipes


def _part_to_change(model: nn.Module, part: str | None) -> tuple[str, BlockStack]:
    stacks = find_stacks(model)
    if part is None:
        part = next((name for name in ("image", "language") if name in stacks), None)
    part, stack = find_part(model, part)
    if part == "text" or (stack.language and not stack.reads_images):
        raise ValueError(
            f"advice is for models that read images, and {stack.names[0]} reads text: use mmod.search_plan"
        )
    if part == "vision":
        raise ValueError("the time of a vision tower alone is not compared: ask for advice on the part 'language'")
    return part, stack


@dataclass
class _Trials:
    """Runs the dense model and the changed ones on the same samples."""

    model: nn.Module
    part: str
    samples: Samples
    recipes: dict[str, Recipe] = field(default_factory=dict)
    models: dict[str, nn.Module] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    scores: dict[str, np.ndarray] = field(default_factory=dict)
    correct: dict[str, np.ndarray] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scores[DENSE], self.correct[DENSE] = self.samples.judge(self.model, 0, len(self.samples))

    def prepare(self, recipes: Sequence[Recipe], depth: int) -> None:
        """Change a copy of the model, with the same weights, for every recipe; remember why one cannot be applied."""
        for recipe in recipes:
            shared = {id(tensor): tensor for tensor in [*self.model.parameters(), *self.model.buffers()]}
            changed = copy.deepcopy(self.model, shared)
            try:
                recipe.apply_(changed, self.part, depth)
                self.samples.check(changed)
            except ValueError as refusal:
                self.refused[recipe.name] = str(refusal)
                continue
            self.recipes[recipe.name], self.models[recipe.name] = recipe, changed.eval()

    def run(self, journal: Journal, progress: bool) -> None:
        """Judge all recipes on few samples, time them, and judge those near the front on all samples."""
        first, count = self.samples.first, len(self.samples)
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
            for name in self.near_front() if first < count else ():
                self._add(journal, name, first, count)
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
                _mean(self.scores[name], share_of, {0, 1}),
                _mean(self.correct[name] - self.correct[DENSE][:count], change_of, {-1, 0, 1})
                if self.samples.has_labels
                else None,
                count,
                recipe.code(self.part, depth),
                recipe.config(self.part, depth),
                recipe.advice,
                not any(
                    fast >= speed and high >= score and (fast, high) != (speed, score) for fast, high in points.values()
                ),
                self.samples.cache_bytes(self.models[name]),
            )

    def _add(self, journal: Journal, name: str, start: int, stop: int) -> None:
        key = {"recipe": name, "start": start, "stop": stop}
        record = next((record for record in journal.records if key.items() <= record.items()), None)
        if record is None:
            scores, correct = self.samples.judge(self.models[name], start, stop)
            record = {**key, "scores": scores.tolist(), "correct": correct.tolist()}
            journal.add(record)
        for values, field_name in ((self.scores, "scores"), (self.correct, "correct")):
            values[name] = np.concatenate([values.get(name, np.zeros(0)), np.array(record[field_name])])

    def _time(self) -> dict[str, list[float]]:
        calls = {name: self.samples.call(model) for name, model in {DENSE: self.model, **self.models}.items()}
        device = next(self.model.parameters()).device
        return interleave(calls, seconds=0, rounds=ROUNDS, device=device, warmup=1)


def _mean(values: np.ndarray, of_counts: Callable[[np.ndarray], Estimate], counts: set[int]) -> Estimate:
    """Return a mean: by its own formula of counts, and by the bootstrap for cosines and shares of a prompt."""
    if counts.issuperset(values):
        return of_counts(values)
    return estimate_of(float(values.mean()), resampled_means(values[:, None], _DRAWS, seed=0)[:, 0])
