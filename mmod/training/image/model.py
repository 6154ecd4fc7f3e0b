"""The objects that train image classifiers: the model, its criterion and mixup."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
from huggingface_hub import constants, try_to_load_from_cache
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import nn

from mmod.adapters import image_facts
from mmod.data.config import DataConfig
from mmod.io.files import is_of_transformers
from mmod.training.engine import folder
from mmod.training.image.config import LossConfig, ModelConfig
from mmod.values import near_names

_FILE = "set model.checkpoint to a file of weights and model.pretrained to false"


def create_dense_model(config: ModelConfig, advice: str = _FILE) -> nn.Module:
    """Create a model of timm, or of a folder of timm or transformers, without its checkpoint, in training mode.

    Args:
        advice: What to do where published weights are not available, an English imperative.
    """
    name = config.name
    if is_of_transformers(name):
        return folder.create_model(name, config.pretrained, config.args)
    if Path(name).is_dir():
        name = f"local-dir:{Path(name).resolve()}"
    elif "/" not in name and not timm.is_model(name):
        hint = near_names(name.split(".")[0], timm.list_models(), "timm.list_models()")
        raise ValueError(f"timm knows no model {name!r}; {hint}")
    check_published(config, advice)
    try:
        return timm.create_model(name, pretrained=config.pretrained, **config.args)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise TypeError(f"model.args does not fit {config.name!r}: {error}") from error


def check_published(config: ModelConfig, advice: str) -> None:
    """Raise if published weights are asked for and neither cached nor available; see `create_dense_model`."""
    if "/" in config.name or Path(config.name).is_dir():
        return
    hub = getattr(timm.get_pretrained_cfg(config.name), "hf_hub_id", None)
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
            f"{advice}"
        ) from error


def check_input(model: nn.Module, data: DataConfig, pretrained: bool) -> None:
    """Raise a ValueError if a model cannot read the images of `data`."""
    facts = image_facts(model)
    if facts.channels is not None and facts.channels != data.channels:
        raise ValueError(
            f"data.channels is {data.channels} and the model takes {facts.channels}; set data.channels to "
            f"{facts.channels}, or model.args.in_chans to {data.channels}"
        )
    side = data.image_size
    if facts.size is not None and facts.size != (side, side):
        raise ValueError(
            f"data.image_size is {side} and the model takes {facts.size[0]}x{facts.size[1]}; "
            f"set model.args.img_size to {side}"
        )
    # Hosts ignore the pixels beyond the last patch.
    if facts.patch is not None and not facts.pads and any(side % length for length in facts.patch):
        raise ValueError(
            f"data.image_size is {side}, which the model's patches of {facts.patch[0]} pixels do not divide: take "
            "a multiple"
        )
    pool = getattr(model, "global_pool", None)
    if (data.label_patch is not None) != (pool == ""):
        raise ValueError(
            f"data.label_patch is {data.label_patch} and the model's global_pool {pool!r}: a model that pools answers "
            "images, one with model.args.global_pool '' patches"
        )
    if pretrained and data.channels == 3:
        published = _published_statistics(model)
        for name, default in {"mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD}.items():
            actual = tuple(getattr(data, name) or default)
            expected = tuple(published.get(name, default))
            if actual != expected:
                raise ValueError(
                    f"the published weights expect images normalised with {name} {list(expected)}, "
                    f"data gives {list(actual)}; set data.{name} to {list(expected)}"
                )


def _published_statistics(model: Any) -> Mapping[str, Any]:
    """Return the "mean" and "std" of the images that a model's weights were trained on, where they are known."""
    if is_of_transformers(getattr(model, "name_or_path", "")):
        return folder.evaluation_fields(model.name_or_path)
    return getattr(model, "pretrained_cfg", {})


def create_criterion(loss: LossConfig, mixed: bool) -> nn.Module:
    """Create timm's criterion, which maps logits (B, C) and targets to a scalar."""
    if loss.kind == "bce":
        return BinaryCrossEntropy(smoothing=0.0 if mixed else loss.smoothing)
    if mixed:
        return SoftTargetCrossEntropy()
    return LabelSmoothingCrossEntropy(loss.smoothing) if loss.smoothing else nn.CrossEntropyLoss()
