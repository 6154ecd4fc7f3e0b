"""The objects that train on pairs: open_clip's model, transforms, tokeniser and losses."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import open_clip
import torch
from open_clip.loss import SigLipLoss
from open_clip.transform import AugmentationCfg, PreprocessCfg, image_transform_v2
from torch import Tensor, nn

from mmod.data.loader import Tokenizer, Transform
from mmod.io.configs import find_config
from mmod.io.files import is_of_transformers, read_json_object, write_atomically
from mmod.io.tensors import write_tensors
from mmod.training.engine.checkpoint import find_weights, read_weights
from mmod.training.engine.distributed import Process
from mmod.training.engine.model import classifier_names, converted, load_weights
from mmod.training.pairs import folder
from mmod.training.pairs.config import ModelConfig
from mmod.values import near_names, refuse_unknown


def create_model(config: ModelConfig, weights: bool = True) -> Any:
    """Create a dense model of open_clip, or of a folder of transformers, without its checkpoint, in training mode.

    Args:
        weights: Take published weights, or a folder's; otherwise they are drawn at random.
    """
    if is_of_transformers(config.name):
        given = [name for name in ("config", "pretrained", "image_checkpoint") if getattr(config, name) is not None]
        if given:
            raise ValueError(f"{config.name!r} is a folder with a config and weights: leave out model.{given[0]}")
        return folder.create_model(config.name, weights)
    if config.config is not None:
        path = find_config(config.config)
        if not path.is_file():
            raise FileNotFoundError(f"no model config at {config.config!r}")
        if path.stem != config.name:
            raise ValueError(f"{config.config!r} describes a model of the name {path.stem!r}, not {config.name!r}")
        if path.stem not in open_clip.list_models():
            add_model_configs(path)
    if ":" not in config.name and config.name not in open_clip.list_models():
        hint = near_names(config.name, open_clip.list_models(), "open_clip.list_models()")
        raise ValueError(f"open_clip knows no model {config.name!r}; {hint}")
    # open_clip moves the model to a device that it is told, which must not be another than the one in use (meta).
    device = torch.get_default_device()
    published = config.pretrained if weights else None
    follow = not weights or config.checkpoint is not None or config.image_checkpoint is not None
    with weights_follow() if follow else nullcontext():
        return open_clip.create_model(
            config.name, pretrained=published, load_weights=weights, output_dict=True, device=device
        )


@contextmanager
def weights_follow() -> Iterator[None]:
    """Context in which open_clip does not report random weights, as weights are loaded into the model afterwards."""

    def is_shown(record: logging.LogRecord) -> bool:
        return "initialized randomly" not in record.getMessage()

    # open_clip writes to the root.
    root = logging.getLogger()
    root.addFilter(is_shown)
    try:
        yield
    finally:
        root.removeFilter(is_shown)


def add_model_configs(path: Path) -> None:
    """Tell open_clip of the models that a JSON file describes, or a folder of such files."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    # Copies: open_clip takes a byte order mark for damage, and would keep the name of a file that it cannot read.
    with TemporaryDirectory() as copies:
        for file in files:
            write_atomically(Path(copies) / file.name, json.dumps(read_json_object(file)))
        open_clip.add_model_config(Path(copies))


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
    return folder.create_tokenizer(name) if is_of_transformers(name) else open_clip.get_tokenizer(name)


def create_loss(kind: str, process: Process) -> nn.Module:
    """Create a loss of open_clip: "clip", "siglip", "coca", or "distill" for the term of a teacher.

    Every process compares its rows with the gathered features of all, and gradients pass through the gathering, so
    several processes compute what one would on the full batch.
    """
    place: dict[str, Any] = {"rank": process.rank, "world_size": process.world}
    if kind == "siglip":
        return SigLipLoss(**place)
    gathering = {"local_loss": True, "gather_with_grad": True} if process.world > 1 else {}
    kinds: dict[str, Callable[..., nn.Module]] = {
        "clip": open_clip.ClipLoss,
        "coca": partial(open_clip.CoCaLoss, caption_loss_weight=2.0, clip_loss_weight=1.0),
        "distill": open_clip.DistillClipLoss,
    }
    return kinds[kind](**place, **gathering)


def load_clip(model: nn.Module, checkpoint: str, state: Mapping[str, Tensor] | None = None) -> None:
    """Load a dense checkpoint strictly into an open_clip model, converted as open_clip converts published weights.

    Args:
        state: Weights of the checkpoint, if they were read already.
    """
    file = find_weights(checkpoint)
    with TemporaryDirectory() as temporary:
        if not is_of_numpy(file):
            # open_clip converts what it reads from a file, of which it reads fewer kinds than `read_weights`.
            file = Path(temporary) / "model.safetensors"
            write_tensors(file, read_weights(checkpoint) if state is None else state)
        try:
            open_clip.load_checkpoint(model, str(file), strict=True, weights_only=True)
        except RuntimeError as error:
            raise ValueError(f"checkpoint {checkpoint!r} does not fit the model: {error}") from error


def is_of_numpy(file: Path) -> bool:
    """Return whether a file holds weights of JAX, which open_clip reads itself."""
    return file.suffix in (".npz", ".npy")


def load_image_tower(visual: nn.Module, checkpoint: str) -> None:
    """Load the image tower of a full model, a tower, or the timm model inside a tower."""
    state = read_weights(checkpoint)
    of_tower = {name.removeprefix("visual."): value for name, value in state.items() if name.startswith("visual.")}
    trunk = getattr(visual, "trunk", None)
    if of_tower or trunk is None or any(name.startswith("trunk.") for name in state):
        load_weights(visual, of_tower or state, checkpoint)
        return
    names = set(trunk.state_dict())
    head = classifier_names(trunk)
    state = converted(state, trunk)
    body = {name: value for name, value in state.items() if name in names or not name.startswith(head)}
    load_weights(trunk, body, checkpoint)
