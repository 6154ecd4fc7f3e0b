"""The parts of a kind of training that the loop asks for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import nn

from mmod.data.loader import BatchStream
from mmod.training.engine.config import LoopConfig
from mmod.training.engine.distributed import Process
from mmod.training.engine.run_folder import Found
from mmod.training.engine.task import Task

__all__ = ["Recipe", "Streams"]

Config = TypeVar("Config", bound=LoopConfig)
Streams = tuple[BatchStream, BatchStream]


class Recipe(ABC, Generic[Config, Found]):
    """One kind of training: what is made of a config, and how its model is judged and kept.

    Args:
        config: The run's config.

    Attributes:
        result: The dataclass that `evaluate` returns.
    """

    result: type[Found]

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    def create_models(self) -> tuple[nn.Module, nn.Module | None]:
        """Make the model to train and its frozen teacher, if any, on the CPU."""

    @abstractmethod
    def create_streams(self, process: Process, model: nn.Module) -> Streams:
        """Make the streams of training and evaluation batches of one process.

        Args:
            process: This process.
            model: The model to train.
        """

    @abstractmethod
    def create_task(self, model: nn.Module, teacher: nn.Module | None, process: Process) -> Task:
        """Make the module that the loop drives.

        Args:
            model: The model to train, on its device.
            teacher: The frozen teacher.
            process: This process.
        """

    @abstractmethod
    def evaluate(self, model: nn.Module, stream: BatchStream, process: Process, progress: bool) -> Found:
        """Judge a model.

        Args:
            model: The model, on its device.
            stream: The evaluation batches of this process.
            process: This process.
            progress: Show a bar.
        """

    @abstractmethod
    def export(self, model: nn.Module, folder: Path) -> None:
        """Write final weights into a folder that is not there yet.

        Args:
            model: The model.
            folder: Where they go.
        """

    def start_epoch(self, models: Sequence[nn.Module], epoch: int) -> None:
        """Prepare the model and its moving average for an epoch; nothing by default.

        Args:
            models: The model, and its moving average where there is one.
            epoch: Number of the epoch, from 0.
        """

    def metadata(self) -> dict[str, Any]:
        """Return what stands as JSON in the header of weight files."""
        routing = self.config.to_dict().get("routing")
        return {} if routing is None else {"routing": routing}
