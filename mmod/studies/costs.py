"""What the models of a study cost: counted for every model, and timed side by side at the end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn

from mmod.analysis.timing import relative_times
from mmod.planning.candidate import DENSE, Candidate
from mmod.planning.comparison import Reading, time_models
from mmod.studies.config import StudyConfig
from mmod.studies.jobs import Run
from mmod.training.engine.kind import Kind, device_of

AnyStudyConfig = TypeVar("AnyStudyConfig", bound=StudyConfig)
ByModel = Mapping[str, Mapping[str, float]]
"""The costs of a model, by its name and that of the cost."""


class Costs(ABC, Generic[AnyStudyConfig]):
    """Counts and measures the costs of one kind of model.

    Attributes:
        times: Columns of time per sample and of speed-up over the dense model, by input as in `Kind.readings`.
    """

    times: ClassVar[Mapping[str, tuple[str, str]]]

    def __init__(self, config: AnyStudyConfig) -> None:
        self.config = config

    @property
    @abstractmethod
    def axes(self) -> dict[str, str]:
        """Columns of costs that the score is drawn against, to the titles of their axes; times name their batch."""

    @abstractmethod
    def count(self, run: Run[Any], model: nn.Module, evaluation: Any) -> dict[str, float]:
        """Count the costs of a finished model, and draw the tokens it keeps."""

    def rivals(self, costs: ByModel, candidates: Mapping[str, Candidate]) -> dict[str, dict[str, list[str]]]:
        """Return the models that every model is compared with where they are as cheap, by a suffix of columns."""
        return {}

    def time(
        self, kinds: Mapping[str, Kind], models: Mapping[str, nn.Module], *, shown: bool
    ) -> dict[str, dict[str, float]]:
        """Measure the latency of final models in batches of several sizes, all in turns; return figures by model."""
        readings: dict[str, dict[tuple[str, int], Reading]] = {name: {} for name in models}
        for name, model in models.items():
            for size in self.batch_sizes:
                # As many samples at every size.
                passes = kinds[name].readings(model, size, max(self.batch_sizes) // size)
                readings[name] |= {(inputs, size): reading for inputs, reading in passes.items()}
        rounds = self.config.latency_rounds
        with torch.inference_mode():
            times = time_models(readings, rounds=rounds, device=device_of(kinds[DENSE]), shown=shown)
        figures: dict[str, dict[str, float]] = {name: {} for name in models}
        for (inputs, size), by_model in times.items():
            ms, speedup = self.time_columns(inputs, size)
            for name, (total, ratio) in relative_times(by_model, DENSE).items():
                figures[name] |= {ms: total / readings[name][inputs, size].samples, speedup: ratio}
        return figures

    @property
    def batch_sizes(self) -> list[int]:
        """The batch sizes whose latency is measured."""
        return sorted({*self.config.latency_batches, self.config.latency_batch})

    def time_columns(self, inputs: str, size: int) -> tuple[str, str]:
        """Return the names of a batch size's columns of time and of speed-up over the dense model."""
        ms, speedup = self.times[inputs]
        further = "" if size == self.config.latency_batch else f"_b{size}"
        return f"{ms}{further}", f"{speedup}{further}"
