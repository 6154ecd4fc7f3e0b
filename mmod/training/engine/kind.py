"""What a kind of training is: the functions that the loop, evaluations, audits, plans and studies call."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from mmod.analysis.timing import DRAWS, Reading, reading_of
from mmod.data.labels import Classes
from mmod.data.loader import BatchStream
from mmod.io.environment import choose_device
from mmod.lazy import import_path
from mmod.methods import Method
from mmod.training.engine.config import LoopConfig, RunConfig
from mmod.training.engine.distributed import Process
from mmod.training.engine.evaluate import BatchStore, Columns, Evaluated, RoutedResult
from mmod.training.engine.task import Task

COUNTED = 8
"""Samples of which costs are counted: one alone may not be readable."""
# Samples that are timed, about, where two draws are no more.
_TIMED = 160
Streams = tuple[BatchStream, BatchStream]


class Step(NamedTuple):
    """An optimiser step of a run that was just done; what `after_step` of `mmod.training.fit` is called with.

    Attributes:
        done: Number of steps done; a run that resumes goes on with the step after its checkpoint's.
        total: Number of steps of the run.
        model: The model in training.
        average: Its moving average; None without one.
        optimizer: The optimiser, with the learning rate of each of its groups.
    """

    done: int
    total: int
    model: nn.Module
    average: nn.Module | None
    optimizer: torch.optim.Optimizer


AfterStep = Callable[[Step], object]
"""A function that a run calls after each optimiser step, in every process."""


class ModelInput(NamedTuple):
    """What a model reads, and what is counted, timed and calibrated of it.

    Attributes:
        batches: Batches on the model's device. A plan is searched on them, or where a model reads several inputs, on
            mappings of these by name.
        samples: Number of samples in each of them; at the end of training data a batch may have fewer.
        read: A forward pass over a batch.
        flops: The FLOPs of one sample. Where these depend on the data, they follow from the kept shares of an
            evaluation, see `RoutedResult.kept`.
    """

    batches: Iterable[Any]
    samples: int
    read: Callable[[object], object]
    flops: Callable[[Mapping[str, float]], float]


class Kind(Protocol):
    """A kind of training, made from the config of a run. Models that its functions take are on the run's device.

    A kind is a frozen dataclass that inherits nothing; all else is a function over a kind. `mmod.training.kinds` lists
    the kinds.
    """

    # What `dataclasses.replace` asks of a dataclass.
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def config(self) -> RunConfig:
        """The config of the run."""

    @property
    def result(self) -> type[RoutedResult]:
        """The dataclass that evaluations return, a `RoutedResult`."""

    def prepare(self, weights: bool = True) -> nn.Module:
        """Create the dense model with published weights, or random ones, on the CPU; it fits the data.

        The config names the model, which the kind opens by `mmod.open_model`: so nobody opens one beside its config.

        Without `weights` it is a sketch or a teacher's: names and sizes count alone.
        """

    def evaluate(self, model: nn.Module, batch: Any) -> Columns:
        """Return the rows of a batch of the evaluation set, on the model's device, of a model in evaluation mode."""

    def score(self, model: nn.Module, progress: bool = False, store: BatchStore | None = None) -> Evaluated:
        """Evaluate a model on the full evaluation set, in this process.

        It gets the model, and not only the rows of `evaluate`: images may be evaluated at several capacities, pairs by
        classes that are no pairs, and conversations by answers that the model generates.

        Args:
            store: Keeps what is computed of each batch; None keeps nothing.
        """

    def inputs(self, model: nn.Module, size: int, batches: int = 1, training: bool = False) -> dict[str, ModelInput]:
        """Return what the model reads by name: an "image", a caption ("text"), a "window" or a "prompt".

        Args:
            size: Samples in a batch, where the set has as many.
            batches: At most so many; of evaluation samples one is enough, and others are different samples.
            training: Take training samples, prepared as for evaluation and spread evenly over the set.
        """


