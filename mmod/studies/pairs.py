"""The study of image-text models: retrieval and zero-shot accuracy against FLOPs and latency of both towers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mmod.studies.config import PairsStudyConfig
from mmod.studies.entrants import DENSE
from mmod.studies.jobs import Job
from mmod.studies.study import Study, latencies
from mmod.training.engine.distributed import choose_device
from mmod.training.pairs.config import RoutingParts, TrainConfig
from mmod.training.pairs.evaluate import EvalResult
from mmod.training.pairs.recipe import PairsRecipe

__all__ = ["PairsStudy"]


class PairsStudy(Study[TrainConfig, EvalResult]):
    """A study of open_clip's models; see `Study`."""

    config: PairsStudyConfig
    recipe = PairsRecipe
    run_config = TrainConfig
    found = EvalResult
    score = "recall1"
    measure = "recall at 1, mean of both directions,"
    columns: ClassVar = {
        "name": ("model", ""),
        "capacity": ("capacity", "g"),
        "image_gflops": ("GFLOPs / image", ".4f"),
        "text_gflops": ("GFLOPs / caption", ".4f"),
        "image_ms": ("ms / image", ".3f"),
        "text_ms": ("ms / caption", ".3f"),
        "image_speedup": ("image speed-up", ".2f"),
        "text_speedup": ("text speed-up", ".2f"),
        "recall1": ("R@1 %", ".2f"),
        "recall1_std": ("std", ".2f"),
        "to_dense": ("to dense", ""),
        "to_control": ("to control", ""),
        "recall5": ("R@5 %", ".2f"),
        "zero_shot": ("zero-shot %", ".2f"),
        "before": ("R@1 before tuning", ".2f"),
        "kept": ("kept", ".3f"),
    }

    def routing(self, fields: dict[str, Any], capacity: float | None) -> RoutingParts:
        """Return the routing of both towers at a capacity."""
        return RoutingParts(**{tower: super(PairsStudy, self).routing(own, capacity) for tower, own in fields.items()})

    def figures(self, found: EvalResult) -> dict[str, float]:
        """Return recall, zero-shot accuracy where it was measured, and kept share."""
        zero_shot = {} if found.zero_shot_top1 is None else {"zero_shot": found.zero_shot_top1}
        return {"recall1": found.recall1, "recall5": found.recall5, **zero_shot, "kept": found.mean_kept}

    def examine(self, job: Job[TrainConfig], found: EvalResult) -> dict[str, float]:
        """Count the FLOPs of one image and of one caption."""
        cost = self.recipe(job.config).cost(self.load(job), found)
        return {f"{tower}_gflops": flops / 1e9 for tower, flops in cost.items()}

    def time(self, jobs: Mapping[str, Job[TrainConfig]]) -> dict[str, dict[str, float]]:
        """Measure the latency of each tower on a batch, for each image and caption."""
        count, rounds = self.config.latency_batch, self.config.latency_rounds
        readings = {name: self.recipe(job.config).readings(self.load(job), count) for name, job in jobs.items()}
        costs: dict[str, dict[str, float]] = {name: {} for name in jobs}
        device = choose_device(jobs[DENSE].config.device)
        for tower, reading in readings[DENSE].items():
            calls = {name: own[tower].call for name, own in readings.items()}
            for name, (ms, ratio) in latencies(calls, reading.samples, rounds, device).items():
                costs[name] |= {f"{tower}_ms": ms, f"{tower}_speedup": ratio}
        return costs

    @property
    def costs(self) -> dict[str, str]:
        """FLOPs and latency of a pair."""
        return {"gflops": "GFLOPs per pair", "latency_ms": f"ms per pair, batch {self.config.latency_batch}"}

    def complete(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows with what a pair costs: an image and its caption."""
        return [
            {**row, "gflops": row["image_gflops"] + row["text_gflops"]}
            | ({"latency_ms": row["image_ms"] + row["text_ms"]} if "image_ms" in row else {})
            for row in rows
        ]
