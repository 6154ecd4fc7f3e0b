"""Models of open_clip: by name with published weights, in its folders or on the hub, and with any checkpoint."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import open_clip
import torch
from torch import Tensor, nn

from mmod.adapters import image_facts
from mmod.io.configs import find_config
from mmod.io.files import read_json_object, write_atomically
from mmod.io.tensors import write_tensors
from mmod.names import near_names
from mmod.opening.opened import Opened, Options, Preprocessing
from mmod.opening.runs import LOCAL, find_weights
from mmod.opening.weights import check_size, converted, load_weights, read_weights

# Names with these bring their weights.
SCHEMES = (LOCAL, "hf-hub:")


def open_clip_model(name: str, options: Options) -> Opened:
    """Open a model by `NAME[:WEIGHTS]`, `local-dir:FOLDER` or `hf-hub:REPOSITORY`; see `mmod.open_model`."""
    architecture, _, tag = name.partition(":")
    if name.startswith(SCHEMES):
        architecture = name
        tag = ""
    elif architecture not in open_clip.list_models():
        hint = near_names(architecture, open_clip.list_models(), "open_clip.list_models()")
        raise ValueError(f"open_clip knows no model {architecture!r}; {hint}")
    # A checkpoint replaces published weights, which are not downloaded in vain.
    checkpoint = options.checkpoint
    published = options.pretrained and checkpoint is None
    arguments: dict[str, object] = {"load_weights": published, **options.args}
    wanted = None
    if published and tag:
        wanted = tag
    with weights_follow(checkpoint is not None):
        model = open_clip.create_model(
            architecture,
            pretrained=wanted,
            require_pretrained=published,
            force_image_size=options.image_size,
            # open_clip moves the model to this device, which must be the one in use, as meta.
            device=torch.get_default_device(),
            **arguments,
        )
    weights = "its published weights" if published else "random weights"
    if checkpoint is not None:
        state = read_clip(checkpoint)
        asked = options.image_size or options.args.get("force_image_size")
        check_size(state or {}, model.visual, checkpoint, "image_size", {"img_size": asked})
        load_clip(model, checkpoint, state)
        weights = f"the weights of {checkpoint}"
    return Opened(model, f"{name} of open_clip with {weights}", partial(preprocessing_of, model, "of open_clip"))


@contextmanager
def weights_follow(follow: bool = True) -> Iterator[None]:
    """Context in which open_clip does not report random weights, if weights are loaded into the model afterwards."""
    if not follow:
        yield
        return

    def is_shown(record: logging.LogRecord) -> bool:
        return "initialized randomly" not in record.getMessage()

    # open_clip writes to the root.
    root = logging.getLogger()
    root.addFilter(is_shown)
    try:
        yield
    finally:
        root.removeFilter(is_shown)


def register_config(config: str, name: str) -> None:
    """Register the model that a JSON file in open_clip's format describes; the file must be named like the model."""
    path = find_config(config)
    if path.stem != name:
        raise ValueError(f"{config!r} describes a model of the name {path.stem!r}, not {name!r}")
    if path.stem not in open_clip.list_models():
        add_model_configs(path)


def add_model_configs(path: Path) -> None:
    """Tell open_clip of the models that a JSON file describes, or a folder of such files."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    # Copies: open_clip takes a byte order mark for damage, and would keep the name of a file that it cannot read.
    with TemporaryDirectory() as copies:
        for file in files:
            write_atomically(Path(copies) / file.name, json.dumps(read_json_object(file)))
        open_clip.add_model_config(Path(copies))


def preprocessing_of(model: nn.Module, source: str) -> Preprocessing:
    """Return how a model of open_clip expects its images."""
    fields = getattr(model.visual, "preprocess_cfg", None)
    if fields is None:
        raise ValueError(
            f"the {type(model).__name__} does not say how its images are prepared: make it by open_clip.create_model "
            "before it is saved"
        )
    return Preprocessing(dict(fields), source, is_clip=True)


def read_clip(checkpoint: str | Path) -> dict[str, Tensor] | None:
    """Read the weights of a whole model; None for arrays of big_vision, whose names open_clip alone knows."""
    if find_weights(checkpoint).suffix in (".npz", ".npy"):
        return None
    return read_weights(checkpoint)


def load_clip(model: nn.Module, checkpoint: str | Path, state: Mapping[str, Tensor] | None) -> None:
    """Load a dense checkpoint strictly into an open_clip model, converted as open_clip converts published weights.

    Args:
        state: What `read_clip` read.
    """
    file = find_weights(checkpoint)
    with TemporaryDirectory() as temporary:
        if state is not None:
            # open_clip converts what it reads from a file, of which it reads fewer kinds than `read_weights`.
            file = Path(temporary) / "model.safetensors"
            write_tensors(file, state)
        try:
            open_clip.load_checkpoint(model, str(file), strict=True, weights_only=True)
        except RuntimeError as error:
            raise ValueError(f"checkpoint {checkpoint!r} does not fit the model: {error}") from error


def load_image_tower(visual: nn.Module, checkpoint: str) -> None:
    """Load the image tower of a full model, a tower, or the timm model inside a tower."""
    state = read_weights(checkpoint)
    # A checkpoint of the full model has the tower below `visual.`.
    of_tower = {name.removeprefix("visual."): value for name, value in state.items() if name.startswith("visual.")}
    trunk = getattr(visual, "trunk", None)
    if of_tower or trunk is None or any(name.startswith("trunk.") for name in state):
        load_weights(visual, of_tower or state, checkpoint)
        return
    names = set(trunk.state_dict())
    head = image_facts(trunk).head
    # timm's filter: published weights of the trunk may have older names.
    state = converted(state, trunk)
    # Weights of a classifier, which the trunk in a tower does not have, are left out; other unknown names are refused.
    body = {name: value for name, value in state.items() if name in names or not name.startswith(head)}
    load_weights(trunk, body, checkpoint)
