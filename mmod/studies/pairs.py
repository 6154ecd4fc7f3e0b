"""Studies of image-text models: retrieval and zero-shot accuracy against FLOPs and latency of both towers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from mmod.analysis.table import Measured, Table
from mmod.studies.kind import Facts, Lines, Runs, StudyKind, Told
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


@dataclass(frozen=True)
class PairsStudy(StudyKind):
    """A study of models of open_clip."""

    times: ClassVar = {"image": ("image_ms", "image_speedup"), "text": ("text_ms", "text_speedup")}

    def count(self, run: Run, model: nn.Module, rows: Measured) -> dict[str, float]:
        """Count the FLOPs of one image, of one caption, and of both."""
        # By tower: what both save together hides which of them does.
        costs = cost(run.start, model, rows.kept)
        by_tower = {f"{tower}_gflops": flops / 1e9 for tower, flops in costs.items()}
        return {**by_tower, "gflops": sum(by_tower.values())}

    def derive(self, times: Mapping[str, dict[str, float]]) -> None:
        """Add the latency of a pair."""
        for columns in times.values():
            # The towers run one after the other, and no timed pass has both.
            columns["latency_ms"] = columns["image_ms"] + columns["text_ms"]

    def tell(self, table: Table, runs: Runs, rows: Lines, facts: Facts) -> Told:
        """Say which models are significantly better."""
        axes = {"gflops": "GFLOPs per pair", "latency_ms": f"ms per pair, batch {self.evaluation.batch}"}
        return Told(
            rows=rows,
            columns=named_columns(_COLUMNS),
            measure="recall at 1, mean of both directions,",
            axes=axes,
            parts=[significance(table, self.evaluation.score, list(runs))],
        )
