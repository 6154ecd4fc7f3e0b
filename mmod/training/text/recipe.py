"""Training on text: what the loop needs to know of causal language models."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mmod.data.loader import BatchStream
from mmod.data.readers.text import create_eval_text, create_train_text
from mmod.training.engine.distributed import Process
from mmod.training.engine.loop import run
from mmod.training.engine.recipe import LoopRecipe, Reading, Tick, kept_shares
from mmod.training.engine.run_folder import FitResult
from mmod.training.text.config import TrainConfig
from mmod.training.text.evaluate import EvalResult, evaluate, judge_text
from mmod.training.text.model import create_models, logits_of, window_flops
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


class TextRecipe(LoopRecipe[TrainConfig, EvalResult]):
    """Text, byte by byte, with decoder-only models of transformers; see `Recipe`."""

    result = EvalResult
    part = "language"

    def create_models(self) -> tuple[nn.Module, nn.Module | None]:
        """Make model and teacher; see `mmod.training.text.model.create_models`."""
        return create_models(self.config)

    def plain(self) -> TrainConfig:
        """Return the config without what training alone needs."""
        return dataclasses.replace(super().plain(), elastic=False)

    def create_train_stream(self, process: Process, model: nn.Module) -> BatchStream:
        """Make the stream of training windows that `config.data` names."""
        return create_train_text(self.config.data, self.config.seed, process.rank, process.world)

    def create_eval_stream(self, process: Process, model: nn.Module) -> BatchStream:
        """Make the stream of evaluation windows that `config.data` names."""
        return create_eval_text(self.config.data, process.rank, process.world)

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

    def train(self, tick: Tick) -> EvalResult:
        """Train, or read the result of a finished run; see `Recipe.train`."""
        return run(self, progress=False, tick=tick).best

    def judge(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the loss of each window, and the share of its bytes that are foretold."""
        return judge_text(model, batch)

    def cost(self, model: nn.Module, found: EvalResult) -> dict[str, float]:
        """Count the FLOPs of a window with the decisions of training."""
        return {"window": window_flops(model, self.config.data.length, **kept_shares(model, found))}

    def readings(self, model: nn.Module, count: int) -> dict[str, Reading]:
        """Return a pass over evaluation windows."""
        tokens = self._windows(self.config.data.val_split, count, count)[0]
        return {"window": Reading(partial(logits_of, model, tokens), len(tokens))}

    def calibration(self, model: nn.Module, batches: int, size: int) -> list[dict[str, Tensor]]:
        """Return windows of the training text; see `Recipe.calibration`."""
        windows = self._windows(self.config.data.train_split, batches * size, size)
        return [{"input_ids": tokens} for tokens in windows]

    def _windows(self, split: str, count: int, size: int) -> list[Tensor]:
        data = dataclasses.replace(self.config.data, val_split=split, val_limit=count, batch_size=size)
        return [tokens.to(self.device) for tokens, _ in create_eval_text(data).batches(0)]

    def export(self, model: Any, folder: Path) -> None:
        """Write a folder for `from_pretrained`, or for `mmod.load_pretrained` when the model is routed."""
        model.save_pretrained(folder, save_original_format=False)
