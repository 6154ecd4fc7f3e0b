"""The data sets of torchvision, as `timm.data.create_dataset` opens them, but for image folders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from mmod.data.labels import Classes, ModelClasses, match_classes, renumbered_class
from mmod.data.readers.images import convert_image, open_image, read_image, turn_upright


class TimmSource:
    """The samples of a set of torchvision, their classes numbered as in the set or in a model.

    Args:
        model: The classes of the model that reads the images, if they are known by name.
    """

    def __init__(
        self,
        name: str,
        root: str | None,
        split: str,
        options: dict[str, object] | None = None,
        model: ModelClasses | None = None,
    ):
        self._dataset = _open(name, root, split, options or {})
        self._name = f"{name}:{root}"
        named = getattr(self._dataset, "class_to_idx", None)
        # Some sets have another object by this name, and no names.
        raw: dict[str, int] = dict(named) if isinstance(named, dict) else {}
        self.classes = None
        numbers: Mapping[str, int] = {}
        if raw:
            self.classes = match_classes(Classes(raw, len(raw)), raw, model, self._name)
            numbers = self.classes.numbers
        # Labels of the data set to those of `classes`; many names of one number are synonyms.
        self._numbers = {raw[label]: numbers[label] for label in raw.keys() & numbers.keys()}

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, index: int, mode: str) -> tuple[Image.Image, int]:
        """Read one sample; see `ImageSource.read`."""
        try:
            image, label = self._dataset[index]
            # Some sets open files themselves.
            return convert_image(turn_upright(image), mode), renumbered_class(label, self._numbers)
        except (SyntaxError, TypeError, LookupError, AssertionError) as error:
            # Pillow's decoders and torchvision's sets raise errors of many types.
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def labels(self) -> list[int]:
        """Return the class of each sample, -1 for none, without decoding images if the data set allows it."""
        if hasattr(self._dataset, "samples"):
            raw = [label for _, label in self._dataset.samples]
        elif getattr(self._dataset, "targets", None) is not None:
            # Some sets hold a tensor.
            raw = np.asarray(self._dataset.targets).tolist()
        else:
            raw = [label for _, label in self._dataset]
        return [self._label(label) for label in raw]

    def _label(self, label: object) -> int:
        try:
            return renumbered_class(label, self._numbers)
        except ValueError:
            # The fault is counted when the sample is read.
            return -1

    def place(self, index: int) -> tuple[str, str]:
        """Return where a sample is; see `ImageSource.place`."""
        if hasattr(self._dataset, "samples"):
            return str(self._dataset.samples[index][0]), ""
        return self._name, str(index)


def _open(name: str, root: str | None, split: str, options: dict[str, Any]) -> Any:
    from timm.data import create_dataset

    try:
        dataset = create_dataset(name, root, split, input_img_mode="", **options)
    except (RuntimeError, FileNotFoundError, AssertionError) as error:
        raise ValueError(f"source {name!r} cannot be read: {error}") from error
    if hasattr(dataset, "loader"):
        # torchvision's loader turns 16-bit images white.
        dataset.loader = _load
    return dataset


def _load(path: str) -> Image.Image:
    return open_image(read_image(path))
