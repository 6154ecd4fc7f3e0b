"""Training causal language models of transformers on bytes of text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mmod.analysis import Prompt, flops
from mmod.analysis.counting import needed_shares
from mmod.data.labels import Classes
from mmod.data.loader import BatchStream, text_stream
from mmod.methods import Method
from mmod.methods.base import deciding_together
from mmod.opening.open import open_model
from mmod.opening.runs import find_weights
from mmod.opening.weights import read_weights
from mmod.training.engine import start
from mmod.training.engine.distributed import Process
from mmod.training.engine.evaluate import BatchStore, Columns, Evaluated, read_rows
from mmod.training.engine.kind import ModelInput, device_of, evaluation_data
from mmod.training.engine.task import Batch
from mmod.training.text.config import BYTES, ModelConfig, TrainConfig
from mmod.training.text.evaluate import EvalResult, evaluate_batch, evaluate_ways, score
from mmod.training.text.task import TextTask, logits_of

# A model of bytes, whose end token ends a file.
_BYTES = {"vocab_size": BYTES, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0}


@dataclass(frozen=True)
class TextKind:
    """Next-byte prediction with decoder-only models of transformers; see `Kind`."""

    config: TrainConfig
    result = EvalResult

    def prepare(self, weights: bool = True) -> nn.Module:
        """Create the dense model, drawn at random for any `weights`: none are published. See `LoopKind.prepare`."""
        return create_dense(self.config.model)

    def load(self, model: nn.Module, checkpoint: str, methods: Sequence[Method] | None) -> dict[str, Tensor]:
        """Load a checkpoint, which leaves out weights that are tied to others; see `LoopKind.load`."""

        def adapt(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
            tied = getattr(model, "all_tied_weights_keys", None) or {}
            # Tied weights are in a checkpoint once, and in a state dict under both names.
            return {**{name: state[source] for name, source in tied.items()}, **state}

        return start.load_dense(model, read_weights(checkpoint), checkpoint, methods, adapt)

    def data(
        self, model: nn.Module, process: Process, seed: int | None = None, classes: Classes | None = None
    ) -> BatchStream:
        """Open the windows of evaluation or training; see `LoopKind.data`."""
        return text_stream(self.config.data, seed, process.rank, process.world)

    def task(self, model: nn.Module, teacher: nn.Module | None) -> TextTask:
        """Create the task with the config's distillation and auxiliary losses."""
        return TextTask(model, elastic=self.config.elastic, **start.task_options(self, teacher))

    def evaluate(self, model: nn.Module, batch: Batch) -> Columns:
        """Return the rows of a batch; see `mmod.training.text.evaluate.evaluate_batch`."""
        return evaluate_batch(model, batch, self.config.precision)

    def score(
        self, model: nn.Module, progress: bool = False, store: BatchStore | None = None, data: BatchStream | None = None
    ) -> Evaluated:
        """Measure the losses of a model in every way in which it can decide; see `evaluate_ways`."""
        if data is None:
            data = evaluation_data(self, model)
        read = partial(evaluate_ways, precision=self.config.precision, elastic=self.config.elastic)
        rows = read_rows(read, model, data, progress=progress, store=store)
        return Evaluated(score(rows, model))

    def inputs(self, model: nn.Module, size: int, batches: int = 1, training: bool = False) -> dict[str, ModelInput]:
        """Return windows, one batch of evaluation; see `Kind.inputs`. Costs are those with decisions of training."""
        data = self.config.data
        split, count = data.val_split, size
        if training:
            split, count = data.train_split, batches * size
        limited = dataclasses.replace(data, val_split=split, val_limit=count, batch_size=size)
        device = device_of(self)
        batches_of_tokens = text_stream(limited).batches(0)
        windows = [{"input_ids": tokens.to(device)} for tokens, _ in batches_of_tokens]
        samples = len(windows[0]["input_ids"])
        read = partial(_logits, model)
        return {"window": ModelInput(windows, samples, read, partial(window_flops, model, data.length))}

    def save(self, model: Any, folder: Path) -> None:
        """Write a folder for `from_pretrained`, or for `mmod.load_pretrained` if the model is routed."""
        model.save_pretrained(folder, save_original_format=False)


def _logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return logits_of(model, batch["input_ids"])


def create_dense(config: ModelConfig) -> nn.Module:
    """Create the dense model without the weights of its checkpoint, in training mode; its end token ends a file."""
    if config.config is not None:
        opened = open_model({**_BYTES, **config.config}, pretrained=False)
    else:
        # The run's config says how the checkpoint was routed.
        opened = open_model(find_weights(str(config.checkpoint)).parent, pretrained=False, dense=True)
    model: Any = opened.model
    if model.config.vocab_size != BYTES:
        raise ValueError(f"vocab_size must be {BYTES}, as many as there are bytes, got {model.config.vocab_size}")
    return model.train()


def window_flops(model: nn.Module, length: int, kept: Mapping[str, float] | None = None) -> int:
    """Count the forward pass of a window in training: top-k in routed layers, and the logits of every byte.

    The cost of threshold routing depends on the text: `kept` is the kept share by routed layer.
    """
    with deciding_together(model):
        # In training a layer may take the top-k, whatever its threshold in evaluation.
        counts = flops(model, Prompt(length), needed_shares(model, kept))
    # A prefill computes the logits of its last token alone.
    return counts.routed + (length - 1) * counts.rest.routed
