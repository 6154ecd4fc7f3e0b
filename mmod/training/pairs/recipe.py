"""Training on image-text pairs: what the loop needs to know of open_clip models."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import open_clip
from torch import Tensor, nn

from mmod import is_routed
from mmod.analysis import FlopReport, flops
from mmod.data.loader import BatchStream
from mmod.data.readers.pairs import create_eval_pairs, create_train_pairs
from mmod.pretrained import save_pretrained
from mmod.training.engine.distributed import Process
from mmod.training.engine.loop import run
from mmod.training.engine.recipe import LoopRecipe, Reading, Tick, kept_shares
from mmod.training.engine.run_folder import FitResult
from mmod.training.pairs.config import TrainConfig
from mmod.training.pairs.evaluate import EvalResult, evaluate, judge_pairs
from mmod.training.pairs.model import create_loss, create_models, create_transforms, save_dense
from mmod.training.pairs.task import PairsTask

__all__ = ["PairsRecipe", "fit"]


def fit(config: TrainConfig, *, progress: bool = True) -> FitResult[EvalResult]:
    """Train an open_clip model as a config says, from the start or from where the run in its folder stopped.

    Args:
        config: The run's config.
        progress: Show bars.

    Returns:
        The outcome; that of the earlier run when the folder holds a finished run of the same config.

    Raises:
        ValueError: If the folder belongs to another config, no shard matches, or the config does not fit the model.
        CorruptDataError: If something cannot be read, unless `data.on_corrupt` is "skip".
        FloatingPointError: If the loss stops being finite.
    """
    return run(PairsRecipe(config), progress=progress)


class PairsRecipe(LoopRecipe[TrainConfig, EvalResult]):
    """Image-text pairs with open_clip's models, transforms, tokenisers and losses; see `Recipe`."""

    result = EvalResult
    part = "image"

    def create_models(self) -> tuple[nn.Module, nn.Module | None]:
        """Make model and teacher; see `mmod.training.pairs.model.create_models`."""
        return create_models(self.config)

    def create_train_stream(self, process: Process, model: nn.Module) -> BatchStream:
        """Make the stream of training pairs that `config.data` names, for the model's images and context length."""
        config = self.config
        training, _, tokenizer = create_transforms(model, config.model.name, config.augment)
        return create_train_pairs(config.data, training, tokenizer, config.seed, process.rank, process.world)

    def create_eval_stream(self, process: Process, model: nn.Module) -> BatchStream:
        """Make the stream of evaluation pairs that `config.data` names, for the model's images and context length."""
        _, transform, tokenizer = create_transforms(model, self.config.model.name, None)
        return create_eval_pairs(self.config.data, transform, tokenizer, process.rank, process.world)

    def create_task(self, model: nn.Module, teacher: nn.Module | None, process: Process) -> PairsTask:
        """Make the task with the config's loss and distillation."""
        config = self.config
        return PairsTask(
            model,
            create_loss(config.loss, process),
            teacher=teacher,
            distiller=None if teacher is None else create_loss("distill", process),
            distill_weight=config.distill.weight,
            auxiliary=any(routing.losses for routing in config.routing_configs().values()),
            precision=config.precision,
        )

    def evaluate(self, model: nn.Module, stream: BatchStream, process: Process, progress: bool) -> EvalResult:
        """Measure retrieval and zero-shot accuracy; see `mmod.training.pairs.evaluate.evaluate`."""
        _, transform, tokenizer = create_transforms(model, self.config.model.name, None)
        return evaluate(
            model,
            stream,
            tokenizer,
            process.device,
            self.config.precision,
            zero_shot=self.config.zero_shot,
            transform=transform,
            workers=self.config.data.workers,
            place=(process.rank, process.world),
            progress=progress,
        )

    def train(self, tick: Tick) -> EvalResult:
        """Train, or read the result of a finished run; see `Recipe.train`."""
        return run(self, progress=False, tick=tick).best

    def judge(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return how well each pair finds itself among those of its batch."""
        return judge_pairs(model, batch)

    def cost(self, model: nn.Module, found: EvalResult) -> dict[str, float]:
        """Count the FLOPs of one image and of one caption."""
        kept = kept_shares(model, found)
        return {
            tower: flops(model, {tower: inputs}, **kept).routed for tower, inputs in self._samples(model, 1).items()
        }

    def report(self, model: nn.Module) -> FlopReport:
        """Count the FLOPs of a pair by part."""
        return flops(model, self._samples(model, 1))

    def readings(self, model: Any, count: int) -> dict[str, Reading]:
        """Return a pass of each tower."""
        return {
            tower: Reading(partial(getattr(model, f"encode_{tower}"), inputs), len(inputs))
            for tower, inputs in self._samples(model, count).items()
        }

    def calibration(self, model: nn.Module, batches: int, size: int) -> list[dict[str, Tensor]]:
        """Return training pairs, prepared as those of an evaluation; see `Recipe.calibration`."""
        data = dataclasses.replace(self.config.data, val=self.config.data.train, batch_size=size)
        calm = PairsRecipe(dataclasses.replace(self.config, data=data))
        stream = calm.create_eval_stream(Process(0, 1, self.device), model)
        step = max(1, stream.steps_per_epoch // batches)
        return [self._moved(batch) for batch in islice(stream.batches(0), 0, step * batches, step)]

    def _samples(self, model: nn.Module, count: int) -> dict[str, Tensor]:
        """Return the first evaluation images and captions."""
        stream = self.create_eval_stream(Process(0, 1, self.device), model)
        batches: Iterator[tuple[Tensor, Tensor]] = iter(stream.batches(0))
        return {tower: inputs[:count] for tower, inputs in self._moved(next(batches)).items()}

    def _moved(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        images, texts = batch
        return {"image": images.to(self.device), "text": texts.to(self.device)}

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write a folder for `mmod.load_pretrained`, or for open_clip's `local-dir:` when the model is dense."""
        if is_routed(model):
            save_pretrained(model, folder, architecture=open_clip.get_model_config(self.config.model.name))
        else:
            save_dense(model, self.config.model.name, folder)
