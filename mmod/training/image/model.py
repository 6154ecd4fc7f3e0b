"""The objects that train image classifiers: the model, its criterion and mixup."""

from __future__ import annotations

import urllib.error
import urllib.request

import timm
from huggingface_hub import constants, try_to_load_from_cache
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import nn

from mmod.data.config import DataConfig
from mmod.training.image.config import LossConfig, ModelConfig
from mmod.values import near_names


def create_dense_model(config: ModelConfig) -> nn.Module:
    """Create a timm model without its checkpoint, in training mode."""
    if "/" not in config.name and not timm.is_model(config.name):
        hint = near_names(config.name.split(".")[0], timm.list_models(), "timm.list_models()")
        raise ValueError(f"timm knows no model {config.name!r}; {hint}")
    check_published(config)
    try:
        return timm.create_model(config.name, pretrained=config.pretrained, **config.args)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise TypeError(f"model.args does not fit {config.name!r}: {error}") from error


def check_published(config: ModelConfig) -> None:
    """Raise if published weights are asked for and neither cached nor available."""
    hub = getattr(timm.get_pretrained_cfg(config.name), "hf_hub_id", None) if "/" not in config.name else None
    if not config.pretrained or hub is None or any(name.startswith("pretrained_cfg") for name in config.args):
        return
    if any(isinstance(try_to_load_from_cache(hub, name), str) for name in ("model.safetensors", "pytorch_model.bin")):
        return
    try:
        # One request with a short timeout: the hub's client retries for minutes.
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
    """Raise a ValueError if a timm model cannot read the images of `data`."""
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
    patch = getattr(patch_embed, "patch_size", None)
    sides = patch if isinstance(patch, tuple) else (patch or 1,)
    # timm ignores the pixels beyond the last patch.
    if any(data.image_size % side for side in sides) and not getattr(patch_embed, "dynamic_img_pad", False):
        raise ValueError(
            f"data.image_size is {data.image_size}, which the model's patches of {sides[0]} pixels do not divide: take "
            "a multiple"
        )
    pool = getattr(model, "global_pool", None)
    if (data.label_patch is not None) != (pool == ""):
        raise ValueError(
            f"data.label_patch is {data.label_patch} and the model's global_pool {pool!r}: a model that pools answers "
            "images, one with model.args.global_pool '' patches"
        )
    if pretrained and data.channels == 3:
        published = getattr(model, "pretrained_cfg", {})
        for name, default in {"mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD}.items():
            actual = tuple(getattr(data, name) or default)
            expected = tuple(published.get(name, default))
            if actual != expected:
                raise ValueError(
                    f"the published weights expect images normalised with {name} {list(expected)}, "
                    f"data gives {list(actual)}; set data.{name} to {list(expected)}"
                )


def create_criterion(loss: LossConfig, mixed: bool) -> nn.Module:
    """Create timm's criterion, which maps logits (B, C) and targets to a scalar."""
    if loss.kind == "bce":
        return BinaryCrossEntropy(smoothing=0.0 if mixed else loss.smoothing)
    if mixed:
        return SoftTargetCrossEntropy()
    return LabelSmoothingCrossEntropy(loss.smoothing) if loss.smoothing else nn.CrossEntropyLoss()
