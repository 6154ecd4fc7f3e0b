"""The cost of a run of the training loop, before it starts: steps, parameters, FLOPs and memory."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from mmod.analysis.memory import ActivationMemory
from mmod.data.stream import BatchStream
from mmod.training.engine.distributed import Process
from mmod.training.engine.evaluate import check_evaluation, decisions_of, kept_means, kept_rows
from mmod.training.engine.kind import LoopKind, cost, device_of
from mmod.training.engine.optim import create_optimizer, create_schedule
from mmod.training.engine.start import begin
from mmod.training.engine.task import Task

# Mixup needs a pair of samples.
_SAMPLES = 2
# Training samples that are read to find broken ones; those of evaluation are all read.
_READ = 512


@dataclass(frozen=True, kw_only=True)
class RunEstimate:
    """The cost of a run; its text has several lines.

    Args:
        batch: Samples per step over all processes.
        flops: Forward FLOPs of a sample, by input.
        weight_bytes: Memory of a process for the weights, with those of the teacher and the moving average.
        training_bytes: Memory of a process for gradients and two moments.
        activation_bytes: Memory held for the backward pass of one batch of one process.
        full_bytes: Memory of a process for the whole weights that it evaluates besides its shards; 0 without shards.
        reading: How many samples were read, and how many of them are broken; empty where none is read ahead.
    """

    epochs: float
    steps: int
    batch: int
    flops: dict[str, float]
    parameters: int
    trained: int
    processes: int
    weight_bytes: int
    training_bytes: int
    activation_bytes: int
    full_bytes: int = 0
    reading: str = ""

    @property
    def step_flops(self) -> float:
        """FLOPs of an optimiser step; a backward pass counts as two forward passes."""
        return 3 * self.batch * sum(self.flops.values())

    def hours(self, rate: float) -> float:
        """Return the hours of training at a rate in TFLOP/s of each process."""
        return self.steps * self.step_flops / (self.processes * rate * 1e12) / 3600

    def __str__(self) -> str:
        by_input = [f"{name} {count / 1e9:.4g}" for name, count in self.flops.items()]
        step = f"{self.step_flops / 1e12:.4g}"
        memory = (
            f"memory of one process: weights {_size(self.weight_bytes)}, gradients and moments "
            f"{_size(self.training_bytes)}, activations about {_size(self.activation_bytes)}"
        )
        if self.full_bytes:
            memory += f"; {_size(self.full_bytes)} more for whole weights in evaluations"
        lines = [
            f"epochs: {self.epochs:.4g}, steps: {self.steps} of {self.batch} samples",
            f"forward GFLOPs of a sample: {', '.join(by_input)}; about {step} TFLOPs a step",
            f"{self.parameters:,} parameters, {self.trained:,} trained",
            memory,
        ]
        if self.reading:
            lines.append(self.reading)
        return "\n".join(lines)


def _size(count: int) -> str:
    if count >= 2**28:
        return f"{count / 2**30:.2f} GiB"
    return f"{count / 2**20:.1f} MiB"


def estimate(kind: LoopKind) -> RunEstimate:
    """Create the model and the data of a run, and count what training would cost.

    Activations are measured in one forward pass of two samples, and the shares of tokens that a threshold keeps, too.
    """
    config = kind.config
    device = device_of(kind)
    world = int(os.environ.get("WORLD_SIZE", 1))
    # As the first of the run's processes, by whose number the steps of an epoch go; refuses what training would.
    model, teacher, (stream, test) = begin(kind, Process(0, world, device))
    model.to(device)
    check_evaluation(test, config.data, shown=True)
    batches_read = math.ceil(_READ / stream.batch_size)
    stream.report.add(stream.faults(shown=True, batches=batches_read))
    batch = config.step_samples(world)
    epoch_steps = config.steps_of_epoch(stream.steps_per_epoch)
    optimizer = create_optimizer(config.optim, model, batch)
    _, epochs = create_schedule(config, optimizer, epoch_steps)

    # In training mode and with the teacher: both hold activations that an evaluation does not.
    task = kind.task(model, teacher).to(device).train()
    inputs, targets = next(iter(stream.batches(0)))[:2]
    inputs, targets = inputs[:_SAMPLES], targets[:_SAMPLES]
    with decisions_of(model) as decisions:
        held = _held_bytes(task, inputs, targets, device)

    weights = bytes_of(model.parameters())
    weight_bytes = weights if config.ema is None else 2 * weights
    shares = 1
    full_bytes = 0
    if config.distributed.sharded:
        shares = world
        full_bytes = weights
    teacher_bytes = 0 if teacher is None else bytes_of(teacher.parameters())
    trained = [value for value in model.parameters() if value.requires_grad]
    return RunEstimate(
        epochs=epochs,
        steps=epochs * epoch_steps,
        batch=batch,
        flops=cost(kind, model.eval(), kept_means(kept_rows(decisions))),
        parameters=sum(value.numel() for value in model.parameters()),
        trained=sum(value.numel() for value in trained),
        processes=world,
        weight_bytes=weight_bytes // shares + teacher_bytes,
        # A gradient and the two moments of Adam.
        training_bytes=3 * bytes_of(trained) // shares,
        # In proportion to the batch.
        activation_bytes=held * config.data.batch_size // len(inputs),
        full_bytes=full_bytes,
        reading=_reading(stream, test, batches_read),
    )


def _reading(train: BatchStream, test: BatchStream, batches: int) -> str:
    """Say how many samples a process has read of each set, and how many of them are left out as broken."""
    read = []
    broken: list[object] = []
    for name, stream, most in (("evaluation", test, math.inf), ("training", train, batches * train.batch_size)):
        if not stream.is_streamed:
            number = min(most, math.ceil(stream.num_samples / stream.world))
            read.append(f"{number} of {name}")
            broken += stream.report.faults
    return said_reading(read, broken) if read else ""


def said_reading(read: Sequence[str], broken: Sequence[object]) -> str:
    """Say how many samples of each set were read, and which of them are left out as broken."""
    found = "none is broken"
    if broken:
        found = "\n".join([f"{len(broken)} broken, left out:", *map(str, broken)])
    return f"samples read: {', '.join(read)}; {found}"


def _held_bytes(task: Task, inputs: torch.Tensor, targets: torch.Tensor, device: torch.device) -> int:
    """Return the memory that a forward pass holds for its backward pass."""
    one_pass = next(iter(task.passes([(inputs, targets)], device)))
    batch_tensors = [value for value in one_pass.arguments if isinstance(value, torch.Tensor)]
    with ActivationMemory([*batch_tensors, *task.parameters(), *task.buffers()]) as memory:
        # Kept until it is counted: its graph holds the activations.
        output = task(*one_pass.arguments)
        held = memory.live
    del output
    return held


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the memory of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
