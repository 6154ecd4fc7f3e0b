"""Training causal language models of transformers on bytes of text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mmod.data.loader import BatchStream, find_text, text_stream
from mmod.training.engine.distributed import Process
from mmod.training.engine.loop import LoopRecipe
from mmod.training.engine.recipe import Reading, needed_shares
from mmod.training.text.config import TrainConfig
from mmod.training.text.evaluate import EvalResult, evaluate, judge_text
from mmod.training.text.model import create_dense, logits_of, window_flops
from mmod.training.text.task import TextTask


class TextRecipe(LoopRecipe[TrainConfig, EvalResult]):
    """Next-byte prediction with decoder-only models of transformers; see `Recipe`."""

    result = EvalResult
    part = "language"
    judge = staticmethod(judge_text)

    def create_bare(self) -> nn.Module:
        """Create the model with random weights."""
        return create_dense(self.config.model)

    def adapted(self, model: Any, state: dict[str, Tensor], checkpoint: str) -> Mapping[str, Tensor]:
        """Return weights with those that a checkpoint leaves out because they are tied to others."""
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        return {**{name: state[source] for name, source in tied.items()}, **state}

    def plain(self) -> TrainConfig:
        """Return the config without what training alone needs."""
        return dataclasses.replace(super().plain(), elastic=False)

    def find_data(self) -> None:
        """Raise if text is missing; see `LoopParts.find_data`."""
        find_text(self.config.data)

    def create_stream(self, process: Process, model: nn.Module, seed: int | None = None) -> BatchStream:
        """Create the stream of evaluation or training windows."""
        return text_stream(self.config.data, seed, process.rank, process.world)

    def create_task(self, model: nn.Module, teacher: nn.Module | None, process: Process) -> TextTask:
        """Create the task with the config's distillation and auxiliary losses."""
        return TextTask(model, elastic=self.config.elastic, **self.task_options(teacher))

    def evaluate(self, model: nn.Module, stream: BatchStream, process: Process, progress: bool) -> EvalResult:
        """Measure the losses of a model; see `mmod.training.text.evaluate.evaluate`."""
        options: dict[str, Any] = {"elastic": self.config.elastic, "progress": progress}
        return evaluate(model, stream, process.device, self.config.precision, **options)

    def cost(self, model: nn.Module, kept: Mapping[str, float]) -> dict[str, float]:
        """Count the FLOPs of a window with the decisions of training."""
        return {"window": window_flops(model, self.config.data.length, kept=needed_shares(model, kept))}

    def readings(self, model: nn.Module, size: int, batches: int = 1) -> dict[str, Reading]:
        """Return a forward pass over a batch of evaluation windows."""
        tokens = self._windows(self.config.data.val_split, size, size)[0]
        return {"window": Reading(partial(logits_of, model, tokens), len(tokens))}

    def calibration(self, model: nn.Module, batches: int, size: int) -> list[dict[str, Tensor]]:
        """Return windows of the training text; see `Recipe.calibration`."""
        windows = self._windows(self.config.data.train_split, batches * size, size)
        return [{"input_ids": tokens} for tokens in windows]

    def _windows(self, split: str, count: int, size: int) -> list[Tensor]:
        data = dataclasses.replace(self.config.data, val_split=split, val_limit=count, batch_size=size)
        return [tokens.to(self.device) for tokens, _ in text_stream(data).batches(0)]

    def export(self, model: Any, folder: Path) -> None:
        """Write a folder for `from_pretrained`, or for `mmod.load_pretrained` if the model is routed."""
        model.save_pretrained(folder, save_original_format=False)
