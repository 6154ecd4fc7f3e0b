"""The study of image classifiers: accuracy against FLOPs, latency and memory, beside rivals of routing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import mean
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from mmod.adapters import find_stack
from mmod.analysis.memory import peak_bytes
from mmod.analysis.plots import draw_sample_maps
from mmod.analysis.redundancy import redundancy
from mmod.io.jobs import Runner, Tick
from mmod.io.tables import Column, table_of
from mmod.methods.route import is_routed
from mmod.studies.config import ImageStudyConfig, TimmStudyConfig
from mmod.studies.entrants import DENSE, Entrant, create_rivals
from mmod.studies.jobs import Run, best_rates, starts_others, trials, try_rates, with_rate
from mmod.studies.results import COLUMNS, as_fast, quoted, save_picture, unbeaten
from mmod.studies.study import Costs, Scores, Study
from mmod.training.engine.checkpoint import find_weights
from mmod.training.engine.distributed import choose_device
from mmod.training.engine.evaluate import RoutedResult
from mmod.training.engine.recipe import by_data
from mmod.training.image.config import ModelConfig, TrainConfig
from mmod.training.image.evaluate import EvalResult
from mmod.training.image.recipe import ImageRecipe, sample_images, timed_images

Evaluation = TypeVar("Evaluation", bound=RoutedResult)


class TimmStudy(Study[TrainConfig, Evaluation]):
    """A study of timm's image models, their costs and their rivals; a subclass says how they are judged."""

    config: TimmStudyConfig
    recipe: ClassVar[type[ImageRecipe]] = ImageRecipe
    run_config = TrainConfig
    times: ClassVar = {"image": ("latency_ms", "speedup")}

    def __init__(self, config: TimmStudyConfig) -> None:
        super().__init__(config)
        self.rates: dict[str, float] = {}
        self.epochs: dict[str, str] = {}
        self.caption: list[str] = []
        self.chance = 0.0

    def prepare(self, runner: Runner) -> None:
        """Look for the checkpoints that runs start from; find the learning rate of each model if asked for."""
        config, (_, jobs) = self.config, self.plan()
        starts = {start for job in jobs if (start := job.config.model.checkpoint) is not None}
        for start in starts - {job.config.output for job in jobs}:
            find_weights(start)
        if config.rates is None:
            return
        by_trial = trials(jobs, config.rates, config.rate_split, f"{config.output}/rates")
        first = [job for job in jobs[:1] if starts_others(job)]
        self.rates = best_rates(try_rates(runner, by_trial, self.try_rate, first))

    def try_rate(self, job: Run[TrainConfig], tick: Tick) -> float:
        """Return the score of a run of the search."""
        return self.recipe(self.ready(job).config).train(tick).columns()[self.score]

    def plan(self) -> tuple[list[Entrant], list[Run[TrainConfig]]]:
        """Return what is compared, and the runs with the best learning rates."""
        entrants, jobs = super().plan()
        base = f"{jobs[0].config.epochs} " if starts_others(jobs[0]) else ""
        self.epochs = {job.name: _epochs(job, base) for job in jobs}
        rated = [dataclasses.replace(job, config=with_rate(job.config, self.rates.get(job.name, 1.0))) for job in jobs]
        return entrants, rated

    def complete(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows with the epochs of every model."""
        return [{**row, "epochs": self.epochs[row["name"]]} for row in rows]

    def facts(self) -> dict[str, Any]:
        """Return the best factors of the learning rates, and the caption of the images."""
        return {"rates": self.rates, "images": self.caption}

    def entrants(self, dense: TrainConfig, tuned: TrainConfig) -> list[Entrant]:
        """Return the dense model, the routed ones, dense ones of about their FLOPs, and rivals."""
        config, entrants = self.config, super().entrants(dense, tuned)
        epochs = dense.epochs + (tuned.epochs if config.tune else 0)
        shallow = [] if config.isoflop == "none" else self._shallow(entrants, dense, epochs)
        chosen = {
            series: {budget: fields for budget, fields in budgets.items() if config.is_run(budget)}
            for series, budgets in config.rivals.items()
        }
        rivals = create_rivals(chosen, config.controls, epochs=epochs, is_trained=config.tune)
        return [*entrants, *shallow, *rivals]

    def _shallow(self, entrants: Sequence[Entrant], dense: TrainConfig, epochs: int) -> list[Entrant]:
        """Return dense models of fewer blocks, as near in FLOPs to the routed ones as possible."""
        plain = dataclasses.replace(dense, model=ModelConfig(dense.model.name, dense.model.args))
        recipe = self.recipe(plain)
        model = recipe.create()
        report, depth = recipe.report(model), len(find_stack(model).blocks)
        costs = {fewer: report.rest.dense + fewer * report.blocks[0].dense for fewer in range(1, depth + 1)}
        depths = set()
        for entrant in entrants:
            recipe = self.recipe(entrant.configure(plain, plain))
            routed = recipe.create()
            # The cost of thresholds depends on the data.
            if not by_data(routed):
                cost = recipe.report(routed).routed
                depths.add(min(costs, key=lambda fewer: abs(costs[fewer] - cost)))
        return [
            Entrant(
                name=f"shallow-{fewer}", series="shallow", args={"depth": fewer}, epochs=epochs, share=fewer / depth
            )
            for fewer in sorted(depths - {depth})
        ]

    def examine(self, job: Run[TrainConfig], evaluation: Evaluation) -> dict[str, float]:
        """Count the FLOPs of one image and the memory of a batch, and draw what a routed model keeps."""
        model = self.load(job)
        if job.name == DENSE:
            self.caption = [_caption(job.config, model)]
        if self.config.maps and is_routed(model):
            maps = draw_sample_maps(model, sample_images(job.config, self.config.maps))
            save_picture(self.config.output, f"maps-{job.name}", maps)
        images = timed_images(job.config, self.config.latency_batch).to(choose_device(job.config.device))
        with torch.inference_mode():
            peak = peak_bytes(partial(model, images), images.device)
        return {"gflops": self.recipe(job.config).cost(model, evaluation.kept)["image"] / 1e9, "peak_mb": peak / 1e6}

    def _times(self, costs: Costs, names: Iterable[str]) -> dict[int, dict[str, float]]:
        """Return the time of every model by batch size, for sizes above 1; nothing before it is measured."""
        columns = {size: self.time_columns("image", size)[0] for size in self.batch_sizes if size > 1}
        by_size = {size: {name: costs[name].get(ms, 0.0) for name in names} for size, ms in columns.items()}
        return {size: times for size, times in by_size.items() if all(times.values())}

    @property
    def costs(self) -> dict[str, str]:
        """FLOPs and latency of an image."""
        times = {self.time_columns("image", size)[0]: f"ms per image, batch {size}" for size in self.batch_sizes}
        return {"gflops": "GFLOPs per image", **times}

    def to_rivals(self, scores: Scores, costs: Costs) -> dict[str, dict[str, Any]]:
        """Return the difference of every model to the best model without a router that is as fast, and its name."""
        columns = super().to_rivals(scores, costs)
        for size, ms in self._times(costs, scores).items():
            fast = {
                name: [other for other in as_fast(ms, name) if not self.compared[other].is_routed] for name in scores
            }
            for name, of_size in self.to_best(scores, fast, f"_b{size}").items():
                columns[name] |= of_size
        return columns

    def ranking(self, scores: Scores, costs: Costs) -> str:
        """Describe the images, name a model for some speeds, and say what is not known; without times, compare all."""
        times = self._times(costs, scores)
        to_dense = self.compare(scores, dict.fromkeys(scores, DENSE)).values()
        has_intervals = any(gap is not None and gap.has_interval for gap in to_dense)
        is_repeated = self.config.train_dense or self.config.tune
        if not times and (is_repeated or has_intervals):
            return self.verdict(scores)

        def is_better(one: str, other: str) -> bool:
            gap = self.compare(scores, {one: other})[one]
            return gap is not None and gap.value > 0 and (gap.is_clear if has_intervals else gap.value > self.chance)

        advice = [self._advice(scores, ms, size, is_better) for size, ms in times.items()]
        limits = [
            "" if has_intervals else f"Differences below {self.chance:.1f} points may be chance.",
            ""
            if self.config.train_dense
            else "All models start from one dense model; another may rank them differently.",
            "One seed: `--seeds 5` gives confidence intervals over runs." if is_repeated and not has_intervals else "",
        ]
        unranked = [
            f"At batch {size}, no entrant that is as fast is significantly better (95 % interval of the paired "
            f"difference) than any of these, which are not ranked: {', '.join(map(quoted, unbeaten(ms, is_better)))}."
            for size, ms in times.items()
            if has_intervals
        ]
        return "\n\n".join([*self.caption, *advice, *unranked, *filter(None, [" ".join(filter(None, limits))])])

    def _advice(self, scores: Scores, ms: Mapping[str, float], size: int, is_better: Callable[[str, str], bool]) -> str:
        """Name the best model at some speeds, and those that may be as good."""
        mean_of = {name: mean(by_seed.values()) for name, by_seed in scores.items()}
        lines = [f"What to use, in batches of {size}:\n"]
        for speed in _SPEEDS:
            fast = [name for name in mean_of if name != DENSE and ms[DENSE] >= speed * ms[name]]
            best = max(fast, key=lambda name: mean_of[name], default=None)
            if best is None:
                lines.append(f"- {speed:g} times the dense speed: nothing measured is that fast")
                break
            close = ", ".join(quoted(name) for name in fast if name != best and not is_better(best, name))
            change = f"{quoted(best)}, {mean_of[best] - mean_of[DENSE]:+.1f} points"
            lines.append(
                f"- {speed:g} times the dense speed: {change}{f'; no clear difference from {close}' if close else ''}"
            )
        return "\n".join(lines)

    def summary(self, rows: Sequence[dict[str, Any]]) -> str:
        """Return the columns of the table that fit a screen."""
        speedups = {self.time_columns("image", size)[1]: (f"speed-up b{size}", ".2f") for size in self.batch_sizes}
        first, last = ("name", "gflops"), (self.score, "to_dense")
        columns = {name: COLUMNS[name] for name in first} | speedups | {name: COLUMNS[name] for name in last}
        return str(table_of(columns, rows))

    def table(self, rows: Sequence[dict[str, Any]]) -> str:
        """Return the points as a Markdown table, with a column for every batch size."""
        columns: dict[str, Column] = {}
        gaps = [name for name in self.columns if name.endswith("to_dense")]
        for name in self.columns:
            title, form = COLUMNS[name]
            if name in ("latency_ms", "speedup"):
                names = {size: self.time_columns("image", size)[name == "speedup"] for size in self.batch_sizes}
                columns |= {column: (f"{title} b{size}", form) for size, column in names.items()}
                continue
            columns[name] = (title, form)
            if name in gaps:
                rival, heading = f"{name.removesuffix('dense')}rival", f"{title.removesuffix('dense')}rival"
                columns |= {f"{rival}_b{size}": (f"{heading} b{size}", form) for size in self.batch_sizes}
            if name == gaps[-1]:
                columns |= {f"rival_b{size}": (f"rival b{size}", "") for size in self.batch_sizes}
        return str(table_of(columns, rows))


# Speeds for which a model is named, as multiples of the dense model's; images whose redundancy is measured.
_SPEEDS, _MEASURED = (1.25, 1.5, 2.0), 256
_MEASURES = {"top1": "top-1 accuracy", "objects": "accuracy of patches of objects", "mean_iou": "mean IoU"}


class ImageStudy(TimmStudy[EvalResult]):
    """A study of timm's classifiers, of images or of patches; see `Study`."""

    columns = (
        "name", "capacity", "epochs", "mean_iou", "objects", "top1", "top1_std", "gflops", "speedup", "latency_ms",
        "peak_mb", "to_dense", "to_control", "before", "kept",
    )  # fmt: skip

    def __init__(self, config: ImageStudyConfig) -> None:
        super().__init__(config)
        self.score, self.measure = config.score, _MEASURES[config.score]

    def entrants(self, dense: TrainConfig, tuned: TrainConfig) -> list[Entrant]:
        """Return what is compared; refuse a score of patches where images have the labels."""
        if self.score != "top1" and dense.data.label_patch is None:
            raise ValueError(f"score={self.score!r} is one of patches: set data.label_patch, or score to 'top1'")
        return super().entrants(dense, tuned)

    def examine(self, job: Run[TrainConfig], evaluation: EvalResult) -> dict[str, float]:
        """Count a model's costs, and the chance that sampling the dense model's test images adds to a difference."""
        if job.name == DENSE:
            right = evaluation.columns()[self.score] / 100
            # The 95 % interval of a difference between two models on other images, which pairing could only narrow.
            self.chance = 196 * math.sqrt(2 * right * (1 - right) / evaluation.samples)
        return super().examine(job, evaluation)


def _caption(config: TrainConfig, model: nn.Module) -> str:
    """Return the source, size and redundancy of the images."""
    data, patch = config.data, getattr(getattr(model, "patch_embed", None), "patch_size", None)
    images = f"Images: {data.source}, {data.image_size} px"
    return images if patch is None else f"{images}; {redundancy(timed_images(config, _MEASURED), patch[0])}"


def _epochs(job: Run[TrainConfig], base: str) -> str:
    """Return a model's epochs: from scratch, or those of the dense model (`base`) and of its fine-tuning."""
    if not job.is_tuned:
        return str(job.config.epochs) if job.is_trained else ""
    if not job.is_trained:
        return base.strip()
    return f"{base}+ {job.config.epochs}{'' if job.config.trained is None else f' ({job.config.trained})'}"
