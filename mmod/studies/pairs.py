"""Studies of image-text models: retrieval and zero-shot accuracy against FLOPs and latency of both towers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from mmod.analysis.table import Measured, Table
from mmod.studies.kind import Facts, Lines, Runs, Study, StudyKind, Told
from mmod.studies.report import named_columns, significance
from mmod.studies.runs import Run
from mmod.training.engine.kind import cost

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


def _count(study: Study, run: Run, model: nn.Module, rows: Measured) -> dict[str, float]:
    """Count the FLOPs of one image, of one caption, and of both."""
    # By tower: what both save together hides which of them does.
    costs = cost(run.start, model, rows.kept)
    by_tower = {f"{tower}_gflops": flops / 1e9 for tower, flops in costs.items()}
    return {**by_tower, "gflops": sum(by_tower.values())}


def _latency_of_pair(columns: Mapping[str, float]) -> dict[str, float]:
    """Return the latency of a pair."""
    # The towers run one after the other, and no timed pass has both.
    return {"latency_ms": columns["image_ms"] + columns["text_ms"]}


def _tell(study: Study, table: Table, runs: Runs, rows: Lines, facts: Facts) -> Told:
    """Say which models are significantly better."""
    axes = {"gflops": "GFLOPs per pair", "latency_ms": f"ms per pair, batch {study.config.latency_batch}"}
    return Told(
        rows=rows,
        columns=named_columns(_COLUMNS),
        measure="recall at 1, mean of both directions,",
        axes=axes,
        parts=[significance(table, study.config.score, list(runs))],
    )


STUDY = StudyKind(
    times={"image": ("image_ms", "image_speedup"), "text": ("text_ms", "text_speedup")},
    count=_count,
    tell=_tell,
    derive=_latency_of_pair,
)
"""A study of models of open_clip."""
