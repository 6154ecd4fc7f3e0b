"""From a config to the objects that train image classifiers: the model, its teacher, criterion and mixup."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import timm
from huggingface_hub import constants, try_to_load_from_cache
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, Mixup
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn

from mmod import freeze_dense_
from mmod.data.config import DataConfig
from mmod.io.names import near_names
from mmod.methods.read import is_added
from mmod.training.engine.checkpoint import read_weights
from mmod.training.engine.model import classifier_names, converted, load_weights, prepare_models
from mmod.training.image.config import LossConfig, MixupConfig, ModelConfig, TrainConfig

__all__ = ["check_published", "create_criterion", "create_dense_model", "create_mixup", "create_models"]


def create_models(config: TrainConfig) -> tuple[nn.Module, nn.Module | None]:
    """Make the model to train and its teacher, on the CPU; see `mmod.training.engine.model.prepare_models`.

    Args:
        config: The run's config.

    Returns:
        The model, and the frozen teacher in eval mode or None.

    Raises:
        ValueError: If the name is unknown to timm, or the checkpoint does not fit the model.
        FileNotFoundError: If the checkpoint is not there.
    """
    model = create_dense_model(config.model)
    check_input(model, config.data, config.model.pretrained)
    classes = getattr(model, "num_classes", None)
    load, create_teacher = partial(_load, config), partial(_create_teacher, config, classes)
    model, teacher = prepare_models(config, model, load, create_teacher)
    return (model if config.trained is None else freeze_dense_(model)), teacher


def create_dense_model(config: ModelConfig) -> nn.Module:
    """Make the timm model that a config names, without its checkpoint.

    Args:
        config: Name, arguments and whether timm's published weights are wanted.

    Returns:
        The model, in training mode.

    Raises:
        ValueError: If timm does not know the name; similar names are listed.
    """
    if "/" not in config.name and not timm.is_model(config.name):
        hint = near_names(config.name.split(".")[0], timm.list_models(), "timm.list_models()")
        raise ValueError(f"timm knows no model {config.name!r}; {hint}")
    check_published(config)
    model: nn.Module = timm.create_model(config.name, pretrained=config.pretrained, **config.args)
    return model


def check_published(config: ModelConfig) -> None:
    """Raise where published weights are wanted that are neither in the cache nor within reach.

    The hub's own client tries again for minutes before it says so.

    Args:
        config: The model.

    Raises:
        ConnectionError: The hub does not answer.
    """
    hub = getattr(timm.get_pretrained_cfg(config.name), "hf_hub_id", None) if "/" not in config.name else None
    if not config.pretrained or hub is None or any(name.startswith("pretrained_cfg") for name in config.args):
        return
    if any(isinstance(try_to_load_from_cache(hub, name), str) for name in ("model.safetensors", "pytorch_model.bin")):
        return
    try:
        urllib.request.urlopen(constants.ENDPOINT, timeout=10).close()
    except urllib.error.HTTPError:
        # It answers.
        return
    except OSError as error:
        raise ConnectionError(
            f"the published weights of {config.name!r} are not in the cache and {constants.ENDPOINT} does not answer: "
            "name a file of weights, `--checkpoint FILE` for a study of features, else `--model.checkpoint FILE "
            "--model.pretrained false`"
        ) from error


def check_input(model: nn.Module, data: DataConfig, pretrained: bool) -> None:
    """Raise a ValueError when the images of `data` are not what the model takes.

    Args:
        model: A timm model.
        data: The data's config.
        pretrained: Whether the model has timm's published weights, which expect one normalisation.
    """
    patch_embed = getattr(model, "patch_embed", None)
    projection = getattr(patch_embed, "proj", None)
    if isinstance(projection, nn.Conv2d) and projection.in_channels != data.channels:
        raise ValueError(
            f"data.channels is {data.channels} and the model takes {projection.in_channels}; "
            f"set model.args.in_chans to {data.channels}"
        )
    size = getattr(patch_embed, "img_size", None)
    fixed = getattr(patch_embed, "strict_img_size", True)
    if fixed and isinstance(size, tuple) and size != (data.image_size, data.image_size):
        raise ValueError(
            f"data.image_size is {data.image_size} and the model takes {size[0]}x{size[1]}; "
            f"set model.args.img_size to {data.image_size}"
        )
    _check_patches(patch_embed, data.image_size)
    _check_answers(model, data.label_patch)
    if pretrained and data.channels == 3:
        published: Mapping[str, Any] = getattr(model, "pretrained_cfg", {})
        defaults = {"mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD}
        for name, default in defaults.items():
            given, expected = tuple(getattr(data, name) or default), tuple(published.get(name, default))
            if given != expected:
                raise ValueError(
                    f"the published weights expect images normalised with {name} {list(expected)}, "
                    f"data gives {list(given)}; set data.{name} to {list(expected)}"
                )


def _check_patches(patch_embed: Any, side: int) -> None:
    """Raise a ValueError where patches do not divide an image: timm leaves out the pixels beyond the last patch."""
    patch = getattr(patch_embed, "patch_size", None)
    sides = patch if isinstance(patch, tuple) else (patch or 1,)
    if any(side % each for each in sides) and not getattr(patch_embed, "dynamic_img_pad", False):
        raise ValueError(
            f"data.image_size is {side}, which the model's patches of {sides[0]} pixels do not divide: take a multiple"
        )


def _check_answers(model: nn.Module, label_patch: int | None) -> None:
    """Raise a ValueError when the model answers images and patches have the labels, or the other way round."""
    pool = getattr(model, "global_pool", None)
    if (label_patch is not None) != (pool == ""):
        raise ValueError(
            f"data.label_patch is {label_patch} and the model's global_pool {pool!r}: a model that pools answers "
            "images, one with model.args.global_pool '' patches"
        )


def create_criterion(loss: LossConfig, mixed: bool) -> nn.Module:
    """Make the criterion of timm that fits the targets.

    Args:
        loss: Kind and smoothing.
        mixed: Whether targets are mixed class distributions (smoothed already) instead of class numbers.

    Returns:
        A module that maps logits (B, C) and targets to a scalar.
    """
    if loss.kind == "bce":
        return BinaryCrossEntropy(smoothing=0.0 if mixed else loss.smoothing)
    if mixed:
        return SoftTargetCrossEntropy()
    return LabelSmoothingCrossEntropy(loss.smoothing) if loss.smoothing else nn.CrossEntropyLoss()


def create_mixup(mixup: MixupConfig | None, smoothing: float, num_classes: int) -> Mixup | None:
    """Make timm's mixup; None when there is none to make."""
    if mixup is None:
        return None
    return Mixup(
        mixup_alpha=mixup.mixup_alpha,
        cutmix_alpha=mixup.cutmix_alpha,
        prob=mixup.prob,
        switch_prob=mixup.switch_prob,
        mode=mixup.mode,
        label_smoothing=smoothing,
        num_classes=num_classes,
    )


