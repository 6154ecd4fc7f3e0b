"""A kind of training as one object: how a config becomes a model, and how that is trained, judged and counted."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from mmod.analysis import FlopReport
from mmod.blocks import deciding_modules
from mmod.data.loader import BatchStream
from mmod.training.engine.config import LoopConfig, RunConfig
from mmod.training.engine.distributed import Process, choose_device
from mmod.training.engine.evaluate import RoutedResult
from mmod.training.engine.run_folder import Found
from mmod.training.engine.task import Task

__all__ = ["LoopRecipe", "Reading", "Recipe", "Streams", "Tick", "by_data", "kept_shares"]

Config = TypeVar("Config", bound=RunConfig)
InLoop = TypeVar("InLoop", bound=LoopConfig)
Streams = tuple[BatchStream, BatchStream]
Tick = Callable[[float], object]
"""Told the share of a run that is done, from 0 to 1."""


class Reading(NamedTuple):
    """A forward pass that is timed.

    Attributes:
        call: Runs it.
        samples: Samples that it reads.
    """

    call: Callable[[], object]
    samples: int


class Recipe(ABC, Generic[Config, Found]):
    """One kind of training. Every command that trains, judges, counts or searches a model works through it.

    Args:
        config: The run's config.

    Attributes:
        result: The dataclass that evaluations return.
        part: The part of the model whose plan is searched.
    """

    result: type[Found]
    part: ClassVar[str]

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return choose_device(getattr(self.config, "device", "auto"))

    @property
    def work(self) -> float:
        """How long a run takes, in any unit that runs of one study share."""
        return 1.0

    @property
    @abstractmethod
    def has_weights(self) -> bool:
        """Whether the model starts from trained weights."""

    @abstractmethod
    def create(self) -> nn.Module:
        """Make the model that the run starts from, changed as its config says, on the CPU and in training mode."""

    def load(self) -> nn.Module:
        """Make the model that the run starts from, on its device and in evaluation mode."""
        return self.create().to(self.device).eval()

    @abstractmethod
    def plain(self) -> Config:
        """Return the config without what training alone needs: a teacher, adapters, gradient checkpointing."""

    @abstractmethod
    def started_from(self, folder: str) -> Config:
        """Return the config of the same run from the final weights of a run.

        Args:
            folder: Its folder.
        """

    def finished(self, folder: str) -> Config:
        """Return the config of the final model of a run of this kind and these settings.

        Args:
            folder: Its folder.
        """
        return self.started_from(folder)

    @abstractmethod
    def train(self, tick: Tick) -> Found:
        """Train without a bar, or read the result of a finished run; return what is to be reported.

        Args:
            tick: Told how much is done.
        """

    @abstractmethod
    def assess(self, model: nn.Module, progress: bool = False) -> Found:
        """Evaluate a model on the whole evaluation set, in this process.

        Args:
            model: The model, on its device.
            progress: Show a bar.
        """

    @abstractmethod
    def judge(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return loss and accuracy of each sample of a batch; see `mmod.analysis.audit.judges`.

        Args:
            model: The model, in evaluation mode.
            batch: A batch of the evaluation set.
        """

    @abstractmethod
    def cost(self, model: nn.Module, found: Found) -> dict[str, float]:
        """Count the FLOPs of a sample by what is read: an "image", a caption ("text"), a "window" or a "prompt".

        Args:
            model: The model.
            found: Its evaluation, for models whose cost follows from the data.
        """

    def report(self, model: nn.Module) -> FlopReport | None:
        """Count the FLOPs of a sample by part; None for what `mmod.flops` does not count.

        Args:
            model: The model.
        """
        return None

    @abstractmethod
    def readings(self, model: nn.Module, count: int) -> dict[str, Reading]:
        """Return passes over the first evaluation samples, by what is read as in `cost`.

        Args:
            model: The model, on its device.
            count: Samples to read; there may be fewer.
        """

    @abstractmethod
    def calibration(self, model: nn.Module, batches: int, size: int) -> Iterable[Any]:
        """Return batches of training data as `mmod.search_plan` takes them, spread evenly over the set.

        Args:
            model: The model, on its device.
            batches: How many.
            size: Samples in each.
        """


class LoopRecipe(Recipe[InLoop, Found]):
    """A kind of training that the loop does, and the parts that the loop asks for; see `Recipe`."""

    @property
    def work(self) -> float:
        """Epochs of a run."""
        return self.config.epochs

    @property
    def has_weights(self) -> bool:
        """Whether the model starts from a checkpoint or from published weights."""
        return self.config.model.has_weights

    def create(self) -> nn.Module:
        """Make the model that the run starts from; see `Recipe.create`."""
        return self.create_models()[0]

    def plain(self) -> InLoop:
        """Return the config without teacher and gradient checkpointing."""
        teacher = type(self.config.distill)(teacher="none")
        return dataclasses.replace(self.config, distill=teacher, grad_checkpointing=False)

    def started_from(self, folder: str) -> InLoop:
        """Return the config of the same run from the final weights of a run; see `Recipe.started_from`."""
        return dataclasses.replace(self.config, model=self.config.model.started_from(folder))

    def assess(self, model: nn.Module, progress: bool = False) -> Found:
        """Evaluate a model on the whole evaluation set; see `Recipe.assess`."""
        process = Process(0, 1, self.device)
        return self.evaluate(model, self.create_eval_stream(process, model), process, progress)

    @abstractmethod
    def create_models(self) -> tuple[nn.Module, nn.Module | None]:
        """Make the model to train and its frozen teacher, if any, on the CPU."""

    @abstractmethod
    def create_train_stream(self, process: Process, model: nn.Module) -> BatchStream:
        """Make the stream of training batches of one process.

        Args:
            process: This process.
            model: The model to train.
        """

    @abstractmethod
    def create_eval_stream(self, process: Process, model: nn.Module) -> BatchStream:
        """Make the stream of evaluation batches of one process.

        Args:
            process: This process.
            model: The model.
        """

    def create_streams(self, process: Process, model: nn.Module) -> Streams:
        """Make the streams of training and evaluation batches of one process."""
        return self.create_train_stream(process, model), self.create_eval_stream(process, model)

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


def by_data(model: nn.Module) -> bool:
    """Return whether the data decides what a pass of a model costs."""
    return any(module.cost_follows_data for module in deciding_modules(model).values())


def kept_shares(model: nn.Module, found: RoutedResult) -> dict[str, Any]:
    """Return the argument `kept` of `mmod.flops` where what a model costs follows from the data."""
    return {"kept": found.kept} if by_data(model) else {}
