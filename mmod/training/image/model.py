"""From a config to the objects that train: the model, routed or dense, and its teacher."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, Mixup
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2, list_optimizers
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import Tensor, nn

from mmod import route_
from mmod.data.config import DataConfig
from mmod.training.engine.checkpoint import read_weights
from mmod.training.engine.muon import single_precision
from mmod.training.image.config import LossConfig, MixupConfig, ModelConfig, RunConfig, TrainConfig

__all__ = [
    "create_criterion",
    "create_dense_model",
    "create_mixup",
    "create_models",
    "create_optimizer",
    "create_schedule",
]


def create_models(config: TrainConfig) -> tuple[nn.Module, nn.Module | None]:
    """Make the model to train and its teacher, on the CPU and from the weights the config names.

    A dense checkpoint is loaded before routing, so the dense teacher is what the model was when routing
    began. A checkpoint with router weights is loaded after routing.

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
    state = read_weights(config.model.checkpoint) if config.model.checkpoint is not None else None
    dense_keys = set(model.state_dict())
    if state is not None:
        is_whole = dense_keys <= set(state)
        dense = {name: value for name, value in state.items() if name in dense_keys} if is_whole else state
        load_weights(model, dense, config.model.checkpoint)
    teacher = _create_teacher(config, model)
    routing = config.routing_config()
    if routing is not None:
        route_(model, routing)
    if state is not None and set(state) != dense_keys:
        load_weights(model, state, config.model.checkpoint)
    if config.grad_checkpointing:
        model.set_grad_checkpointing(True)  # type: ignore[operator]  # every timm model has it
    return model, teacher


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
        near = difflib.get_close_matches(config.name.split(".")[0], timm.list_models(), n=5, cutoff=0.5)
        hint = f"near ones: {', '.join(near)}" if near else "timm.list_models() lists the known ones"
        raise ValueError(f"timm knows no model {config.name!r}; {hint}")
    model: nn.Module = timm.create_model(config.name, pretrained=config.pretrained, **config.args)
    return model


def load_weights(model: nn.Module, state: Mapping[str, Tensor], source: object) -> None:
    """Load a state dict strictly, with messages that say what does not fit.

    Args:
        model: The model to fill.
        state: Names to tensors.
        source: Where the state came from, for the messages.

    Raises:
        ValueError: If names or shapes differ; a different number of classes is named as such.
    """
    own = model.state_dict()
    missing, unknown = sorted(set(own) - set(state)), sorted(set(state) - set(own))
    if missing or unknown:
        raise ValueError(
            f"checkpoint {str(source)!r} does not fit the model: "
            f"it lacks {_some(missing)} and has {_some(unknown)} that the model does not know"
        )
    for name, value in state.items():
        if value.shape != own[name].shape:
            classes = getattr(model, "num_classes", None)
            head = value.shape[:1] != own[name].shape[:1] and own[name].shape[:1] == (classes,)
            what = f"it has {value.shape[0]} classes, the model {classes}: " if head else ""
            raise ValueError(
                f"checkpoint {str(source)!r} does not fit the model: {what}{name} has shape "
                f"{tuple(value.shape)}, the model's is {tuple(own[name].shape)}"
            )
    model.load_state_dict(state)


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


def create_optimizer(config: RunConfig, model: nn.Module, images_per_step: int) -> torch.optim.Optimizer:
    """Make timm's optimiser with its parameter groups.

    Args:
        config: The run's config.
        model: The model to train, on its device.
        images_per_step: Samples per optimiser step over all processes, for `optim.lr_per`.

    Returns:
        The optimiser.

    Raises:
        ValueError: If timm does not know it; similar names are listed.
    """
    optim = config.optim
    names = [str(name) for name in list_optimizers()]
    # The part before an underscore names a wrapper of timm's, such as lookahead.
    if optim.opt.lower().split("_")[-1] not in names:
        near = difflib.get_close_matches(optim.opt, names, n=5, cutoff=0.5)
        hint = f"near ones: {', '.join(near)}" if near else "timm.optim.list_optimizers() lists the known ones"
        raise ValueError(f"timm knows no optimiser {optim.opt!r} (optim.opt); {hint}")
    scale = 1.0 if optim.lr_per is None else images_per_step / optim.lr_per
    optimizer: torch.optim.Optimizer = create_optimizer_v2(
        model,
        opt=optim.opt,
        lr=optim.lr * scale,
        weight_decay=optim.weight_decay,
        momentum=optim.momentum,
        layer_decay=optim.layer_decay,
        **optim.args,
    )
    return single_precision(optimizer)


def create_schedule(
    config: RunConfig, optimizer: torch.optim.Optimizer, steps_per_epoch: int
) -> tuple[Scheduler | None, int]:
    """Make timm's schedule, a function of the optimiser step.

    Args:
        config: The run's config.
        optimizer: What it steers.
        steps_per_epoch: Optimiser steps of one epoch.

    Returns:
        The schedule (None for "none") and the epochs to train, cool-down and the like included.
    """
    schedule = config.schedule
    schedule.check_rate(max(float(group["lr"]) for group in optimizer.param_groups))
    scheduler, epochs = create_scheduler_v2(
        optimizer,
        sched=schedule.sched,
        num_epochs=config.epochs,
        warmup_epochs=schedule.warmup_epochs,
        warmup_lr=schedule.warmup_lr,
        min_lr=schedule.min_lr,
        step_on_epochs=False,
        updates_per_epoch=steps_per_epoch,
        **schedule.args,
    )
    return scheduler, int(epochs)


def _create_teacher(config: TrainConfig, dense: nn.Module) -> nn.Module | None:
    """Make the frozen teacher that the config names; `dense` is the model before routing."""
    name = config.teacher()
    if name is None:
        return None
    if name == "dense":
        teacher = copy.deepcopy(dense)
    elif Path(name).exists():
        teacher = create_dense_model(ModelConfig(name=config.model.name, args=config.model.args))
        load_weights(teacher, read_weights(name), name)
    else:
        arguments: dict[str, Any] = {"in_chans": config.data.channels}
        teacher = create_dense_model(ModelConfig(name=name, args=arguments, pretrained=True))
        check_input(teacher, config.data, pretrained=True)
    classes, own = getattr(teacher, "num_classes", None), getattr(dense, "num_classes", None)
    if classes != own:
        raise ValueError(f"teacher {name!r} has {classes} classes and the model {own}")
    return teacher.eval().requires_grad_(False)


def _some(names: list[str]) -> str:
    """Name the first few of `names` and how many there are."""
    if not names:
        return "no key"
    return f"{len(names)} keys ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
