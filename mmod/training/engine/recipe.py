"""A kind of training as one object: how a config becomes a model, and how that is trained, evaluated and counted."""

from __future__ import annotations

import copy
import dataclasses
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from mmod.analysis import FlopReport
from mmod.blocks import deciding_modules
from mmod.data.loader import BatchStream
from mmod.methods import Method, methods_of
from mmod.methods.read import is_added
from mmod.model import apply_
from mmod.planning.comparison import Reading
from mmod.training.engine.checkpoint import read_weights
from mmod.training.engine.config import LoopConfig, RunConfig
from mmod.training.engine.distributed import Process, choose_device
from mmod.training.engine.model import load_weights, some
from mmod.training.engine.preflight import check_schedule
from mmod.training.engine.run_folder import Result
from mmod.training.engine.task import Task

Config = TypeVar("Config", bound=RunConfig)
InLoop = TypeVar("InLoop", bound=LoopConfig)
Streams = tuple[BatchStream, BatchStream]
Judge = Callable[[Any, Any], tuple[Tensor, Tensor]]
Tick = Callable[[float], object]
"""Receives the share of a run that is done, from 0 to 1."""


def seed_draws(seed: int, step: int, rank: int) -> None:
    """Seed Python, NumPy and torch by seed, optimiser step (from 1; 0 before training) and process."""
    word = int(np.random.SeedSequence((seed, step, rank)).generate_state(1)[0])
    random.seed(word)
    np.random.seed(word)  # noqa: NPY002 (timm's mixup draws from NumPy's global generator)
    torch.manual_seed(word)


class Recipe(ABC, Generic[Config, Result]):
    """One kind of training. Every command that trains, evaluates, counts or searches a model uses it.

    Models that its methods take are on `device`.

    Attributes:
        result: The dataclass that evaluations return.
        part: The part of the model whose plan is searched.
        judge: From a model in evaluation mode and a batch of the evaluation set to loss and accuracy of every sample;
            see `mmod.analysis.audit.judges`.
    """

    result: type[Result]
    part: ClassVar[str]
    judge: Judge

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return choose_device(getattr(self.config, "device", "auto"))

    @property
    def work(self) -> float:
        """Duration of a run, in any unit that the runs of a study share."""
        return 1.0

    @property
    def has_weights(self) -> bool:
        """Whether the model starts from trained weights."""
        return self.config.model.has_weights

    @abstractmethod
    def create(self) -> nn.Module:
        """Create the model that the run starts from, methods applied, on the CPU and in training mode."""

    def load(self) -> nn.Module:
        """Create the model that the run starts from, drawn as in training, on its device and in evaluation mode."""
        seed_draws(self.config.seed, 0, 0)
        return self.create().to(self.device).eval()

    @abstractmethod
    def check_schedule(self) -> None:
        """Raise a ValueError if the run would train in vain in one process, as far as is known before data are read."""

    @abstractmethod
    def sketch(self) -> nn.Module:
        """Create the model with its methods on the meta device, from names and sizes alone.

        Raises:
            ValueError: The methods do not fit the model, as blocks that it does not have.
        """

    @abstractmethod
    def plain(self) -> Config:
        """Return the config without what training alone needs: a teacher, adapters, gradient checkpointing."""

    def started_from(self, folder: str) -> Config:
        """Return the config of the same run, started from the final weights in a run folder."""
        return dataclasses.replace(self.config, model=self.config.model.started_from(folder))

    def finished(self, folder: str) -> Config:
        """Return the config of the final model in a run folder of this kind and these settings."""
        return self.started_from(folder)

    @abstractmethod
    def fit(self, *, progress: bool = True) -> Any:
        """Train, or read the result of a finished run; see `mmod.training.fit`."""

    @abstractmethod
    def train(self, tick: Tick) -> Result:
        """Train without a bar, or read the result of a finished run; return the evaluation to report."""

    @abstractmethod
    def estimate(self) -> Any:
        """Count what the run would cost, without training; the result's text is for the terminal."""

    @abstractmethod
    def assess(self, model: nn.Module, progress: bool = False) -> Result:
        """Evaluate a model on the full evaluation set, in this process."""

    @abstractmethod
    def cost(self, model: nn.Module, kept: Mapping[str, float]) -> dict[str, float]:
        """Count the FLOPs of a sample by input: an "image", a caption ("text"), a "window" or a "prompt".

        Where the cost depends on the data, it follows from the kept shares of an evaluation, see `RoutedResult.kept`.
        """

    def report(self, model: nn.Module) -> FlopReport | None:
        """Count the FLOPs of a sample by part; None for models that `mmod.flops` does not count."""
        return None

    @abstractmethod
    def readings(self, model: nn.Module, size: int, batches: int = 1) -> dict[str, Reading]:
        """Return forward passes over at most so many batches of `size` evaluation samples, by input as in `cost`."""

    @abstractmethod
    def calibration(self, model: nn.Module, batches: int, size: int) -> Iterable[Any]:
        """Return so many batches of `size` training samples for `mmod.search_plan`, spread evenly over the set."""


