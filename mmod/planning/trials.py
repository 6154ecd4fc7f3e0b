"""Which way of saving compute pays for a model, measured on images or prompts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from mmod.planning.candidates import Recipe, image_recipes, language_recipes
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
    check_value("recipes", recipes, list[Recipe] | None)
    if recipes is not None and not recipes:
        raise ValueError("recipes must name at least one recipe; None tries those of this model")
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
        dense = _Trial(Recipe(DENSE, {}), model, *samples.judge(model, 0, len(samples)))
        changed, refused = _changed(model, part, depth, samples, chosen)
        trials = {DENSE: dense, **changed}
        identity = {
            "model": type(model).__name__, "images": len(samples), "batch_size": samples.batch_size, "part": part,
            "recipes": {name: trial.recipe.code(part, 0) for name, trial in trials.items()},
            "outputs": samples.fingerprint,
        }  # fmt: skip
        journal = Journal(None if folder is None else folder / "journal.jsonl", identity, "advice")
        _run(trials, samples, journal, progress)
        rows = tuple(_rows(trials, samples, part, depth))
    advice = Advice(
        rows,
        refused,
        samples.measure,
        float(dense.correct.mean()) if samples.has_labels else None,
        float(np.median(dense.times)),
        samples.batch_size,
        len(samples),
        tolerance,
        samples.redundancy,
        note,
        samples.cache_bytes(model),
    )
    if folder is not None:
        advice.save(folder, overwrite=True)
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
class _Trial:
    """A model on the first samples: agreement with the dense model, right answers, and milliseconds by round."""

    recipe: Recipe
    model: nn.Module
    scores: np.ndarray = field(default_factory=lambda: np.zeros(0))
    correct: np.ndarray = field(default_factory=lambda: np.zeros(0))
    times: list[float] = field(default_factory=list)

    def judge(self, samples: Samples, stop: int, journal: Journal) -> None:
        """Judge the samples up to a number, or read from the journal what they gave."""
        if len(self.scores) >= stop:
            return
        key = {"recipe": self.recipe.name, "start": len(self.scores), "stop": stop}
        record = next((record for record in journal.records if key.items() <= record.items()), None)
        if record is None:
            scores, correct = samples.judge(self.model, len(self.scores), stop)
            record = {**key, "scores": scores.tolist(), "correct": correct.tolist()}
            journal.add(record)
        self.scores = np.append(self.scores, record["scores"])
        self.correct = np.append(self.correct, record["correct"])


def _changed(
    model: nn.Module, part: str, depth: int, samples: Samples, recipes: Sequence[Recipe]
) -> tuple[dict[str, _Trial], dict[str, str]]:
    """Return a changed copy of the model, with the same weights, for every recipe; and why others cannot be applied."""
    trials, refused = {}, {}
    for recipe in recipes:
        shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
        changed = copy.deepcopy(model, shared)
        try:
            recipe.apply_(changed, part, depth)
            samples.check(changed)
        except ValueError as refusal:
            refused[recipe.name] = str(refusal)
            continue
        trials[recipe.name] = _Trial(recipe, changed.eval())
    return trials, refused


def _run(trials: Mapping[str, _Trial], samples: Samples, journal: Journal, progress: bool) -> None:
    """Judge all recipes on few samples, time them, and judge those near the front on all samples."""
    with progress_bar(desc="advise", total=2 * len(trials) + 1, shown=progress, leave=False) as bar:
        for trial in trials.values():
            trial.judge(samples, samples.first, journal)
            bar.update()
        times = next((record["times"] for record in journal.records if "times" in record), None)
        if times is None:
            calls = {name: samples.call(trial.model) for name, trial in trials.items()}
            device = next(trials[DENSE].model.parameters()).device
            times = interleave(calls, seconds=0, rounds=ROUNDS, device=device, warmup=1)
            journal.add({"times": times})
        for name, trial in trials.items():
            trial.times = times[name]
        bar.update()
        points = _points(trials)
        for name, (speed, score) in points.items():
            # A recipe is dropped where another one is as fast and clearly better.
            if not any(fast >= speed and high > score + SLACK for fast, high in points.values()):
                trials[name].judge(samples, len(samples), journal)
                bar.update()


def _points(trials: Mapping[str, _Trial]) -> dict[str, tuple[float, float]]:
    """Return speed-up and mean score by recipe, the dense model included."""
    dense = trials[DENSE].times
    return {name: (ratios(dense, trial.times).median, float(trial.scores.mean())) for name, trial in trials.items()}


def _rows(trials: Mapping[str, _Trial], samples: Samples, part: str, depth: int) -> Iterable[RecipeResult]:
    """Return the rows of the table, the fastest first."""
    points, dense = _points(trials), trials[DENSE]
    for name, (speed, score) in sorted(points.items(), key=lambda item: -item[1][0]):
        trial, count = trials[name], len(trials[name].scores)
        if trial is dense:
            continue
        yield RecipeResult(
            name,
            ratios(dense.times, trial.times),
            _mean(trial.scores, share_of, {0, 1}),
            _mean(trial.correct - dense.correct[:count], change_of, {-1, 0, 1}) if samples.has_labels else None,
            count,
            trial.recipe.code(part, depth),
            trial.recipe.config(part, depth),
            trial.recipe.advice,
            not any(
                fast >= speed and high >= score and (fast, high) != (speed, score) for fast, high in points.values()
            ),
            samples.cache_bytes(trial.model),
        )


def _mean(values: np.ndarray, of_counts: Callable[[np.ndarray], Estimate], counts: set[int]) -> Estimate:
    """Return a mean: by its own formula of counts, and by the bootstrap for cosines and shares of a prompt."""
    if counts.issuperset(values):
        return of_counts(values)
    return estimate_of(float(values.mean()), resampled_means(values[:, None], _DRAWS, seed=0)[:, 0])
