"""The study of image-text models: retrieval and zero-shot accuracy against FLOPs and latency of both towers."""

from __future__ import annotations

from typing import Any, ClassVar

from mmod.studies.config import PairsStudyConfig
from mmod.studies.jobs import Run
from mmod.studies.study import Study
from mmod.training.pairs.config import TrainConfig
from mmod.training.pairs.evaluate import EvalResult
from mmod.training.pairs.recipe import PairsRecipe


class PairsStudy(Study[TrainConfig, EvalResult]):
    """A study of open_clip's models; see `Study`."""

    config: PairsStudyConfig
    recipe = PairsRecipe
    run_config = TrainConfig
    score, measure = "recall1", "recall at 1, mean of both directions,"
    times: ClassVar = {"image": ("image_ms", "image_speedup"), "text": ("text_ms", "text_speedup")}
    columns = (
        "name", "capacity", "image_gflops", "text_gflops", "image_ms", "text_ms", "image_speedup", "text_speedup",
        "recall1", "recall1_std", "to_dense", "to_control", "recall5", "zero_shot_top1", "before", "kept",
    )  # fmt: skip

    def routing(self, fields: dict[str, Any], capacity: float | None) -> dict[str, Any]:
        """Return the routing of both towers at a capacity."""
        routing = super().routing
        return {tower: routing(settings, capacity) for tower, settings in fields.items()}

    def examine(self, job: Run[TrainConfig], evaluation: EvalResult) -> dict[str, float]:
        """Count the FLOPs of one image and of one caption."""
        cost = self.recipe(job.config).cost(self.load(job), evaluation.kept)
        return {f"{tower}_gflops": flops / 1e9 for tower, flops in cost.items()}

    @property
    def costs(self) -> dict[str, str]:
        """FLOPs and latency of a pair."""
        return {"gflops": "GFLOPs per pair", "latency_ms": f"ms per pair, batch {self.config.latency_batch}"}

    def complete(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows with the costs of a pair, an image and its caption."""
        return [
            {**row, "gflops": row["image_gflops"] + row["text_gflops"]}
            | ({"latency_ms": row["image_ms"] + row["text_ms"]} if "image_ms" in row else {})
            for row in rows
        ]
