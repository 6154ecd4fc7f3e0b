"""How `mmod.open_model` opens the runs of pairs: their start, and how their images are prepared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmod.io.files import is_of_transformers
from mmod.opening.open import OPEN_CLIP, open_model
from mmod.opening.opened import Opened


def open_start(model: Mapping[str, Any], weights: bool = True) -> Opened:
    """Open the model that fields of `ModelConfig` name; without `weights` they are drawn at random."""
    name = model["name"]
    if is_of_transformers(name):
        return open_model(name, pretrained=weights)
    from mmod.opening.open_clip import SCHEMES, register_config, weights_follow

    if model.get("config") is not None:
        register_config(model["config"], name)
    tag = model.get("pretrained")
    published = weights and (tag is not None or name.startswith(SCHEMES))
    # Where no published weights are taken, open_clip reports random ones unless others follow.
    follow = not weights or any(model.get(key) is not None for key in ("checkpoint", "image_checkpoint"))
    spec = f"{OPEN_CLIP}{name}:{tag}" if tag else f"{OPEN_CLIP}{name}"
    with weights_follow(follow):
        return open_model(spec, pretrained=published, args={"output_dict": True})


def of_run(opened: Opened, fields: Mapping[str, Any], run: Path) -> Opened:
    """Return the model of a run with its preprocessing."""
    return opened.prepared("of the run")
