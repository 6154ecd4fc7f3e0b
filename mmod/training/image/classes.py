"""The classes that an image classifier answers with, by name: of its run, or of published weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from timm.data import ImageNetInfo, infer_imagenet_subset
from torch import nn

from mmod.adapters import image_facts
from mmod.data.labels import CLASSES, ModelClasses, read_classes
from mmod.training.engine.config import RUN_CONFIG
from mmod.training.image.config import TrainConfig


def run_classes(checkpoint: str | Path | None) -> dict[str, int] | None:
    """Return the numbers of the classes of a run by name; None unless the path is in a run folder that names them."""
    if checkpoint is None:
        return None
    path = Path(checkpoint)
    # The folder itself, or that of `model/model.safetensors` in it.
    folders = (folder for folder in (path, *path.parents[:2]) if (folder / RUN_CONFIG).is_file())
    folder = next(folders, None)
    return None if folder is None or not (folder / CLASSES).is_file() else read_classes(folder / CLASSES)


def model_classes(config: TrainConfig, model: nn.Module) -> ModelClasses | None:
    """Return the classes of the model that a run starts from; None where they are not known, as of a new classifier."""
    checkpoint = config.model.checkpoint
    named = config.data.classes
    numbers = run_classes(checkpoint) if config.has_classes else None
    if numbers is not None:
        return ModelClasses(numbers, f"the run of {checkpoint!r}")
    if named is not None:
        return ModelClasses(read_classes(named), named)
    published = published_classes(model) if config.has_classes else None
    return None if published is None else ModelClasses(published, "timm", required=False)


def published_classes(model: nn.Module) -> dict[str, int] | None:
    """Return the classes of a model by name, as its weights state them or, by their number, those of ImageNet.

    Classes of ImageNet are named by their WordNet identifiers, as its folders are.
    """
    facts = image_facts(model)
    subset = infer_imagenet_subset({"num_classes": facts.classes})
    known = None if subset is None else ImageNetInfo(subset)
    if facts.names is not None and (known is None or [*facts.names] != known.label_descriptions()):
        return dict(facts.names)
    return None if known is None else {name: number for number, name in enumerate(known.label_names())}


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
