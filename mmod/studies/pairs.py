"""Studies of image-text models: retrieval and zero-shot accuracy against FLOPs and latency of both towers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from mmod.compare.table import Measured
from mmod.io.tables import Column
from mmod.studies.config import PairsStudyConfig
from mmod.studies.kind import Costs, Facts, StudyKind
from mmod.studies.report import named_columns, tell_verdict
from mmod.studies.runs import Run
from mmod.training.engine.kind import Kind
from mmod.training.pairs.config import TrainConfig
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


def _columns(config: PairsStudyConfig, facts: Facts) -> dict[str, Column]:
    return named_columns(_COLUMNS)


def _axes(config: PairsStudyConfig) -> dict[str, str]:
    return {"gflops": "GFLOPs per pair", "latency_ms": f"ms per pair, batch {config.latency_batch}"}


def _count(config: PairsStudyConfig, run: Run[TrainConfig], model: nn.Module, rows: Measured) -> dict[str, float]:
    """Count the FLOPs of one image, of one caption, and of both."""
    cost = PairsKind(run.config).cost(model, rows.kept)
    by_tower = {f"{tower}_gflops": flops / 1e9 for tower, flops in cost.items()}
    return {**by_tower, "gflops": sum(by_tower.values())}


def _add_times(
    config: PairsStudyConfig, kinds: Mapping[str, Kind], models: Mapping[str, nn.Module], times: Costs
) -> Costs:
    """Add the latency of a pair."""
    return {name: {**ms, "latency_ms": ms["image_ms"] + ms["text_ms"]} for name, ms in times.items()}


STUDY = StudyKind(
    run_config=TrainConfig,
    measures={"recall1": "recall at 1, mean of both directions,"},
    columns=_columns,
    axes=_axes,
    times={"image": ("image_ms", "image_speedup"), "text": ("text_ms", "text_speedup")},
    count=_count,
    complete_times=_add_times,
    tell=tell_verdict,
)
"""Models of open_clip."""