class LoopKind(Kind, Protocol):
    """A kind that the training loop trains."""

    @property
    def config(self) -> LoopConfig:
        """The config of the run."""

    def data(
        self, model: nn.Module, process: Process, seed: int | None = None, classes: Classes | None = None
    ) -> BatchStream:
        """Open the evaluation samples of one process, or with a seed the shuffled training samples.

        Raise a ValueError unless the model fits them. The run's config says which, so no other is passed.

        Args:
            classes: Those of the training data beside which a run is evaluated, where these have any.
        """

    def score(
        self, model: nn.Module, progress: bool = False, store: BatchStore | None = None, data: BatchStream | None = None
    ) -> Evaluated:
        """Evaluate a model on samples of this process, as `data` opened them; None for all; see `Kind.score`."""

    def load(self, model: nn.Module, checkpoint: str, methods: Sequence[Method] | None) -> dict[str, Tensor]:
        """Load the dense part of a checkpoint into a dense model; return the weights that methods added.

        Args:
            methods: The run's, of which some replace dense weights; None for a teacher, which is taken as it is.
        """

    def task(self, model: nn.Module, teacher: nn.Module | None) -> Task:
        """Create the training objective of a model, on its device, and its frozen teacher.

        It is a module, and no function of model and batch: distributed training wraps one, the teacher moves with it,
        and batches of a step may need each other, as those of pairs do, which share their negatives.
        """

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write a model into a folder that does not exist yet, as its host reads it, or `mmod.load_pretrained`."""


def device_of(kind: Kind) -> torch.device:
    """Return the device of a run's model."""
    return choose_device(getattr(kind.config, "device", "auto"))


def create(kind: Kind) -> nn.Module:
    """Create the model that a run starts from, methods applied, on the CPU and in training mode."""
    return import_path(f"{kind.config.engine}.start:create")(kind)


def load(kind: Kind) -> nn.Module:
    """Create the model that a run starts from, drawn as in training, on its device and in evaluation mode."""
    # A new head is drawn here, with the draws that `fit` gives it.
    seed_draws(kind.config.seed, 0, 0)
    return create(kind).to(device_of(kind)).eval()


def cost(kind: Kind, model: nn.Module, kept: Mapping[str, float]) -> dict[str, float]:
    """Count the FLOPs of a sample by input, from the kept shares of an evaluation where they depend on the data."""
    return {name: one.flops(kept) for name, one in kind.inputs(model, COUNTED).items()}


def readings(kind: Kind, model: nn.Module, size: int, batches: int = 1) -> dict[str, Reading]:
    """Return forward passes over at most so many batches of `size` evaluation samples, by input; see `Reading`."""
    # A few large batches are many samples, which stay in memory.
    draws = max(2, min(DRAWS, _TIMED // (size * batches)))
    timed = {}
    for name, one in kind.inputs(model, size, batches * draws).items():
        parts = list(one.batches)
        number = min(batches, len(parts))
        read = [parts[start : start + number] for start in range(0, len(parts) - number + 1, number)]
        timed[name] = reading_of(one.read, read, number * one.samples)
    return timed


def calibration(kind: Kind, model: nn.Module, batches: int, size: int) -> Iterable[object]:
    """Return so many batches of `size` training samples for `mmod.search_plan`, spread evenly over the set."""
    inputs = kind.inputs(model, size, batches, training=True)
    by_name = {name: one.batches for name, one in inputs.items()}
    if len(by_name) == 1:
        return next(iter(by_name.values()))
    return [dict(zip(by_name, together)) for together in zip(*by_name.values())]


def evaluation_data(kind: LoopKind, model: nn.Module) -> BatchStream:
    """Open the evaluation samples, all of them in this process: one command evaluates, also where several trained."""
    return kind.data(model, Process(0, 1, device_of(kind)))


def seed_draws(seed: int, step: int, rank: int) -> None:
    """Seed Python, NumPy and torch by seed, optimiser step (from 1; 0 before training) and process."""
    # Hashed: sums such as `seed + step` would repeat the draws of neighbouring seeds.
    word = int(np.random.SeedSequence((seed, step, rank)).generate_state(1)[0])
    random.seed(word)
    np.random.seed(word)  # noqa: NPY002 (timm's mixup draws from NumPy's global generator)
    torch.manual_seed(word)
