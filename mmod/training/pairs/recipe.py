"""Training open_clip models on image-text pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import open_clip
from open_clip.push_to_hf_hub import save_config_for_hf
from torch import Tensor, nn

from mmod import is_routed
from mmod.analysis import FlopReport, flops
from mmod.data.loader import BatchStream, find_pairs, pairs_stream
from mmod.io.files import is_of_transformers
from mmod.io.tensors import write_tensors
from mmod.methods import Method
from mmod.methods.read import is_added
from mmod.pretrained import save_pretrained
from mmod.training.engine.checkpoint import find_weights, read_weights
from mmod.training.engine.distributed import Process
from mmod.training.engine.loop import LoopRecipe
from mmod.training.engine.recipe import Reading, needed_shares
from mmod.training.pairs.config import TrainConfig
from mmod.training.pairs.evaluate import EvalResult, evaluate, judge_pairs
from mmod.training.pairs.folder import TwoTowers, read_state, save_model
from mmod.training.pairs.model import (
    create_loss,
    create_model,
    create_transforms,
    is_of_numpy,
    load_clip,
    load_image_tower,
)
from mmod.training.pairs.task import PairsTask


class PairsRecipe(LoopRecipe[TrainConfig, EvalResult]):
    """Image-text pairs with open_clip's models, transforms, tokenisers and losses; see `Recipe`."""

    result = EvalResult
    part = "image"
    judge = staticmethod(judge_pairs)

    def create_bare(self) -> nn.Module:
        """Create the model with random weights."""
        return create_model(self.config.model, weights=False)

    def create_dense(self) -> nn.Module:
        """Create the model with published weights, or with those of an image tower; refuse a loss that does not fit."""
        config = self.config
        model = create_model(self.config.model)
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

    def load_dense(self, model: Any, checkpoint: str, methods: Sequence[Method] = ()) -> dict[str, Tensor]:
        """Load a checkpoint as open_clip does, which converts it, if it is dense; see `LoopParts.load_dense`."""
        if isinstance(model, TwoTowers):
            return super().load_dense(model, checkpoint, methods)
        state = None if is_of_numpy(find_weights(checkpoint)) else read_weights(checkpoint)
        if state is not None and any(map(is_added, state)):
            return super().load_dense(model, checkpoint, methods)
        load_clip(model, checkpoint, state)
        return {}

    def read(self, checkpoint: str) -> dict[str, Tensor]:
        """Return the weights of a checkpoint, which may be a folder of transformers; see `LoopParts.read`."""
        saved = find_weights(checkpoint).parent
        # A folder may hold open_clip's weights beside a config of transformers.
        if is_of_transformers(self.config.model.name) and is_of_transformers(saved):
            return read_state(saved)
        return super().read(checkpoint)

    def find_data(self) -> None:
        """Raise if shards are missing; see `LoopParts.find_data`."""
        find_pairs(self.config.data)

    def create_stream(self, process: Process, model: nn.Module, seed: int | None = None) -> BatchStream:
        """Create the stream of evaluation or training pairs, for the model's image size and context length."""
        config = self.config
        augment = None if seed is None else config.augment
        transform, tokenizer = create_transforms(model, config.model.name, augment)
        return pairs_stream(config.data, transform, tokenizer, seed, process.rank, process.world)

    def create_task(self, model: nn.Module, teacher: nn.Module | None, process: Process) -> PairsTask:
        """Create the task with the config's loss and distillation."""
        distiller = None if teacher is None else create_loss("distill", process)
        criterion = create_loss(self.config.loss, process)
        return PairsTask(model, criterion, distiller=distiller, **self.task_options(teacher))

    def evaluate(self, model: nn.Module, stream: BatchStream, process: Process, progress: bool) -> EvalResult:
        """Measure retrieval and zero-shot accuracy; see `mmod.training.pairs.evaluate.evaluate`."""
        transform, tokenizer = create_transforms(model, self.config.model.name, None)
        return evaluate(
            model,
            stream,
            tokenizer,
            process.device,
            self.config.precision,
            zero_shot=self.config.zero_shot,
            transform=transform,
            workers=self.config.data.workers,
            progress=progress,
        )

    def cost(self, model: nn.Module, kept: Mapping[str, float]) -> dict[str, float]:
        """Count the FLOPs of one image and of one caption."""
        shares = needed_shares(model, kept)
        return {
            tower: flops(model, {tower: inputs}, kept=shares).routed
            for tower, inputs in self._samples(model, 1).items()
        }

    def report(self, model: nn.Module) -> FlopReport:
        """Count the FLOPs of a pair by part."""
        return flops(model, self._samples(model, 1))

    def readings(self, model: Any, size: int, batches: int = 1) -> dict[str, Reading]:
        """Return a forward pass of each tower over a batch."""
        return {
            tower: Reading(partial(getattr(model, f"encode_{tower}"), inputs), len(inputs))
            for tower, inputs in self._samples(model, size).items()
        }

    def calibration(self, model: nn.Module, batches: int, size: int) -> list[dict[str, Tensor]]:
        """Return training pairs, prepared as for evaluation; see `Recipe.calibration`."""
        data = dataclasses.replace(self.config.data, val=self.config.data.train, batch_size=size)
        prepared = PairsRecipe(dataclasses.replace(self.config, data=data))
        stream = prepared.create_stream(Process(0, 1, self.device), model)
        step = max(1, stream.steps_per_epoch // batches)
        return [self._moved(batch) for batch in islice(stream.batches(0), 0, step * batches, step)]

    def _samples(self, model: nn.Module, count: int) -> dict[str, Tensor]:
        """Return the first evaluation images and captions."""
        batch = self.create_stream(Process(0, 1, self.device), model).first_batch()
        return {tower: inputs[:count] for tower, inputs in self._moved(batch).items()}

    def _moved(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        images, texts = batch
        return {"image": images.to(self.device), "text": texts.to(self.device)}

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write a folder for `mmod.load_pretrained`, or for open_clip's `local-dir:` if the model is dense."""
        if isinstance(model, TwoTowers):
            save_model(model, self.config.model.name, folder)
            return
        described = open_clip.get_model_config(self.config.model.name)
        if is_routed(model):
            save_pretrained(model, folder, architecture=described)
            return
        folder.mkdir(parents=True, exist_ok=True)
        save_config_for_hf(model, folder / "open_clip_config.json", model_config=described)
        write_tensors(folder / "open_clip_model.safetensors", model.state_dict())
