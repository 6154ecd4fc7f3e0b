"""From a config to the objects that train on pairs: open_clip's model, transforms, tokeniser and losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import open_clip
from open_clip.loss import SigLipLoss
from open_clip.transform import AugmentationCfg, PreprocessCfg, image_transform_v2
from torch import Tensor, nn

from mmod.data.readers.pairs import Tokenizer, Transform
from mmod.io.configs import find_config
from mmod.io.names import near_names
from mmod.io.tensors import write_tensors
from mmod.training.engine.checkpoint import find_weights, read_weights
from mmod.training.engine.distributed import Process
from mmod.training.engine.model import classifier_names, converted, load_weights, prepare_models
from mmod.training.pairs.config import ModelConfig, TrainConfig
from mmod.values import refuse_unknown

__all__ = ["create_loss", "create_model", "create_models", "create_transforms", "save_dense"]


def create_models(config: TrainConfig) -> tuple[nn.Module, nn.Module | None]:
    """Make the model to train and its teacher, on the CPU; see `mmod.training.engine.model.prepare_models`.

    Args:
        config: The run's config.

    Returns:
        The model, and the frozen teacher in eval mode or None.

    Raises:
        ValueError: If open_clip does not know the name, or the checkpoint does not fit the model.
        FileNotFoundError: If the checkpoint is not there.
    """
    model = create_model(config.model)
    is_coca = isinstance(model, open_clip.CoCa)
    if is_coca != (config.loss == "coca"):
        raise ValueError(f"loss={config.loss!r} does not fit a {type(model).__name__}: 'coca' is for CoCa models alone")
    if config.loss == "siglip" and getattr(model, "logit_bias", None) is None:
        raise ValueError("loss='siglip' needs a model with a logit bias: set init_logit_bias in the model's config")
    if config.model.image_checkpoint is not None:
        _load_image_tower(model.visual, config.model.image_checkpoint)
    if config.model.locked == "image":
        # Before routing, so that routers of the tower train.
        model.lock_image_tower()
    return prepare_models(config, model, _load, partial(_create_teacher, config.model))


def create_model(config: ModelConfig) -> Any:
    """Make the dense open_clip model that a config names, without its checkpoint.

    Args:
        config: Name and, where it is a new one, the JSON file that describes it.

    Returns:
        The model, in training mode.

    Raises:
        FileNotFoundError: If the JSON file is not there.
        ValueError: If open_clip does not know the name; similar names are listed.
    """
    if config.config is not None:
        path = find_config(config.config)
        if not path.is_file():
            raise FileNotFoundError(f"no model config at {config.config!r}")
        if path.stem != config.name:
            raise ValueError(f"{config.config!r} describes a model of the name {path.stem!r}, not {config.name!r}")
        if path.stem not in open_clip.list_models():
            open_clip.add_model_config(path)
    if ":" not in config.name and config.name not in open_clip.list_models():
        hint = near_names(config.name, open_clip.list_models(), "open_clip.list_models()")
        raise ValueError(f"open_clip knows no model {config.name!r}; {hint}")
    return open_clip.create_model(config.name, pretrained=config.pretrained, output_dict=True)


def create_transforms(model: Any, name: str, augment: dict[str, Any] | None) -> tuple[Transform, Transform, Tokenizer]:
    """Make open_clip's transforms and tokeniser of a model.

    Args:
        model: The model.
        name: Its name.
        augment: Fields of `AugmentationCfg`; None prepares training images as those for evaluation.

    Returns:
        Transform of training images, transform of evaluation images, tokeniser.

    Raises:
        ValueError: If a field is unknown; the valid ones are named.
    """
    preprocess = PreprocessCfg(**model.visual.preprocess_cfg)
    known = [field.name for field in dataclasses.fields(AugmentationCfg)]
    refuse_unknown("field of augment", augment or {}, known)
    evaluation: Transform = image_transform_v2(preprocess, is_train=False)
    training = evaluation
    if augment is not None:
        training = image_transform_v2(preprocess, is_train=True, aug_cfg=AugmentationCfg(**augment))
    return training, evaluation, open_clip.get_tokenizer(name)


def create_loss(kind: str, process: Process) -> nn.Module:
    """Make the loss of open_clip that a config names.

    Several processes compute the loss of their own rows against all gathered features and pass gradients through the
    gathering, so that together they do what one process would on the whole batch.

    Args:
        kind: "clip", "siglip" or "coca", or "distill" for what a teacher adds.
        process: This process.
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


def save_dense(model: Any, name: str, folder: Path) -> None:
    """Write a dense model as open_clip does, so that `open_clip.create_model("local-dir:FOLDER")` reads it.

    Args:
        model: The model.
        name: Its name, which open_clip knows.
        folder: Where it goes; made when it is not there.
    """
    from open_clip.push_to_hf_hub import save_config_for_hf

    folder.mkdir(parents=True, exist_ok=True)
    save_config_for_hf(model, folder / "open_clip_config.json", model_config=open_clip.get_model_config(name))
    write_tensors(folder / "open_clip_model.safetensors", model.state_dict())


def _load(model: Any, checkpoint: str) -> dict[str, Tensor]:
    """Load the dense part of a checkpoint, and return the weights of its routers."""
    file = find_weights(checkpoint)
    if file.suffix in (".npz", ".npy"):
        open_clip.load_checkpoint(model, str(file))
        return {}
    state = read_weights(file)
    routers = {name: value for name, value in state.items() if ".router" in name}
    try:
        if routers:
            model.load_state_dict({name: value for name, value in state.items() if name not in routers})
        else:
            open_clip.load_checkpoint(model, str(file), strict=True, weights_only=True)
    except RuntimeError as error:
        raise ValueError(f"checkpoint {checkpoint!r} does not fit the model: {error}") from error
    return routers


def _load_image_tower(visual: nn.Module, checkpoint: str) -> None:
    """Load the image tower of a whole model, a tower, or the timm model that a tower is made of."""
    state = read_weights(checkpoint)
    whole = {name.removeprefix("visual."): value for name, value in state.items() if name.startswith("visual.")}
    trunk = getattr(visual, "trunk", None)
    if whole or trunk is None or any(name.startswith("trunk.") for name in state):
        load_weights(visual, whole or state, checkpoint)
        return
    own, head = trunk.state_dict(), classifier_names(trunk)
    state = converted(state, trunk)
    body = {name: value for name, value in state.items() if name in own or not name.startswith(head)}
    load_weights(trunk, body, checkpoint)


def _create_teacher(config: ModelConfig, checkpoint: str) -> nn.Module:
    """Make the dense model of a checkpoint of the same architecture."""
    teacher: nn.Module = create_model(dataclasses.replace(config, checkpoint=None, pretrained=None))
    if _load(teacher, checkpoint):
        raise ValueError(f"teacher {checkpoint!r} is routed; distill from a dense model")
    return teacher
