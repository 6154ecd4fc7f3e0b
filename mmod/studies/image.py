"""The study of image classifiers: accuracy against FLOPs, latency and memory, beside rivals of routing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from mmod.adapters import find_stack
from mmod.analysis.memory import peak_bytes
from mmod.analysis.plots import sample_maps
from mmod.analysis.timing import interleave, relative_times
from mmod.model import is_routed
from mmod.studies.config import ImageStudyConfig
from mmod.studies.entrants import DENSE, Anew, Entrant, create_rivals
from mmod.studies.jobs import Job, Runner, Tick
from mmod.studies.paired import as_fast, quoted, unbeaten
from mmod.studies.rates import best_rates, starts_others, trials, with_rate
from mmod.studies.results import Column, table_of
from mmod.studies.study import Costs, Outcome, Scores, Study
from mmod.training.engine.distributed import choose_device
from mmod.training.engine.evaluate import RoutedResult
from mmod.training.engine.recipe import by_data
from mmod.training.image.config import ModelConfig, TrainConfig
from mmod.training.image.evaluate import EvalResult
from mmod.training.image.recipe import ImageRecipe, sample_images, timed_images

__all__ = ["ImageStudy", "TimmStudy"]

Found = TypeVar("Found", bound=RoutedResult)


class TimmStudy(Study[TrainConfig, Found]):
    """A study of timm's image models, of what they cost, and of their rivals; a subclass says how they are judged."""

    config: ImageStudyConfig
    recipe: ClassVar[type[ImageRecipe]] = ImageRecipe
    run_config = TrainConfig

    def __init__(self, config: ImageStudyConfig) -> None:
        super().__init__(config)
        self.rates: dict[str, float] = {}
        self.routed_names: set[str] = set()
        self.epochs: dict[str, str] = {}

    def prepare(self, runner: Runner) -> None:
        """Find the learning rate of each model, if the config asks for it."""
        config = self.config
        if config.rates is None:
            return
        _, jobs = self.plan()
        tried = trials(jobs, config.rates, config.rate_split, f"{config.output}/rates")
        first = [job for job in jobs[:1] if starts_others(job)]
        names = {job.config.output: trial for trial, job in tried.items()}
        scores: dict[tuple[str, float], float] = {}
        for job, outcome in runner.run([*first, *tried.values()], self.try_rate):
            if job.config.output in names:
                scores[names[job.config.output]] = outcome.figures[self.score]
        self.rates = best_rates({trial: scores[trial] for trial in tried})

    def try_rate(self, job: Job[TrainConfig], tick: Tick) -> Outcome:
        """Do a run of the search."""
        found = self.train(self.ready(job).config, tick)
        return Outcome(found, self.figures(found))

    def plan(self) -> tuple[list[Entrant], list[Job[TrainConfig]]]:
        """Return what is compared, and the runs with the learning rates that were found."""
        entrants, jobs = super().plan()
        self.routed_names = {entrant.name for entrant in entrants if entrant.is_routed}
        base = f"{jobs[0].config.epochs} " if starts_others(jobs[0]) else ""
        self.epochs = {job.name: _epochs(job, base) for job in jobs}
        rated = [dataclasses.replace(job, config=with_rate(job.config, self.rates.get(job.name, 1.0))) for job in jobs]
        return entrants, rated

    def complete(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows with how long each model was trained."""
        return [{**row, "epochs": self.epochs[row["name"]]} for row in rows]

    def facts(self) -> dict[str, Any]:
        """Return the factors of the learning rates that were found."""
        return {"rates": self.rates}

    def entrants(self, dense: TrainConfig, tuned: TrainConfig) -> list[Entrant]:
        """Return the dense model, the routed ones, dense ones as near to them in FLOPs as can be, and rivals."""
        epochs = dense.epochs + (tuned.epochs if self.config.tune else 0)
        entrants = super().entrants(dense, tuned)
        shallow = [] if self.config.isoflop == "none" else self._shallow(entrants, dense, epochs)
        config = self.config
        rivals = create_rivals(config.rivals, config.controls, epochs=epochs, is_trained=config.tune)
        return [*entrants, *shallow, *rivals]

    def _shallow(self, entrants: Sequence[Entrant], dense: TrainConfig, epochs: int) -> list[Entrant]:
        """Return dense models of fewer blocks, as near in FLOPs to the routed ones as can be."""
        plain = dataclasses.replace(dense, model=ModelConfig(dense.model.name, dense.model.args))
        model = self.create(plain)
        report, depth = self.recipe(plain).report(model), len(find_stack(model).blocks)
        costs = {fewer: report.rest.dense + fewer * report.blocks[0].dense for fewer in range(1, depth + 1)}
        depths = set()
        for entrant in entrants:
            config = entrant.configure(plain, plain)
            routed = self.create(config)
            # What thresholds cost follows from the data.
            if not by_data(routed):
                cost = self.recipe(config).report(routed).routed
                depths.add(min(costs, key=lambda fewer: abs(costs[fewer] - cost)))
        return [
            Anew(name=f"isoflop-{fewer}", series="shallow", args={"depth": fewer}, epochs=epochs, share=fewer / depth)
            for fewer in sorted(depths - {depth})
        ]

    def examine(self, job: Job[TrainConfig], found: Found) -> dict[str, float]:
        """Count the FLOPs of one image and the memory of a batch, and draw what a routed model keeps."""
        model = self.load(job)
        if self.config.maps and is_routed(model):
            self._draw_maps(job, model)
        images = timed_images(job.config, self.config.latency_batch).to(choose_device(job.config.device))
        with torch.inference_mode():
            peak = peak_bytes(partial(model, images), images.device)
        return {"gflops": self.recipe(job.config).cost(model, found)["image"] / 1e9, "peak_mb": peak / 1e6}

    def time(self, jobs: Mapping[str, Job[TrainConfig]]) -> dict[str, dict[str, float]]:
        """Measure the latency of the same evaluation images in batches of several sizes, for each image.

        All models and sizes take turns. Where images leave a model early, its time is the mean over the images.
        """
        device = choose_device(jobs[DENSE].config.device)
        count = max(self._batches)
        reads: dict[tuple[str, int], Callable[[], object]] = {}
        for name, job in jobs.items():
            model, images = self.load(job), timed_images(job.config, count).to(device)
            for size in self._batches:
                # None smaller at the end, which would be timed as one of this size.
                reads[name, size] = partial(_read, model, images[: count // size * size].split(size))
        with torch.inference_mode():
            times = interleave(reads, seconds=0, rounds=self.config.latency_rounds, device=device)
        found: dict[str, dict[str, float]] = {name: {} for name in jobs}
        for size in self._batches:
            own, (ms, speedup) = {name: times[name, size] for name in jobs}, self._time_columns(size)
            for name, (total, ratio) in relative_times(own, DENSE).items():
                found[name] |= {ms: total / (count // size * size), speedup: ratio}
        return found

    @property
    def _batches(self) -> list[int]:
        """Sizes of batches whose latency is measured."""
        return sorted({*self.config.latency_batches, self.config.latency_batch})

    def _time_columns(self, size: int) -> tuple[str, str]:
        """Return the names of the columns with the time of a batch and with the speed-up over the dense model."""
        is_main = size == self.config.latency_batch
        return ("latency_ms", "speedup") if is_main else (f"latency_ms_b{size}", f"speedup_b{size}")

    def _times(self, costs: Costs, names: Iterable[str]) -> dict[int, dict[str, float]]:
        """Return the time of each model by size of the batch, for sizes above 1; nothing before it is measured."""
        columns = {size: self._time_columns(size)[0] for size in self._batches if size > 1}
        found = {size: {name: costs[name].get(ms, 0.0) for name in names} for size, ms in columns.items()}
        return {size: own for size, own in found.items() if all(own.values())}

    @property
    def costs(self) -> dict[str, str]:
        """FLOPs and latency of an image."""
        times = {self._time_columns(size)[0]: f"ms per image, batch {size}" for size in self._batches}
        return {"gflops": "GFLOPs per image", **times}

    def to_rivals(self, scores: Scores, costs: Costs) -> dict[str, dict[str, Any]]:
        """Return each model's difference to the best model without a router that is as fast, and that one's name."""
        found: dict[str, dict[str, Any]] = {name: {} for name in scores}
        for size, ms in self._times(costs, scores).items():
            fast = {name: [other for other in as_fast(ms, name) if other not in self.routed_names] for name in scores}
            best = {
                name: max(others, key=lambda other: mean(scores[other].values())) if others else None
                for name, others in fast.items()
            }
            gaps = self.compare(scores, best)
            for name in scores:
                found[name] |= {f"to_rival_b{size}": gaps[name], f"rival_b{size}": best[name]}
        return found

    def ranking(self, scores: Scores, costs: Costs) -> str:
        """Say which models none as fast is clearly better than; all are compared before time is measured."""
        times = self._times(costs, scores)
        to_dense = self.compare(scores, dict.fromkeys(scores, DENSE)).values()
        if not times or not any(gap is not None and gap.has_interval for gap in to_dense):
            return self.verdict(scores)

        def is_better(one: str, other: str) -> bool:
            gap = self.compare(scores, {one: other})[one]
            return gap is not None and gap.is_clear and gap.value > 0

        found = {size: ", ".join(map(quoted, unbeaten(ms, is_better))) for size, ms in times.items()}
        return "\n\n".join(
            f"At batch {size}, no entrant that is as fast is clearly better (95 % interval of the paired difference) "
            f"than any of these, which are not ranked: {names}."
            for size, names in found.items()
        )

    def table(self, rows: Sequence[dict[str, Any]]) -> str:
        """Return the points as a Markdown table, with a column for each size of batch."""
        columns: dict[str, Column] = {}
        last = [key for key in self.columns if key.endswith("to_dense")][-1]
        for key, column in self.columns.items():
            if key == "latency_ms":
                for size in self._batches:
                    columns[self._time_columns(size)[0]] = (f"ms / image b{size}", ".3f")
            elif key == "speedup":
                for size in self._batches:
                    columns[self._time_columns(size)[1]] = (f"speed-up b{size}", ".2f")
            else:
                columns[key] = column
            if key.endswith("to_dense"):
                for size in self._batches:
                    columns[f"{key[:-5]}rival_b{size}"] = (f"{column[0][:-5]}rival b{size}", "")
            if key == last:
                columns |= {f"rival_b{size}": (f"rival b{size}", "") for size in self._batches}
        return table_of(columns, rows)

    def _draw_maps(self, job: Job[TrainConfig], model: nn.Module) -> None:
        figure = sample_maps(model, sample_images(job.config, self.config.maps)).draw()
        folder = Path(self.config.output)
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / f"maps-{job.name}.png", dpi=150)


_MEASURES = {"top1": "top-1 accuracy", "objects": "accuracy of patches of objects", "mean_iou": "mean IoU"}


class ImageStudy(TimmStudy[EvalResult]):
    """A study of timm's classifiers, of images or of patches; see `Study`."""

    found = EvalResult
    columns: ClassVar = {
        "name": ("model", ""),
        "capacity": ("capacity", "g"),
        "epochs": ("epochs", ""),
        "gflops": ("GFLOPs", ".4f"),
        "latency_ms": ("ms / image", ".3f"),
        "speedup": ("speed-up", ".2f"),
        "peak_mb": ("peak MB", ".1f"),
        "mean_iou": ("mean IoU %", "±.2f"),
        "objects": ("objects %", "±.2f"),
        "top1": ("top-1 %", ".2f"),
        "top1_std": ("std", ".2f"),
        "to_dense": ("to dense", ""),
        "to_control": ("to control", ""),
        "before": ("before tuning", ".2f"),
        "kept": ("kept", ".3f"),
    }

    def __init__(self, config: ImageStudyConfig) -> None:
        super().__init__(config)
        self.score, self.measure = config.score, _MEASURES[config.score]

    def entrants(self, dense: TrainConfig, tuned: TrainConfig) -> list[Entrant]:
        """Return what is compared.

        Raises:
            ValueError: If the score is one of patches and images have the labels.
        """
        if self.score != "top1" and dense.data.label_patch is None:
            raise ValueError(f"score={self.score!r} is one of patches: set data.label_patch, or score to 'top1'")
        return super().entrants(dense, tuned)

    def figures(self, found: EvalResult) -> dict[str, float]:
        """Return accuracy, what is known of patches alone, and kept share."""
        kept = {"kept": found.mean_kept} if found.kept else {}
        return {"top1": found.top1, **found.patch_figures(), **kept}


def _read(model: nn.Module, batches: Sequence[torch.Tensor]) -> None:
    for images in batches:
        model(images)


def _epochs(job: Job[TrainConfig], base: str) -> str:
    """Say for how many epochs a model was trained: from scratch, or those of the dense model and its own.

    Args:
        job: Its run.
        base: Epochs of the dense model that others start from and a space; empty where it was not trained.
    """
    if not job.is_tuned:
        return str(job.config.epochs) if job.is_trained else ""
    if not job.is_trained:
        return base.strip()
    return f"{base}+ {job.config.epochs}{'' if job.config.trained is None else f' ({job.config.trained})'}"
