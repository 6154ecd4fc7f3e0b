"""Training on image-text pairs: what the loop needs to know of open_clip models."""

from __future__ import annotations

from pathlib import Path

import open_clip
from torch import nn

from mmod import is_routed
from mmod.data.loader import BatchStream
from mmod.data.readers.pairs import create_eval_pairs, create_train_pairs
from mmod.pretrained import save_pretrained
from mmod.training.engine.distributed import Process
from mmod.training.engine.loop import run
from mmod.training.engine.recipe import Recipe, Streams
from mmod.training.engine.run_folder import FitResult
from mmod.training.pairs.config import TrainConfig
from mmod.training.pairs.evaluate import EvalResult, evaluate
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


class PairsRecipe(Recipe[TrainConfig, EvalResult]):
    """Image-text pairs with open_clip's models, transforms, tokenisers and losses; see `Recipe`."""

    result = EvalResult

    def create_models(self) -> tuple[nn.Module, nn.Module | None]:
        """Make model and teacher; see `mmod.training.pairs.model.create_models`."""
        return create_models(self.config)

    def create_streams(self, process: Process, model: nn.Module) -> Streams:
        """Make the streams that `config.data` names, for the model's image size and context length."""
        config = self.config
        training, self.transform, self.tokenizer = create_transforms(model, config.model.name, config.augment)
        place = process.rank, process.world
        train = create_train_pairs(config.data, training, self.tokenizer, config.seed, *place)
        return train, create_eval_pairs(config.data, self.transform, self.tokenizer, *place)

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
        return evaluate(
            model,
            stream,
            self.tokenizer,
            process.device,
            self.config.precision,
            zero_shot=self.config.zero_shot,
            transform=self.transform,
            workers=self.config.data.workers,
            place=(process.rank, process.world),
            progress=progress,
        )

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write a folder for `mmod.load_pretrained`, or for open_clip's `local-dir:` when the model is dense."""
        if is_routed(model):
            save_pretrained(model, folder, architecture=open_clip.get_model_config(self.config.model.name))
        else:
            save_dense(model, self.config.model.name, folder)
