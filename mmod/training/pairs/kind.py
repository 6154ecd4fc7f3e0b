"""Training open_clip models on image-text pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import open_clip
from open_clip.loss import SigLipLoss
from open_clip.push_to_hf_hub import save_config_for_hf
from open_clip.transform import AugmentationCfg, PreprocessCfg, image_transform_v2
from torch import Tensor, nn

from mmod.analysis import flops
from mmod.analysis.counting import needed_shares
from mmod.data.labels import Classes
from mmod.data.loader import BatchStream, Tokenizer, Transform, pairs_stream
from mmod.io.files import is_of_transformers, make_folder
from mmod.io.processes import process_count, process_rank
from mmod.io.tensors import write_tensors
from mmod.methods import Method, methods_of
from mmod.methods.read import is_added
from mmod.opening.language import open_tokenizer
from mmod.opening.open import OPEN_CLIP, open_model
from mmod.opening.open_clip import SCHEMES, load_clip, load_image_tower, read_clip, register_config, weights_follow
from mmod.opening.runs import find_weights
from mmod.opening.transformers import read_state
from mmod.opening.weights import read_weights
from mmod.pretrained import save_pretrained
from mmod.training.engine import start
from mmod.training.engine.distributed import Process
from mmod.training.engine.evaluate import BatchStore, Columns, Evaluated
from mmod.training.engine.kind import ModelInput, device_of, evaluation_data
from mmod.training.engine.task import Batch
from mmod.training.pairs.config import ModelConfig, TrainConfig
from mmod.training.pairs.evaluate import EvalResult, evaluate_batch, evaluate_set
from mmod.training.pairs.folder import Captions, TwoTowers, save_model, wrap
from mmod.training.pairs.task import PairsTask
from mmod.values import refuse_unknown


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

    def load(self, model: nn.Module, checkpoint: str, methods: Sequence[Method] | None) -> dict[str, Tensor]:
        """Load a checkpoint as open_clip does, which converts it, if it is dense; see `LoopKind.load`."""
        if isinstance(model, TwoTowers):
            # A folder may hold open_clip's weights beside a config of transformers.
            if is_of_transformers(find_weights(checkpoint).parent):
                inner = {f"inner.{name}": value for name, value in read_state(checkpoint).items()}
            else:
                inner = read_weights(checkpoint)
            return start.load_dense(model, inner, checkpoint, methods)
        state = read_clip(checkpoint)
        if state is not None and any(map(is_added, state)):
            return start.load_dense(model, state, checkpoint, methods)
        load_clip(model, checkpoint, state)
        return {}

    def data(
        self, model: nn.Module, process: Process, seed: int | None = None, classes: Classes | None = None
    ) -> BatchStream:
        """Open the pairs, for the model's image size and context length; see `LoopKind.data`."""
        config = self.config
        augment = None if seed is None else config.augment
        transform, tokenizer = create_transforms(model, config.model.name, augment)
        return pairs_stream(config.data, transform, tokenizer, seed, process.rank, process.world)

    def task(self, model: nn.Module, teacher: nn.Module | None) -> PairsTask:
        """Create the task with the config's loss and distillation."""
        distiller = None
        if teacher is not None:
            distiller = create_loss("distill")
        criterion = create_loss(self.config.loss)
        return PairsTask(model, criterion, distiller=distiller, **start.task_options(self, teacher))

    def evaluate(self, model: nn.Module, batch: Batch) -> Columns:
        """Return the rows of a batch; see `mmod.training.pairs.evaluate.evaluate_batch`."""
        return evaluate_batch(model, batch, self.config.precision)

    def score(
        self, model: nn.Module, progress: bool = False, store: BatchStore | None = None, data: BatchStream | None = None
    ) -> Evaluated:
        """Measure retrieval and zero-shot accuracy; see `mmod.training.pairs.evaluate.evaluate_set`."""
        if data is None:
            data = evaluation_data(self, model)
        transform, tokenizer = create_transforms(model, self.config.model.name, None)
        return evaluate_set(
            model,
            data,
            tokenizer,
            self.config.precision,
            zero_shot=self.config.zero_shot,
            transform=transform,
            workers=self.config.data.workers,
            progress=progress,
            store=store,
        )

    def inputs(self, model: nn.Module, size: int, batches: int = 1, training: bool = False) -> dict[str, ModelInput]:
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
            encode = getattr(model, f"encode_{tower}")
            inputs[tower] = ModelInput(parts, len(parts[0]), encode, count)
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


def create_dense(config: ModelConfig, weights: bool = True) -> Any:
    """Create a dense model of open_clip, or of a folder of transformers, without its checkpoint, in training mode.

    Args:
        weights: Take published weights, or a folder's; otherwise they are drawn at random.
    """
    if is_of_transformers(config.name):
        given = [name for name in ("config", "pretrained", "image_checkpoint") if getattr(config, name) is not None]
        if given:
            raise ValueError(f"{config.name!r} is a folder with a config and weights: leave out model.{given[0]}")
        return wrap(open_model(config.name, pretrained=weights), config.name)
    if config.config is not None:
        register_config(config.config, config.name)
    spec = f"{OPEN_CLIP}{config.name}"
    if config.pretrained is not None:
        spec += f":{config.pretrained}"
    published = weights and (config.pretrained is not None or config.name.startswith(SCHEMES))
    # Where no published weights are taken, open_clip reports random ones unless others follow.
    follow = not weights or config.checkpoint is not None or config.image_checkpoint is not None
    with weights_follow(follow):
        return open_model(spec, pretrained=published, args={"output_dict": True}).model.train()


def create_transforms(model: Any, name: str, augment: dict[str, object] | None) -> tuple[Transform, Tokenizer]:
    """Create open_clip's transform, of evaluation for None instead of fields of `AugmentationCfg`, and tokeniser."""
    preprocess = PreprocessCfg(**model.visual.preprocess_cfg)
    refuse_unknown("field of augment", augment or {}, [field.name for field in dataclasses.fields(AugmentationCfg)])
    transform: Transform
    if augment is None:
        transform = image_transform_v2(preprocess, is_train=False)
    else:
        transform = image_transform_v2(preprocess, is_train=True, aug_cfg=AugmentationCfg(**augment))
    return transform, _tokenizer(name)


# Runs of a study share a tokeniser and the words that it has split.
@cache
def _tokenizer(name: str) -> Tokenizer:
    if is_of_transformers(name):
        return Captions(*open_tokenizer(name))
    return open_clip.get_tokenizer(name)


def create_loss(kind: str) -> nn.Module:
    """Create a loss of open_clip: "clip", "siglip", "coca", or "distill" for the term of a teacher.

    Every process compares its rows with the gathered features of all, and gradients pass through the gathering, so
    several processes compute what one would on the full batch.
    """
    ranks: dict[str, int] = {"rank": process_rank(), "world_size": process_count()}
    if kind == "siglip":
        return SigLipLoss(**ranks)
    gathering = {}
    if process_count() > 1:
        # Each process computes the loss of its own pairs, with the features of all.
        gathering = {"local_loss": True, "gather_with_grad": True}
    kinds: dict[str, Callable[..., nn.Module]] = {
        "clip": open_clip.ClipLoss,
        "coca": partial(open_clip.CoCaLoss, caption_loss_weight=2.0, clip_loss_weight=1.0),
        "distill": open_clip.DistillClipLoss,
    }
    return kinds[kind](**ranks, **gathering)
