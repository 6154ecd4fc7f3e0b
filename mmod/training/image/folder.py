"""Image models of transformers, as a run saves them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmod.opening.transformers import INTERPOLATIONS


def save_model(model: Any, folder: Path, prepared: Mapping[str, Any], numbers: Mapping[str, int] | None) -> None:
    """Write a folder that `mmod.load_pretrained` or transformers reads, with a processor of the evaluation images.

    Args:
        prepared: How images are prepared for evaluation, see `mmod.data.loader.evaluation_fields`.
        numbers: Number of each class by name; None keeps the model's names.
    """
    from transformers import ViTImageProcessor

    if numbers is not None:
        model.config.id2label = {number: name for name, number in numbers.items()}
        model.config.label2id = dict(numbers)
    # As the file will be read: JSON has no tuples.
    prepared = {name: list(value) if isinstance(value, tuple) else value for name, value in prepared.items()}
    if hasattr(model, "timm_model"):
        # The processor of these models reads it in config.json.
        model.config.pretrained_cfg = {**(getattr(model.config, "pretrained_cfg", None) or {}), **prepared}
        model.save_pretrained(folder)
        return
    model.save_pretrained(folder)
    _, height, width = prepared["input_size"]
    processor = ViTImageProcessor(
        # The size before the crop, from which the processor cuts the middle.
        size={"shortest_edge": math.floor(min(height, width) / prepared["crop_pct"])},
        do_center_crop=True,
        crop_size={"height": height, "width": width},
        resample=INTERPOLATIONS.index(prepared["interpolation"]),
        image_mean=prepared["mean"],
        image_std=prepared["std"],
    )
    processor.save_pretrained(folder)
