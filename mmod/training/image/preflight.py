"""Checks of a run on images before its first step: the model, the images and the classes fit each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from mmod.adapters import find_library, image_facts
from mmod.data.config import DataConfig
from mmod.data.labels import Classes
from mmod.opening.opened import Opened
from mmod.training.image.config import nearest_multiple


def check_input(opened: Opened, data: DataConfig, pretrained: bool) -> None:
    """Raise a ValueError if a model cannot read the images of `data`."""
    model = opened.model
    facts = image_facts(model)
    if facts.channels is not None and facts.channels != data.channels:
        raise ValueError(
            f"data.channels is {data.channels} and the model takes {facts.channels}; set data.channels to "
            f"{facts.channels}, or model.args.in_chans to {data.channels}"
        )
    side = data.image_size
    # First, since no model takes such a side. Hosts ignore the pixels beyond the last patch.
    if facts.patch is not None and not facts.pads and any(side % length for length in facts.patch):
        patch = facts.patch[0]
        raise ValueError(
            f"data.image_size is {side}, which the model's patches of {patch} pixels do not divide: take a multiple, "
            f"such as {nearest_multiple(side, patch)}"
        )
    if facts.size is not None and facts.size != (side, side):
        raise ValueError(
            f"data.image_size is {side} and the model takes {facts.size[0]}x{facts.size[1]}; set model.args.img_size "
            f"to {side}, data.image_size to the model's, or both to the size that the weights were trained at"
        )
    pool = getattr(model, "global_pool", None)
    if (data.label_patch is not None) != (pool == ""):
        raise ValueError(
            f"data.label_patch is {data.label_patch} and the model's global_pool {pool!r}: set model.args.global_pool "
            "to '' for labels of patches, and to a pooling for labels of images"
        )
    # Those of timm's models inside are described as timm does it.
    has_processor = find_library(model) == "transformers" and not hasattr(model, "timm_model")
    if data.crop_mode == "border" and has_processor:
        raise ValueError(
            "data.crop_mode is 'border', which no processor of transformers does, so that the saved model would read "
            "other images: set it to 'center' or 'squash'"
        )
    if pretrained and data.channels == 3:
        check_normalisation(opened.preprocessing.fields, data, "the published weights")


def check_normalisation(fields: Mapping[str, Any], data: DataConfig, what: str) -> None:
    """Raise a ValueError if data normalise images in another way than weights expect.

    Args:
        fields: What the weights expect, arguments of timm's `create_transform`; empty where it is not known.
    """
    for name in ("mean", "std"):
        actual, expected = getattr(data, name), tuple(fields.get(name, ()))
        # Of grey images, timm's models say nothing.
        if actual is None or len(expected) != data.channels:
            continue
        # Folders may hold them in single precision.
        if not all(map(partial(math.isclose, rel_tol=1e-6), actual, expected)):
            raise ValueError(
                f"{what} expect images normalised with {name} {list(expected)}, data gives {list(actual)}; "
                f"set data.{name} to {list(expected)}"
            )


def check_outputs(classes: Classes, outputs: int | None, *, from_checkpoint: bool) -> None:
    """Raise a ValueError if a classifier has another number of outputs than its training data has classes.

    More are fine where the classes are matched to those of the model by name.

    Args:
        classes: The classes of the training data.
        outputs: Outputs of the model; None where it does not say.
        from_checkpoint: The classifier's weights are those of a checkpoint.
    """
    if not outputs:
        return
    count = 1 + max(classes.numbers.values())
    # More outputs than classes are meant where the user listed the classes, and a slip elsewhere.
    if count == outputs or (count < outputs and classes.given):
        return
    advice = f"set model.args.num_classes to {count}"
    if from_checkpoint:
        advice += " and model.head to fresh"
    if count < outputs:
        advice += "; or list the classes of all outputs in a file, data.classes"
    raise ValueError(
        f"the training data has {count} classes, {classes.taken}, and the model {outputs} outputs: {advice}"
    )