def _load(config: TrainConfig, model: nn.Module, checkpoint: str) -> dict[str, Tensor]:
    """Load the dense part of a checkpoint and return the weights of its routers or early exits.

    Where a method's weights took the place of dense ones, the model is changed by it and all of them are loaded.
    """
    state, method = read_weights(checkpoint), config.method_config()
    if method is not None and method.replaced_in(state):
        method.apply_(model)
    own = model.state_dict()
    added = {name: value for name, value in state.items() if is_added(name)}
    dense = {name: value for name, value in state.items() if name not in added}
    dense = converted(dense, model)
    head = classifier_names(model)
    if config.model.head == "fresh":
        dense = {name: value for name, value in dense.items() if not name.startswith(head)}
        dense |= {name: value for name, value in own.items() if name.startswith(head)}
    differing = own.keys() ^ dense.keys()
    if differing and all(name.startswith(head) for name in differing):
        has, needs = ("a", "none") if differing & dense.keys() else ("no", "one")
        raise ValueError(
            f"checkpoint {checkpoint!r} does not fit the model: it has {has} classifier and the model {needs}; "
            "model.head='fresh' takes the other weights alone"
        )
    load_weights(model, dense, checkpoint)
    return added


def _create_teacher(config: TrainConfig, classes: int | None, name: str) -> nn.Module:
    """Make the teacher of a checkpoint, or of a name of timm's registry."""
    if Path(name).exists():
        teacher = create_dense_model(ModelConfig(name=config.model.name, args=config.model.args))
        load_weights(teacher, read_weights(name), name)
    else:
        arguments: dict[str, Any] = {"in_chans": config.data.channels}
        teacher = create_dense_model(ModelConfig(name=name, args=arguments, pretrained=True))
        check_input(teacher, config.data, pretrained=True)
    own = getattr(teacher, "num_classes", None)
    if own != classes:
        raise ValueError(f"teacher {name!r} has {own} classes and the model {classes}")
    return teacher
