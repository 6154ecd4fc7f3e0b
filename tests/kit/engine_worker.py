"""Small runs on tensors made from a seed, for the tests and for the processes they start and kill."""

from __future__ import annotations

import csv
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from mmod.data.config import DataConfig
from mmod.data.corrupt import CorruptReport
from mmod.training import (
    DistillConfig,
    EmaConfig,
    FitResult,
    LossConfig,
    MixupConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    fit,
)
from mmod.training.engine.groups import DistributedConfig
from mmod.training.engine.kind import AfterStep

MODEL = {"img_size": 16, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 4, "num_heads": 2}
# Figures that differ between equal runs.
USAGE = ("wall_seconds", "cpu_seconds", "samples_per_second", "data_wait", "peak_rss_mib", "peak_cuda_mib")
GROUPS = {
    "distributed": DistributedConfig,
    "distill": DistillConfig,
    "ema": EmaConfig,
    "loss": LossConfig,
    "mixup": MixupConfig,
    "optim": OptimConfig,
}


class TensorStream:
    """Batches of learnable noise.

    Args:
        batch_size: Images of a batch.
        seed: Of the order of images, None for that in which they are.
        rank: Number of this process.
        world: Number of processes, each of which takes every `world`-th image.
        signals: Signals that the process sends itself, by the step before which it does so.
        twice: Whether it sends them twice.
    """

    def __init__(
        self,
        batch_size: int,
        *,
        seed: int | None,
        rank: int = 0,
        world: int = 1,
        signals: Mapping[int, int] | None = None,
        twice: bool = False,
    ):
        self.signals, self.times = dict(signals or {}), 1 + twice
        generator = torch.Generator().manual_seed(5)
        self.targets = torch.arange(48) % 4
        self.images = torch.randn(48, 1, 16, 16, generator=generator) + self.targets[:, None, None, None]
        self.batch_size, self.seed, self.rank, self.world = batch_size, seed, rank, world
        self.num_samples = len(self.targets)
        self.steps_per_epoch = self.num_samples // (batch_size * world)
        self.report = CorruptReport()

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.arange(self.num_samples)
        if self.seed is not None:
            generator = torch.Generator().manual_seed(1000 * self.seed + epoch)
            order = torch.randperm(self.num_samples, generator=generator)
        order = order[self.rank :: self.world]
        for step in range(start, self.steps_per_epoch):
            number = self.signals.pop(epoch * self.steps_per_epoch + step, None)
            for _ in range(self.times if number else 0):
                signal.raise_signal(number)
            rows = order[step * self.batch_size : (step + 1) * self.batch_size]
            yield self.images[rows], self.targets[rows]


def tiny_config(output: Path | str, *, batch_size: int = 8, args: Any = None, **changes: Any) -> TrainConfig:
    """Return a config of a ViT with four blocks; groups may be given as plain mappings."""
    for name in GROUPS.keys() & changes.keys():
        if isinstance(changes[name], dict):
            changes[name] = GROUPS[name](**changes[name])
    model = {"name": "vit_tiny_patch16_224", "args": {**MODEL, "num_classes": 4, **(args or {})}}
    model |= changes.pop("model", {})
    data = DataConfig(source="folder", root="none", image_size=16, channels=1, batch_size=batch_size, workers=0)
    defaults: dict[str, Any] = {"epochs": 2, "device": "cpu", "log_every": 2}
    return TrainConfig(output=str(output), model=ModelConfig(**model), data=data, **(defaults | changes))


def run(
    config: TrainConfig, *, rank: int = 0, world: int = 1, after_step: AfterStep = lambda step: None, **options: Any
) -> FitResult:
    """Train on tensors instead of the data that the config names; options are those of `TensorStream`."""
    train = TensorStream(config.data.batch_size, seed=config.seed, rank=rank, world=world, **options)
    test = TensorStream(config.data.batch_size, seed=None, rank=rank, world=world)
    return fit(config, streams=(train, test), progress=False, after_step=after_step)


def read_metrics(folder: Path) -> list[dict[str, str]]:
    """Read `metrics.csv` without the figures that differ between equal runs."""
    rows = csv.DictReader((folder / "metrics.csv").open())
    return [{name: value for name, value in row.items() if name not in USAGE} for row in rows]


def weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights that a finished run left in `folder`."""
    return load_file(next(folder.glob("*.safetensors")))


def main(options: Mapping[str, Any], hears: int = 0, **signals: Any) -> None:
    """Train as one of the processes that were started together; `signals` are for the one of rank `hears`."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    run(tiny_config(**options), rank=rank, world=world, **(signals if rank == hears else {}))
