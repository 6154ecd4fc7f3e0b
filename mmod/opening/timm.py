"""Models of timm: by name, in its folders or on hubs, and with the weights of any checkpoint."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import timm
from huggingface_hub import constants, try_to_load_from_cache
from timm.data import ImageNetInfo, infer_imagenet_subset, resolve_data_config
from torch import nn

from mmod.adapters import image_facts
from mmod.io.files import near_paths
from mmod.names import near_names, prefixed
from mmod.opening.opened import Opened, Options, Preprocessing
from mmod.opening.runs import LOCAL, run_classes
from mmod.opening.weights import check_size, converted, load_weights, read_weights
from mmod.values import brief

# What stands before a name that is not one of timm's own.
_SOURCES = ("hf-hub:", "hf_hub:", LOCAL)


def open_timm(name: str, options: Options) -> Opened:
    """Open a model by a name of timm or the folder of one; see `mmod.open_model`."""
    checkpoint = options.checkpoint
    model = create_timm(name, options)
    subject = f"{name} of timm"
    weights = "its published weights"
    if Path(name).is_dir():
        subject = f"the model of timm in {name}"
        weights = "its weights"
    if not options.pretrained:
        weights = "random weights"
    classes = None
    if checkpoint is not None:
        _load_with_classifier(model, checkpoint, options)
        classes = run_classes(checkpoint)
        weights = f"the weights of {checkpoint}"
    is_of_run = classes is not None
    if classes is None:
        classes = published_classes(model)
    return Opened(model, f"{subject} with {weights}", partial(preprocessing_of, model), classes, is_of_run)


def create_timm(name: str, options: Options) -> nn.Module:
    """Create a model by a name of timm or the folder of one, in training mode; a checkpoint is not loaded."""
    args = dict(options.args)
    if options.image_size is not None:
        size = args.setdefault("img_size", options.image_size)
        if size not in (options.image_size, (options.image_size, options.image_size)):
            raise ValueError(f"image_size is {options.image_size} and args say img_size {brief(size)}: leave out one")
    # A checkpoint replaces published weights, which are not downloaded in vain.
    pretrained = options.pretrained and options.checkpoint is None
    full_name = _full_name(name)
    # Before creating, because timm retries for minutes without a network.
    if pretrained:
        check_published(name, args, options.advice)
    try:
        model: nn.Module = timm.create_model(full_name, pretrained=pretrained, **args)
    except (AssertionError, ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        if not args:
            raise
        near = _near_argument(name, str(error))
        raise ValueError(f"timm cannot build {name!r} with model.args {brief(args)}: {error}{near}") from error
    return model


def _full_name(name: str) -> str:
    """Return what timm calls a model, or the folder of one; raise an error for a name that it does not know."""
    if Path(name).is_dir():
        return f"{LOCAL}{Path(name).resolve()}"
    if name.startswith(_SOURCES) or timm.is_model(name.rpartition("/")[2]):
        return name
    if "/" in name:
        raise FileNotFoundError(
            f"no folder of a model at {name!r}{near_paths(name)}; a model of a hub is hf-hub:OWNER/NAME"
        )
    hint = near_names(name.split(".")[0].rpartition(":")[2], timm.list_models(), "timm.list_models()")
    near = near_paths(name, Path.is_dir)
    if near:
        hint += f"; nor is it a folder here{near}"
    raise ValueError(f"timm knows no model {name!r}; {hint}")


def _near_argument(name: str, message: str) -> str:
    """Return as a hint which arguments of a model are near the one that Python says it lacks; empty for none."""
    found = re.match(r"(\w+)\S*\(\) got an unexpected keyword argument '(\w+)'", message)
    if found is None or not timm.is_model(name):
        return ""
    owner, argument = found.groups()
    # The class or function stands in the module of the function that creates the model.
    made = getattr(sys.modules[timm.model_entrypoint(name).__module__], owner, None)
    if not callable(made):
        return ""
    return prefixed("; ", near_names(argument, inspect.signature(made).parameters))


def check_published(name: str, args: Mapping[str, object], advice: str) -> None:
    """Raise a ConnectionError if the published weights of a model of timm are neither cached nor available.

    Args:
        advice: What to do then, an English imperative.
    """
    if "/" in name or ":" in name or Path(name).is_dir():
        return
    hub = getattr(timm.get_pretrained_cfg(name), "hf_hub_id", None)
    if hub is None or any(argument.startswith("pretrained_cfg") for argument in args):
        return
    if any(isinstance(try_to_load_from_cache(hub, file), str) for file in ("model.safetensors", "pytorch_model.bin")):
        return
    try:
        # One request with a short timeout: the hub's client retries for minutes.
        urllib.request.urlopen(constants.ENDPOINT, timeout=10).close()
    except urllib.error.HTTPError:
        # It answers.
        return
    except OSError as error:
        raise ConnectionError(
            f"the published weights of {name!r} are not in the cache and {constants.ENDPOINT} does not answer: {advice}"
        ) from error


def _load_with_classifier(model: Any, checkpoint: str | Path, options: Options) -> None:
    """Load a checkpoint with a classifier of as many classes as it has, perhaps none.

    Another number of classes than the caller names is refused, and so is a size of images that nobody named.
    """
    state = read_weights(checkpoint)
    wanted = options.args.get("num_classes")
    heads = image_facts(model).head
    weights = (state[key] for key in state if key.startswith(heads) and state[key].ndim > 1)
    outputs = next(map(len, weights), 0)
    if wanted not in (None, outputs):
        raise ValueError(
            f"args say num_classes {brief(wanted)} and checkpoint {str(checkpoint)!r} has {outputs}: leave out "
            "num_classes; reset_classifier of the opened model makes a new classifier"
        )
    check_size(state, model, checkpoint, "image_size", {"img_size": options.image_size, **options.args})
    # Resized to the checkpoint before loading, which is strict.
    model.reset_classifier(outputs)
    try:
        load_weights(model, converted(state, model), checkpoint)
    except ValueError as error:
        raise ValueError(
            f"{error}. If it was made with further arguments, name them in Python as args of mmod.open_model, whose "
            "model goes to mmod.advise(model, loader)"
        ) from error


def preprocessing_of(model: nn.Module) -> Preprocessing:
    """Return how a model of timm expects its images, at the size that it was made for."""
    patch_embed: Any = getattr(model, "patch_embed", None)
    side = getattr(patch_embed, "img_size", None)
    sizes = {}
    if side is not None:
        if any(length % patch for length, patch in zip(side, patch_embed.patch_size)):
            patch = patch_embed.patch_size[0]
            raise ValueError(f"image_size must be a multiple of the model's patches, {patch} px, got {side[0]}")
        sizes = {"input_size": (patch_embed.proj.in_channels, *side)}
    return Preprocessing(resolve_data_config(sizes, model=model), "of timm")


@functools.cache
def _read_imagenet(subset: str) -> ImageNetInfo:
    """Return timm's tables of a subset of ImageNet, which are files."""
    return ImageNetInfo(subset)


def published_classes(model: nn.Module) -> dict[str, int] | None:
    """Return the number of each class of a model by the name of the class.

    Names are those that the weights state. Otherwise they are those of the subset of ImageNet that has as many
    classes: WordNet identifiers, as its folders are named. None if there is no such subset.
    """
    facts = image_facts(model)
    subset = infer_imagenet_subset({"num_classes": facts.classes})
    known = None if subset is None else _read_imagenet(subset)
    # Names that equal ImageNet's descriptions give way to its synsets, which data sets use.
    if facts.names is not None and (known is None or [*facts.names] != known.label_descriptions()):
        return dict(facts.names)
    if known is None:
        return None
    return {name: number for number, name in enumerate(known.label_names())}
