"""Training open_clip models on image-text pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import open_clip
from open_clip.push_to_hf_hub import save_config_for_hf
from torch import Tensor, nn

from mmod.analysis import flops
from mmod.analysis.counting import needed_shares
from mmod.data.labels import Classes
from mmod.data.loader import BatchStream, pairs_stream
from mmod.io.files import is_of_transformers, make_folder
from mmod.io.tensors import write_tensors
from mmod.methods import Method, methods_of
from mmod.methods.read import is_added
from mmod.opening.open_clip import is_of_numpy, load_clip, load_image_tower
from mmod.opening.runs import find_weights
from mmod.opening.transformers import read_state
from mmod.opening.weights import read_weights
from mmod.pretrained import save_pretrained
from mmod.training.engine import start
from mmod.training.engine.distributed import Process
from mmod.training.engine.evaluate import Columns, Evaluated
from mmod.training.engine.kind import ModelInput, device_of, evaluation_data
from mmod.training.engine.task import Batch
from mmod.training.pairs.config import TrainConfig
from mmod.training.pairs.evaluate import EvalResult, evaluate_batch, evaluate_set
from mmod.training.pairs.folder import TwoTowers, save_model
from mmod.training.pairs.model import create_dense, create_loss, create_transforms
from mmod.training.pairs.task import PairsTask


@dataclass(frozen=True)
class PairsKind:
    """Image-text pairs with open_clip's models, transforms, tokenisers and losses; see `Kind`."""

    config: TrainConfig
    result = EvalResult

    def prepare(self, weights: bool = True) -> nn.Module:
        """Create the dense model, with published weights or an image tower's; refuse a loss that does not fit."""
        config = self.config
        model = create_dense(config.model, weights)
        # Without weights the model is a sketch, which is not trained.
        if not weights:
            return model
        if isinstance(model, open_clip.CoCa) != (config.loss == "coca"):
            raise ValueError(
                f"loss={config.loss!r} does not fit a {type(model).__name__}: 'coca' is for CoCa models alone"
            )
        if config.loss == "siglip" and getattr(model, "logit_bias", None) is None:
            raise ValueError("loss='siglip' needs a model with a logit bias: set init_logit_bias in the model's config")
        if config.model.image_checkpoint is not None:
            load_image_tower(model.visual, config.model.image_checkpoint)
        if config.model.locked == "image":
            # Before methods are applied, so that the tower's routers train.
            model.lock_image_tower()
        return model

    def load(self, model: Any, checkpoint: str, methods: Sequence[Method] | None) -> dict[str, Tensor]:
        """Load a checkpoint as open_clip does, which converts it, if it is dense; see `LoopKind.load`."""
        file = find_weights(checkpoint)
        if isinstance(model, TwoTowers):
            # A folder may hold open_clip's weights beside a config of transformers.
            if is_of_transformers(file.parent):
                state = {f"inner.{name}": value for name, value in read_state(checkpoint).items()}
            else:
                state = read_weights(checkpoint)
            return start.load_dense(model, state, checkpoint, methods)
        # Arrays of big_vision have names that open_clip alone knows; their file is not read twice.
        known = None if is_of_numpy(file) else read_weights(checkpoint)
        if known is not None and any(map(is_added, known)):
            return start.load_dense(model, known, checkpoint, methods)
        load_clip(model, checkpoint, known)
        return {}

    def data(
        self, model: nn.Module, process: Process, seed: int | None = None, classes: Classes | None = None
    ) -> BatchStream:
        """Open the pairs, for the model's image size and context length; see `Kind.data`."""
        config = self.config
        augment = None if seed is None else config.augment
        transform, tokenizer = create_transforms(model, config.model.name, augment)
        return pairs_stream(config.data, transform, tokenizer, seed, process.rank, process.world)

    def task(self, model: nn.Module, teacher: nn.Module | None, process: Process) -> PairsTask:
        """Create the task with the config's loss and distillation."""
        distiller = None if teacher is None else create_loss("distill", process)
        criterion = create_loss(self.config.loss, process)
        return PairsTask(model, criterion, distiller=distiller, **start.task_options(self, teacher))

    def evaluate(self, model: nn.Module, batch: Batch) -> Columns:
        """Return the rows of a batch; see `mmod.training.pairs.evaluate.evaluate_batch`."""
        return evaluate_batch(model, batch, self.config.precision)

    def score(self, model: nn.Module, data: BatchStream, process: Process, progress: bool) -> Evaluated:
        """Measure retrieval and zero-shot accuracy; see `mmod.training.pairs.evaluate.evaluate_set`."""
        transform, tokenizer = create_transforms(model, self.config.model.name, None)
        return evaluate_set(
            model,
            data,
            tokenizer,
            process.device,
            self.config.precision,
            zero_shot=self.config.zero_shot,
            transform=transform,
            workers=self.config.data.workers,
            progress=progress,
        )

    def inputs(self, model: Any, size: int, batches: int = 1, training: bool = False) -> dict[str, ModelInput]:
        """Return images and captions, each for its tower; those of evaluation are the first. See `Kind.inputs`."""
        if training:
            data = dataclasses.replace(self.config.data, val=self.config.data.train, batch_size=size)
            stream = evaluation_data(PairsKind(dataclasses.replace(self.config, data=data)), model)
            # Spread over the set, whose shards are often sorted.
            step = max(1, stream.steps_per_epoch // batches)
            pairs = list(islice(stream.batches(0), 0, step * batches, step))
        else:
            images, texts = evaluation_data(self, model).first_batch()
            pairs = [(images[:size], texts[:size])]
        inputs = {}
        for number, tower in enumerate(("image", "text")):
            parts = [pair[number].to(device_of(self)) for pair in pairs]
            count = partial(_flops, model, tower, parts)
            inputs[tower] = ModelInput(parts, sum(map(len, parts)), getattr(model, f"encode_{tower}"), count)
        return inputs

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write a folder for `mmod.load_pretrained`, or for open_clip's `local-dir:` if the model is dense."""
        if isinstance(model, TwoTowers):
            save_model(model, self.config.model.name, folder)
            return
        described = open_clip.get_model_config(self.config.model.name)
        if methods_of(model):
            save_pretrained(model, folder, architecture=described)
            return
        make_folder(folder)
        save_config_for_hf(model, folder / "open_clip_config.json", model_config=described)
        write_tensors(folder / "open_clip_model.safetensors", model.state_dict())


def _flops(model: nn.Module, tower: str, parts: Sequence[Tensor], kept: Mapping[str, float]) -> float:
    """Count the FLOPs of one image, or of one caption."""
    return flops(model, {tower: parts[0][:1]}, kept=needed_shares(model, kept)).routed
