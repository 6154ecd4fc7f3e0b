"""Image models of transformers, as a run saves them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mmod.data.config import DataConfig
from mmod.opening.transformers import INTERPOLATIONS


def save_model(
    model: Any, folder: Path, data: DataConfig, mean: Tensor, std: Tensor, numbers: Mapping[str, int] | None
) -> None:
    """Write a folder that `mmod.load_pretrained` or transformers reads, with a processor of the evaluation images.

    Args:
        mean: Mean of the normalisation, per channel; so is `std`.
        numbers: Number of each class by name; None keeps the model's names.
    """
    from transformers import ViTImageProcessor

    if numbers is not None:
        model.config.id2label = {number: name for name, number in numbers.items()}
        model.config.label2id = dict(numbers)
    side = data.image_size
    if hasattr(model, "timm_model"):
        # The processor of these models reads it in config.json.
        published = {
            "crop_pct": data.crop_pct,
            "interpolation": data.interpolation,
            "input_size": [data.channels, side, side],
        }
        statistics = {"mean": mean.tolist(), "std": std.tolist()}
        model.config.pretrained_cfg = {
            **(getattr(model.config, "pretrained_cfg", None) or {}),
            **published,
            **statistics,
        }
        model.save_pretrained(folder)
        return
    model.save_pretrained(folder)
    processor = ViTImageProcessor(
        # The size before the crop, from which the processor cuts the middle.
        size={"shortest_edge": math.floor(side / data.crop_pct)},
        do_center_crop=True,
        crop_size={"height": side, "width": side},
        resample=INTERPOLATIONS.index(data.interpolation),
        image_mean=mean.tolist(),
        image_std=std.tolist(),
    )
    processor.save_pretrained(folder)
