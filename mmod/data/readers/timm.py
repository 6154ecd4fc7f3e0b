"""The random-access data sets of `timm.data.create_dataset`, but for image folders."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from mmod.data.config import check_name
from mmod.data.labels import Classes, ModelClasses, match_classes, read_class_map, renumbered_class
from mmod.data.readers.images import (
    convert_image,
    decode_image,
    open_image,
    read_image,
    turn_upright,
)
from mmod.values import brief


class TimmSource:
    """The samples of a timm data set, their classes numbered as in the set or in a model.

    timm replaces an unreadable image by the next one and only logs it. Here they are counted.

    Args:
        model: The classes of the model that reads the images, if they are known by name.
    """

    def __init__(
        self,
        name: str,
        root: str | None,
        split: str,
        options: dict[str, Any] | None = None,
        model: ModelClasses | None = None,
    ):
        check_name(name)
        options = dict(options or {})
        # By the rules for class folders, which read more formats than timm.
        if options.get("class_map") is not None:
            options["class_map"] = read_class_map(options["class_map"], root or "")
        self._dataset = _open(name, root, split, options)
        self._reader = getattr(self._dataset, "reader", None)
        self._owner = self._reader or self._dataset
        self._name = f"{name}:{root}"
        named = getattr(self._owner, "class_to_idx", None)
        # Some sets have another object by this name, and no names.
        raw: dict[str, int] = dict(named) if isinstance(named, dict) else {}
        self.classes = match_classes(Classes(raw, len(raw)), raw, model, self._name) if raw else None
        # Labels of the data set to those of `classes`; many names of one number are synonyms.
        numbers = {} if self.classes is None else self.classes.numbers
        self._numbers = {raw[label]: numbers[label] for label in raw.keys() & numbers.keys()}
        if hasattr(self._reader, "iter_targets"):
            self._check_labels(self._reader)

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, index: int, mode: str) -> tuple[Image.Image, int]:
        """Read one sample; see `ImageSource.read`."""
        try:
            if self._reader is None:
                image, label = self._dataset[index]
                # Some sets of torchvision open files themselves.
                return convert_image(turn_upright(image), mode), renumbered_class(label, self._numbers)
            stream, label, *_ = self._reader[index]
            with stream:
                return decode_image(stream.read(), mode), renumbered_class(label, self._numbers)
        except (SyntaxError, TypeError, LookupError, AssertionError) as error:
            # Of timm's readers, for rows without an image or with a label outside the class map.
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def labels(self) -> list[int]:
        """Return the class of each sample, -1 for none, without decoding images if the data set allows it."""
        if hasattr(self._owner, "samples"):
            raw = [label for _, label in self._owner.samples]
        elif hasattr(self._owner, "iter_targets"):
            raw = list(self._owner.iter_targets())
        elif getattr(self._owner, "targets", None) is not None:
            # Some sets of torchvision hold a tensor.
            raw = np.asarray(self._owner.targets).tolist()
        else:
            raw = [entry[1] for entry in self._dataset]
        return [self._label(label) for label in raw]

    def _label(self, label: object) -> int:
        try:
            return renumbered_class(label, self._numbers)
        except ValueError:
            # The fault is counted when the sample is read.
            return -1

    def _check_labels(self, reader: Any) -> None:
        """Refuse a column of labels of another kind."""
        # Some rows may have no label; the first that has one shows the kind.
        label = next((label for label in reader.iter_targets() if label is not None), 0)
        if isinstance(label, (str, list, tuple, dict)):
            raise ValueError(
                f"the labels of {self._name} are such as {brief(label)}, and a class is a number: name the numbers of "
                "texts by options={'class_map': {...}}, or another column by options={'target_key': ...}"
            )

    def place(self, index: int) -> tuple[str, str]:
        """Return where a sample is; see `ImageSource.place`."""
        if hasattr(self._owner, "samples"):
            return str(self._owner.samples[index][0]), ""
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
