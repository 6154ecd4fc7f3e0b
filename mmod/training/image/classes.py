"""The classes that the model of an image run answers with, by name: of an earlier run, or of published weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from mmod.data.labels import ModelClasses, read_classes
from mmod.opening.runs import run_classes
from mmod.opening.timm import published_classes
from mmod.training.image.config import TrainConfig


def model_classes(config: TrainConfig, model: nn.Module) -> ModelClasses | None:
    """Return the classes of the model that a run starts from; None where they are not known, as of a new classifier."""
    checkpoint = config.model.checkpoint
    named = config.data.classes
    # The run that wrote the weights knows best; a list of the user's comes before what a library publishes.
    numbers = run_classes(checkpoint) if config.has_classes else None
    if numbers is not None:
        return ModelClasses(numbers, f"the run of {checkpoint!r}")
    if named is not None:
        return ModelClasses(read_classes(named), named)
    published = published_classes(model) if config.has_classes else None
    return None if published is None else ModelClasses(published, "timm", required=False)


def check_same_classes(numbers: Mapping[str, int] | None, checkpoint: str | Path, what: str) -> None:
    """Raise a ValueError if a run numbers its classes in another way than this model does."""
    others = run_classes(checkpoint)
    if numbers is None or others is None or others == numbers:
        return
    name = next(name for name in sorted({*numbers, *others}) if numbers.get(name) != others.get(name))
    raise ValueError(
        f"{what} {str(checkpoint)!r} answers with other classes: {name!r} is {others.get(name, 'none')} there and "
        f"{numbers.get(name, 'none')} here"
    )
