"""How `mmod.open_model` opens the runs of image classifiers: their start, and what is known of their images."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmod.opening.open import open_model
from mmod.opening.opened import Opened, Preprocessing
from mmod.opening.runs import run_classes


def open_start(model: Mapping[str, Any], weights: bool = True) -> Opened:
    """Open the model that fields of `ModelConfig` name; without `weights` they are drawn at random."""
    advice = (
        "set model.checkpoint to a file of weights and model.pretrained to false, or distill.teacher to such a file"
    )
    pretrained = weights and bool(model.get("pretrained"))
    return open_model(model["name"], pretrained=pretrained, args=model.get("args"), advice=advice)


def of_run(opened: Opened, fields: Mapping[str, Any], run: Path) -> Opened:
    """Return the model of a run with its preprocessing and classes."""
    classes = run_classes(run)

    def prepare() -> Preprocessing:
        # Late, because the data's config imports readers that opening does not need.
        from mmod.data.config import DataConfig
        from mmod.data.loader import evaluation_fields
        from mmod.plain import from_plain

        return Preprocessing(evaluation_fields(from_plain(DataConfig, fields["data"])), "of the run")

    return opened._replace(prepare=prepare, classes=classes, is_run=classes is not None)
