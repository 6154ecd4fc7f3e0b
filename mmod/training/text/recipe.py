"""Training on text: what the loop needs to know of causal language models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from mmod.data.loader import BatchStream
from mmod.data.readers.text import create_eval_text, create_train_text
from mmod.training.engine.distributed import Process
from mmod.training.engine.loop import run
from mmod.training.engine.recipe import Recipe, Streams
from mmod.training.engine.run_folder import FitResult
from mmod.training.text.config import TrainConfig
from mmod.training.text.evaluate import EvalResult, evaluate
from mmod.training.text.model import create_models
from mmod.training.text.task import TextTask

__all__ = ["TextRecipe", "fit"]


def fit(config: TrainConfig, *, progress: bool = True) -> FitResult[EvalResult]:
    """Train a causal language model as a config says, from the start or from where the run in its folder stopped.

    Args:
        config: The run's config.
        progress: Show bars.

    Returns:
        The outcome; that of the earlier run when the folder holds a finished run of the same config.

    Raises:
        ValueError: If the folder belongs to another config, there is no text, or the config does not fit the model.
        FloatingPointError: If the loss stops being finite.
    """
    return run(TextRecipe(config), progress=progress)


class TextRecipe(Recipe[TrainConfig, EvalResult]):
    """Text, byte by byte, with decoder-only models of transformers; see `Recipe`."""

    result = EvalResult

    def create_models(self) -> tuple[nn.Module, nn.Module | None]:
        """Make model and teacher; see `mmod.training.text.model.create_models`."""
        return create_models(self.config)

    def create_streams(self, process: Process, model: nn.Module) -> Streams:
        """Make the streams of windows that `config.data` names."""
        config, place = self.config, (process.rank, process.world)
        return create_train_text(config.data, config.seed, *place), create_eval_text(config.data, *place)

    def create_task(self, model: nn.Module, teacher: nn.Module | None, process: Process) -> TextTask:
        """Make the task with the config's distillation and auxiliary losses."""
        config, method = self.config, self.config.method_config()
        return TextTask(
            model,
            elastic=config.elastic,
            teacher=teacher,
            distill_weight=config.distill.weight,
            auxiliary=any(routing.losses for routing in config.routing_configs().values())
            or (method is not None and method.has_loss),
            precision=config.precision,
        )

    def evaluate(self, model: nn.Module, stream: BatchStream, process: Process, progress: bool) -> EvalResult:
        """Measure the losses of a model; see `mmod.training.text.evaluate.evaluate`."""
        options: dict[str, Any] = {"elastic": self.config.elastic, "progress": progress}
        return evaluate(model, stream, process.device, self.config.precision, **options)

    def export(self, model: Any, folder: Path) -> None:
        """Write a folder for `from_pretrained`, or for `mmod.load_pretrained` when the model is routed."""
        model.save_pretrained(folder, save_original_format=False)
