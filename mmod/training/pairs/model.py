"""The objects that train on pairs: open_clip's model, transforms, tokeniser and losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import open_clip
from open_clip.loss import SigLipLoss
from open_clip.transform import AugmentationCfg, PreprocessCfg, image_transform_v2
from torch import nn

from mmod.data.loader import Tokenizer, Transform
from mmod.io.files import is_of_transformers
from mmod.opening.language import open_tokenizer
from mmod.opening.open import OPEN_CLIP, open_model
from mmod.opening.open_clip import SCHEMES, register_config, weights_follow
from mmod.training.engine.distributed import Process
from mmod.training.pairs.config import ModelConfig
from mmod.training.pairs.folder import Captions, wrap
from mmod.values import refuse_unknown


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
    spec = f"{OPEN_CLIP}{config.name}" if config.pretrained is None else f"{OPEN_CLIP}{config.name}:{config.pretrained}"
    published = weights and (config.pretrained is not None or config.name.startswith(SCHEMES))
    # Where no published weights are taken, open_clip reports random ones unless others follow.
    follow = not weights or config.checkpoint is not None or config.image_checkpoint is not None
    with weights_follow(follow):
        return open_model(spec, pretrained=published, args={"output_dict": True}).model.train()


def create_transforms(model: Any, name: str, augment: dict[str, Any] | None) -> tuple[Transform, Tokenizer]:
    """Create open_clip's transform, of evaluation for None instead of fields of `AugmentationCfg`, and tokeniser."""
    preprocess = PreprocessCfg(**model.visual.preprocess_cfg)
    refuse_unknown("field of augment", augment or {}, [field.name for field in dataclasses.fields(AugmentationCfg)])
    chosen = {} if augment is None else {"aug_cfg": AugmentationCfg(**augment)}
    transform: Transform = image_transform_v2(preprocess, is_train=augment is not None, **chosen)
    return transform, _tokenizer(name)


# Runs of a study share a tokeniser and the words that it has split.
@cache
def _tokenizer(name: str) -> Tokenizer:
    if is_of_transformers(name):
        return Captions(*open_tokenizer(name))
    return open_clip.get_tokenizer(name)


def create_loss(kind: str, process: Process) -> nn.Module:
    """Create a loss of open_clip: "clip", "siglip", "coca", or "distill" for the term of a teacher.

    Every process compares its rows with the gathered features of all, and gradients pass through the gathering, so
    several processes compute what one would on the full batch.
    """
    ranks: dict[str, int] = {"rank": process.rank, "world_size": process.world}
    if kind == "siglip":
        return SigLipLoss(**ranks)
    # Each process computes the loss of its own pairs, with the features of all.
    gathering = {"local_loss": True, "gather_with_grad": True} if process.world > 1 else {}
    kinds: dict[str, Callable[..., nn.Module]] = {
        "clip": open_clip.ClipLoss,
        "coca": partial(open_clip.CoCaLoss, caption_loss_weight=2.0, clip_loss_weight=1.0),
        "distill": open_clip.DistillClipLoss,
    }
    return kinds[kind](**ranks, **gathering)
