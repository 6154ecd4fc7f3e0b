"""How the images of a run are prepared: as its model wants them, where the config leaves that open."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from mmod.data.config import PREPARATION
from mmod.data.loader import evaluation_fields, is_embedded
from mmod.io.yaml import merged
from mmod.opening.open import open_model
from mmod.opening.opened import Opened, Preprocessing
from mmod.opening.runs import find_run, holds_work, model_folder, read_run_config
from mmod.pretrained import HUB, has_changed
from mmod.random_state import Unfilled
from mmod.training.engine.run_folder import portable
from mmod.training.image.config import ModelConfig, TrainConfig

# Of timm, by open_clip's name.
_CROP_MODES = {"shortest": "center", "longest": "border", "squash": "squash"}


def open_start(config: ModelConfig, weights: bool = True, or_set: str = "") -> Opened:
    """Open the dense model that a config names; without `weights` they are drawn at random.

    Args:
        or_set: What may be set besides the model, where its published weights are missing.
    """
    start = "set model.checkpoint to a file of weights and model.pretrained to false"
    advice = ", or ".join(filter(None, [start, or_set]))
    return open_model(config.name, pretrained=weights and config.pretrained, args=config.args, advice=advice)


def with_preparation(config: TrainConfig) -> TrainConfig:
    """Return a config whose data say how images are prepared, as its model wants them where it leaves that open.

    A run that goes on takes what it recorded. Otherwise it is what the run or the saved folder of the starting weights
    says, or the library for the name of the model. Embedded sets, and images of other channels than the model's, are
    prepared by the defaults of `evaluation_fields`.
    """
    data = config.data
    left_open = [name for name in PREPARATION if getattr(data, name) is None]
    if not left_open:
        return config
    recorded = _recorded(config)
    if recorded:
        # Earlier runs recorded null where they took the defaults of `evaluation_fields`.
        taken = {name: recorded.get(name) for name in left_open}
        return type(config).from_dict(merged(config.as_written(), {"data": taken}))
    known: Mapping[str, Any] = {}
    if not is_embedded(data):
        known = wanted_by(_starting_model(config))
    if len(known.get("mean", ())) == data.channels:
        plain = {**known, "mean": tuple(known["mean"]), "std": tuple(known["std"])}
        data = dataclasses.replace(data, **{name: plain[name] for name in left_open if name in plain})
    fields = evaluation_fields(data)
    return dataclasses.replace(config, data=dataclasses.replace(data, **{name: fields[name] for name in PREPARATION}))


def _recorded(config: TrainConfig) -> Mapping[str, object]:
    """Return the data of the run in a config's folder, if it started from the same model; empty where there is none."""
    if find_run(config.output) != Path(config.output) or not holds_work(config.output):
        return {}
    recorded = read_run_config(Path(config.output))
    if portable(recorded).get("model") != portable(config.as_written())["model"]:
        return {}
    return recorded.get("data") or {}


def _starting_model(config: TrainConfig) -> Opened:
    """Open the run or saved folder that a config starts from; else its model by name, without weights."""
    for path in config.model.weights.values():
        if find_run(path) or model_folder(path):
            # Of another kind, it is refused.
            config.check_kind("a file of weights")
            return open_model(path)
    named = config.model
    # What mmod saved there comes with its weights.
    if named.pretrained and named.name.startswith(HUB) and has_changed(named.name):
        return open_model(named.name)
    with torch.device("meta"), Unfilled():
        return open_start(named, weights=False)


def wanted_by(opened: Opened) -> Mapping[str, object]:
    """Return arguments of timm's `create_transform` that prepare images as a model wants; empty if it says nothing."""
    # A folder of transformers may have no processor.
    with suppress(ValueError):
        prepared = opened.preprocessing
        # Of a model that reads text it is a processor.
        if isinstance(prepared, Preprocessing):
            if not prepared.is_clip:
                return prepared.fields
            resized = _CROP_MODES[prepared.fields["resize_mode"]]
            return {**prepared.fields, "crop_pct": 1.0, "crop_mode": resized}
    return {}