class LoopParts(Recipe[InLoop, Result]):
    """What the training loop needs of a kind of training; see `Recipe`."""

    @property
    def work(self) -> float:
        """Epochs of a run."""
        return self.config.epochs

    def create(self) -> nn.Module:
        """Create the model that the run starts from; see `Recipe.create`."""
        return self.create_models()[0]

    def check_schedule(self) -> None:
        """Check warm-up and learning rate; see `Recipe.check_schedule`."""
        check_schedule(self.config, self.step_samples(1))

    def sketch(self) -> nn.Module:
        """Create the model without weights; see `Recipe.sketch`."""
        with torch.device("meta"):
            model = self.create_bare()
            for method in self.config.applied:
                apply_(model, method)
        return model

    def plain(self) -> InLoop:
        """Return the config without teacher and gradient checkpointing."""
        teacher = type(self.config.distill)(teacher="none")
        return dataclasses.replace(self.config, distill=teacher, grad_checkpointing=False)

    def assess(self, model: nn.Module, progress: bool = False) -> Result:
        """Evaluate a model on the full evaluation set; see `Recipe.assess`."""
        process = Process(0, 1, self.device)
        return self.evaluate(model, self.create_stream(process, model), process, progress)

    def check(self, world: int) -> None:
        """Check what needs neither weights nor samples, for so many processes: the schedule, and that data are there.

        Raises:
            ValueError: The run would train in vain, or data are missing.
        """
        check_schedule(self.config, self.step_samples(world))
        self.find_data()

    def check_samples(self, model: nn.Module, train: BatchStream) -> None:
        """Raise a ValueError if the model does not fit the training data; by default it does."""

    def step_samples(self, world: int) -> int:
        """Return the samples of an optimiser step over so many processes."""
        return self.config.data.batch_size * self.config.accumulate * world

    @abstractmethod
    def find_data(self) -> None:
        """Raise a ValueError if files of the training or evaluation data are missing."""

    def create_models(self) -> tuple[nn.Module, nn.Module | None]:
        """Create the model to train, on the CPU, and its frozen teacher in evaluation mode, if any.

        Raises:
            ValueError: The host library does not know the model, or the checkpoint does not fit it.
            FileNotFoundError: The checkpoint is missing.
        """
        config = self.config
        checkpoint = self.config.model.checkpoint
        model: Any = self.create_dense()
        added = {} if checkpoint is None else self.load_dense(model, checkpoint, config.applied)
        # Copied before methods are applied: a dense teacher is the starting model itself.
        teacher = self._create_teacher(model)
        names = set(model.state_dict())
        for method in config.applied[len(methods_of(model)) :]:
            apply_(model, method)
        if added:
            expected = set(model.state_dict()) - names
            if expected != set(added):
                raise ValueError(
                    f"checkpoint {checkpoint!r} was routed in another way: it lacks {some(expected - set(added))} and "
                    f"has {some(set(added) - expected)} that the model does not know"
                )
            load_weights(model, {**model.state_dict(), **added}, checkpoint)
        if config.grad_checkpointing:
            self.checkpoint_gradients(model)
        return model, teacher

    def _create_teacher(self, model: nn.Module) -> nn.Module | None:
        name = self.config.teacher()
        if name == "dense" and methods_of(model):
            if self.config.distill.teacher == "dense":
                raise ValueError(
                    f"checkpoint {self.config.model.checkpoint!r} holds no dense model that distill.teacher='dense' "
                    "could be"
                )
            name = None
        if name is None:
            return None
        teacher = copy.deepcopy(model) if name == "dense" else self.create_teacher(name, model)
        return teacher.eval().requires_grad_(False)

    def load_dense(self, model: Any, checkpoint: str, methods: Sequence[Method] = ()) -> dict[str, Tensor]:
        """Load the dense part of a checkpoint into a dense model; return the weights that methods added.

        Methods whose weights replace dense ones in the checkpoint are applied first.
        """
        state = self.read(checkpoint)
        replacing = [place for place, method in enumerate(methods) if method.replaced_in(state)]
        for method in methods[: max(replacing, default=-1) + 1]:
            apply_(model, method)
        names = set(model.state_dict())
        added = {name: value for name, value in state.items() if name not in names and is_added(name)}
        dense = {name: value for name, value in state.items() if name not in added}
        load_weights(model, self.adapted(model, dense, checkpoint), checkpoint)
        return added

    def read(self, checkpoint: str) -> dict[str, Tensor]:
        """Return the weights of a checkpoint, those that methods added among them."""
        return read_weights(checkpoint)

    def adapted(self, model: Any, state: dict[str, Tensor], checkpoint: str) -> Mapping[str, Tensor]:
        """Return the dense weights of a checkpoint by the model's names and in its shapes; unchanged by default."""
        return state

    def checkpoint_gradients(self, model: Any) -> None:
        """Make a model recompute activations in the backward pass."""
        if hasattr(model, "gradient_checkpointing_enable"):
            model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            model.set_grad_checkpointing(True)

    def create_teacher(self, name: str, model: nn.Module) -> nn.Module:
        """Create the teacher of a model, by default the dense model of a checkpoint of the same architecture."""
        teacher = self.create_bare()
        if self.load_dense(teacher, name):
            raise ValueError(f"teacher {name!r} is routed; distill from a dense model")
        return teacher

    @abstractmethod
    def create_bare(self) -> nn.Module:
        """Create the dense model with random weights, on the CPU."""

    def create_dense(self) -> nn.Module:
        """Create the dense model with the weights of the config other than its checkpoint's, on the CPU."""
        return self.create_bare()

    @abstractmethod
    def create_stream(self, process: Process, model: nn.Module, seed: int | None = None) -> BatchStream:
        """Create the stream of evaluation batches of one process, or with a seed of shuffled training batches."""

    def create_streams(self, process: Process, model: nn.Module) -> Streams:
        """Create the streams of training and evaluation batches of one process."""
        return self.create_stream(process, model, self.config.seed), self.create_stream(process, model)

    @abstractmethod
    def create_task(self, model: nn.Module, teacher: nn.Module | None, process: Process) -> Task:
        """Create the training objective of a model, on its device, and its frozen teacher."""

    def task_options(self, teacher: nn.Module | None) -> dict[str, Any]:
        """Return the arguments that all tasks share; see `Task`."""
        return {
            "teacher": teacher,
            "distill_weight": self.config.distill.weight,
            "auxiliary": any(method.has_loss for method in self.config.applied),
            "precision": self.config.precision,
        }

    @abstractmethod
    def evaluate(self, model: nn.Module, stream: BatchStream, process: Process, progress: bool) -> Result:
        """Evaluate a model, on its device, over the evaluation batches of this process."""

    @abstractmethod
    def export(self, model: nn.Module, folder: Path) -> None:
        """Write the final weights into a folder that does not exist yet."""

    def start_epoch(self, models: Sequence[nn.Module], epoch: int) -> None:
        """Prepare the model, and its moving average if there is one, for an epoch (from 0); nothing by default."""


def steps_of_epoch(config: LoopConfig, train: BatchStream) -> int:
    """Return the number of optimiser steps per epoch."""
    steps = -(-train.steps_per_epoch // config.accumulate)
    return steps if config.epoch_steps is None else min(steps, config.epoch_steps)


def by_data(model: nn.Module) -> bool:
    """Return whether the cost of a forward pass depends on the data."""
    return any(module.cost_follows_data for module in deciding_modules(model).values())


def needed_shares(model: nn.Module, kept: Mapping[str, float]) -> Mapping[str, float] | None:
    """Return kept shares if the cost of the model depends on the data; None otherwise."""
    return kept if by_data(model) else None
