"""The study of image-text models: retrieval and zero-shot accuracy against FLOPs and latency of both towers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import nn

from mmod.studies.config import PairsStudyConfig
from mmod.studies.costs import Costs
from mmod.studies.jobs import Run
from mmod.studies.report import Report
from mmod.studies.scorer import Scorer
from mmod.studies.study import Study
from mmod.training.engine.kind import Kind
from mmod.training.pairs.config import TrainConfig
from mmod.training.pairs.evaluate import EvalResult
from mmod.training.pairs.kind import PairsKind

_COLUMNS = (
    "name",
    "capacity",
    "image_gflops",
    "text_gflops",
    "image_ms",
    "text_ms",
    "image_speedup",
    "text_speedup",
    "recall1",
    "recall1_std",
    "to_dense",
    "to_control",
    "recall5",
    "zero_shot_top1",
    "before",
    "kept",
)


class PairsCosts(Costs[PairsStudyConfig]):
    """The costs of an image, of a caption, and of both."""

    times: ClassVar = {"image": ("image_ms", "image_speedup"), "text": ("text_ms", "text_speedup")}

    @property
    def axes(self) -> dict[str, str]:
        """FLOPs and latency of a pair."""
        return {"gflops": "GFLOPs per pair", "latency_ms": f"ms per pair, batch {self.config.latency_batch}"}

    def count(self, run: Run[TrainConfig], model: nn.Module, evaluation: EvalResult) -> dict[str, float]:
        """Count the FLOPs of one image, of one caption, and of both."""
        cost = PairsKind(run.config).cost(model, evaluation.kept)
        by_tower = {f"{tower}_gflops": flops / 1e9 for tower, flops in cost.items()}
        return {**by_tower, "gflops": sum(by_tower.values())}

    def time(
        self, kinds: Mapping[str, Kind], models: Mapping[str, nn.Module], *, shown: bool
    ) -> dict[str, dict[str, float]]:
        """Measure the latency of both towers."""
        figures = super().time(kinds, models, shown=shown)
        return {name: {**ms, "latency_ms": ms["image_ms"] + ms["text_ms"]} for name, ms in figures.items()}


class PairsStudy(Study):
    """A study of open_clip's models; see `Study`."""

    def __init__(self, config: PairsStudyConfig) -> None:
        scorer = Scorer(config, "recall1", "recall at 1, mean of both directions,")
        costs = PairsCosts(config)
        super().__init__(config, TrainConfig, scorer, costs, Report(config, scorer, costs, _COLUMNS))
