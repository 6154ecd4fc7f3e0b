"""A kind of training beside those of mmod, in one file: a model that says where the ink of an image has its middle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmod.adapters import image_output
from mmod.analysis import flops
from mmod.analysis.counting import needed_shares
from mmod.data.config import DataConfig
from mmod.data.labels import Classes
from mmod.data.loader import BatchStream, image_stream
from mmod.io.files import make_folder
from mmod.io.tensors import WEIGHTS, write_tensors
from mmod.methods import Method
from mmod.opening.weights import read_weights
from mmod.training.engine.config import LoopConfig, StartConfig
from mmod.training.engine.distributed import Process
from mmod.training.engine.evaluate import (
    BatchStore,
    Columns,
    Evaluated,
    RoutedResult,
    decisions_of,
    kept_means,
    kept_rows,
    read_rows,
)
from mmod.training.engine.kind import ModelInput, device_of, evaluation_data
from mmod.training.engine.start import load_dense, task_options
from mmod.training.engine.task import Batch, Task, with_total


@dataclass(frozen=True, kw_only=True)
class TrainConfig(LoopConfig):
    """The config of such a run."""

    kind: Literal["middle"] = "middle"
    model: StartConfig = field(default_factory=StartConfig)
    data: DataConfig
    routing: dict[str, Any] | None = field(default=None, metadata={"names": ("preset",)})

    part = "image"


@dataclass(frozen=True)
class EvalResult(RoutedResult):
    """The result of an evaluation: the mean squared distance from the middle, in shares of the image's side."""

    loss: float
    samples: int
    kept: dict[str, float]

    def __str__(self) -> str:
        return f"distance {self.loss:.4f} ({self.samples} images)"


def middle(images: Tensor) -> Tensor:
    """Return the middle of the ink in images (B, C, H, W), as shares of height and width (B, 2)."""
    ink_BHW = (images - images.amin((1, 2, 3), keepdim=True)).mean(1)
    share_BHW = ink_BHW / ink_BHW.sum((1, 2), keepdim=True)
    axes = (share_BHW.sum(axis) @ torch.linspace(0, 1, share_BHW.shape[axis], device=images.device) for axis in (2, 1))
    return torch.stack(tuple(axes), 1)


class MiddleTask(Task):
    """The model with its objective."""

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the "loss" of a batch and its terms."""
        loss = F.mse_loss(image_output(self.model, images), middle(images))
        return with_total({"task": loss, **self.auxiliary_term()})


@dataclass(frozen=True)
class MiddleKind:
    """See `mmod.training.engine.kind.LoopKind`."""

    config: TrainConfig
    result = EvalResult

    def prepare(self, weights: bool = True) -> nn.Module:
        """Create the dense model; no weights are published."""
        size = self.config.data.image_size
        return timm.create_model("test_vit", img_size=size, in_chans=1, num_classes=2).train()

    def load(self, model: nn.Module, checkpoint: str, methods: Sequence[Method] | None) -> dict[str, Tensor]:
        """Load a checkpoint by the model's names."""
        return load_dense(model, read_weights(checkpoint), checkpoint, methods)

    def data(
        self, model: nn.Module, process: Process, seed: int | None = None, classes: Classes | None = None
    ) -> BatchStream:
        """Open the images."""
        return image_stream(self.config.data, seed, process.rank, process.world)

    def task(self, model: nn.Module, teacher: nn.Module | None) -> MiddleTask:
        """Create the objective."""
        return MiddleTask(model, **task_options(self, teacher))

    def evaluate(self, model: nn.Module, batch: Batch) -> Columns:
        """Return the distance of every image, and whether it is small."""
        with decisions_of(model) as decisions:
            distance_B = (image_output(model, batch[0]) - middle(batch[0])).square().mean(1).double()
        return {"loss": distance_B, "outcome": (distance_B < 0.01).double(), **kept_rows(decisions)}

    def score(
        self, model: nn.Module, progress: bool = False, store: BatchStore | None = None, data: BatchStream | None = None
    ) -> Evaluated:
        """Return the mean distance, and that of every image."""
        if data is None:
            data = evaluation_data(self, model)
        rows = read_rows(self.evaluate, model, data, progress=progress, store=store)
        result = EvalResult(float(rows["loss"].mean()), len(rows["loss"]), kept_means(rows))
        return Evaluated(result, {"distance": rows["loss"].numpy()})

    def inputs(self, model: nn.Module, size: int, batches: int = 1, training: bool = False) -> dict[str, ModelInput]:
        """Return images in batches of a size, as far as the stream's are as large."""
        stream = image_stream(self.config.data, 0 if training else None)
        parts = [images[:size].to(device_of(self)) for images, _ in islice(stream.batches(0), batches)]

        def count(kept: Any) -> float:
            return flops(model, {"image": parts[0][:1]}, needed_shares(model, kept)).routed

        # The last one may be smaller.
        full = [images for images in parts if len(images) == len(parts[0])]
        return {"image": ModelInput(full, len(full[0]), partial(image_output, model), count)}

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write the weights."""
        write_tensors(make_folder(folder) / WEIGHTS, model.state_dict())
