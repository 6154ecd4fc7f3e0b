"""The study of image classifiers: accuracy against FLOPs and latency, beside shallower dense models."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from mmod.adapters import find_stack
from mmod.analysis import flops, trace
from mmod.analysis.plots import draw_routing_maps
from mmod.data.loader import create_eval_stream
from mmod.model import is_routed
from mmod.training.engine.distributed import choose_device
from mmod.training.image.config import ModelConfig, TrainConfig
from mmod.training.image.evaluate import EvalResult, evaluate
from mmod.training.image.recipe import ImageRecipe
from mmod.training.studies.config import ImageStudyConfig
from mmod.training.studies.entrants import DENSE, Entrant
from mmod.training.studies.jobs import Job
from mmod.training.studies.loop import LoopStudy, by_data, kept_shares
from mmod.training.studies.study import latencies

__all__ = ["ImageStudy", "Shallow"]


@dataclass(frozen=True, kw_only=True)
class Shallow(Entrant):
    """A dense model of fewer blocks, trained from scratch for as long as the others in all.

    Args:
        depth: Its blocks.
        epochs: Epochs of its training.
    """

    series: str = "shallow"
    is_tuned: ClassVar[bool] = False
    depth: int
    epochs: int

    def configure(self, dense: Any, tuned: Any) -> Any:
        """Return the config that trains it."""
        model = ModelConfig(dense.model.name, {**dense.model.args, "depth": self.depth})
        return dataclasses.replace(dense, model=model, epochs=self.epochs)


class ImageStudy(LoopStudy[TrainConfig, EvalResult]):
    """A study of timm's classifiers; see `Study`."""

    config: ImageStudyConfig
    recipe = ImageRecipe
    run_config = TrainConfig
    found = EvalResult
    score = "top1"
    measure = "top-1 accuracy"
    columns: ClassVar = {
        "series": ("model", ""),
        "capacity": ("capacity", "g"),
        "gflops": ("GFLOPs", ".4f"),
        "latency_ms": ("ms / image", ".3f"),
        "speedup": ("speed-up", ".2f"),
        "top1": ("top-1 %", ".2f"),
        "top1_std": ("std", ".2f"),
        "to_dense": ("to dense", ""),
        "to_control": ("to control", ""),
        "before": ("before tuning", ".2f"),
        "kept": ("kept", ".3f"),
    }

    def evaluate(self, config: TrainConfig) -> EvalResult:
        """Measure the accuracy of the model that a run starts from."""
        device = choose_device(config.device)
        stream = create_eval_stream(config.data)
        return evaluate(self.create(config).to(device), stream, device, config.precision)

    def figures(self, found: EvalResult) -> dict[str, float]:
        """Return accuracy and kept share."""
        return {"top1": found.top1, "kept": found.mean_kept}

    def entrants(self, dense: TrainConfig, tuned: TrainConfig) -> list[Entrant]:
        """Return the dense model, the routed ones, and dense ones as near to them in FLOPs as can be."""
        entrants = super().entrants(dense, tuned)
        if self.config.isoflop == "none":
            return entrants
        plain = dataclasses.replace(dense, model=ModelConfig(dense.model.name, dense.model.args))
        model = self.create(plain)
        report, depth = flops(model, _size(plain)), len(find_stack(model).blocks)
        costs = {fewer: report.rest.dense + fewer * report.blocks[0].dense for fewer in range(1, depth + 1)}
        depths = set()
        for entrant in entrants:
            routed = self.create(entrant.configure(plain, plain))
            # What thresholds cost follows from the data.
            if not by_data(routed):
                cost = flops(routed, _size(plain)).routed
                depths.add(min(costs, key=lambda fewer: abs(costs[fewer] - cost)))
        epochs = dense.epochs + (tuned.epochs if self.config.tune else 0)
        return entrants + [
            Shallow(name=f"isoflop-{fewer}", depth=fewer, epochs=epochs, share=fewer / depth)
            for fewer in sorted(depths - {depth})
        ]

    def examine(self, job: Job[TrainConfig], found: EvalResult) -> dict[str, float]:
        """Count the FLOPs of one image, and draw what a routed model keeps."""
        model = self.load(job)
        if self.config.maps and is_routed(model):
            self._draw_maps(job, model)
        return {"gflops": flops(model, _size(job.config), **kept_shares(model, found)).routed / 1e9}

    def time(self, jobs: Mapping[str, Job[TrainConfig]]) -> dict[str, dict[str, float]]:
        """Measure the latency of a batch of evaluation images, for each image."""
        device = choose_device(jobs[DENSE].config.device)
        images = _images(jobs[DENSE].config, self.config.latency_batch).to(device)
        reads = {name: partial(self.load(job), images) for name, job in jobs.items()}
        times = latencies(reads, len(images), self.config.latency_rounds, device)
        return {name: {"latency_ms": own, "speedup": ratio} for name, (own, ratio) in times.items()}

    def _draw_maps(self, job: Job[TrainConfig], model: nn.Module) -> None:
        images, stack = _images(job.config, self.config.maps), find_stack(model)
        with torch.inference_mode(), trace(model) as decisions:
            model(images.to(choose_device(job.config.device)))
        patches = next(iter(decisions.values())).score_BN.shape[1] - stack.prefix
        side = round(patches**0.5)
        low, high = images.amin(), images.amax()
        figure = draw_routing_maps((images - low) / (high - low), decisions, stack.prefix, (side, patches // side))
        folder = Path(self.config.output)
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / f"maps-{job.name}.png", dpi=150, bbox_inches="tight")


def _size(config: TrainConfig) -> tuple[int, int, int]:
    return config.data.channels, config.data.image_size, config.data.image_size


def _images(config: TrainConfig, count: int) -> torch.Tensor:
    """Return some evaluation images, spread over the classes."""
    data = dataclasses.replace(config.data, val_limit=count, batch_size=count)
    return next(iter(create_eval_stream(data).batches(0)))[0]
