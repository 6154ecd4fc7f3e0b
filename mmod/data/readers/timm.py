"""Image folders and the other random-access data sets of `timm.data.create_dataset`."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from PIL import Image

from mmod.data.config import FOLDERS, check_name
from mmod.data.corrupt import Fault
from mmod.data.labels import Classes, ModelClasses, class_number, match_classes, rank_names
from mmod.data.readers.images import (
    UnreadableSampleError,
    convert_image,
    decode_image,
    open_image,
    read_image,
    turn_upright,
)
from mmod.values import brief

_SYNONYMS = (("train", "training"), ("val", "valid", "validation", "eval", "evaluation"))


class TimmSource:
    """The samples of a timm data set, their classes numbered as in `train_split` or in a model.

    timm replaces an unreadable image by the next one and only logs it. Here they are counted.

    Args:
        model: The classes of the model that reads the images, if they are known by name.
        labelled: Refuse images of a folder that are in no class folder.
    """

    def __init__(
        self,
        name: str,
        root: str | None,
        split: str,
        options: dict[str, Any] | None = None,
        train_split: str = "train",
        model: ModelClasses | None = None,
        labelled: bool = True,
    ):
        check_name(name)
        options = dict(options or {})
        is_folder = name.lower() in FOLDERS
        folder = split_folder(root, split) if is_folder else None
        self._dataset = _open(name, folder or root, split, options)
        self._reader = getattr(self._dataset, "reader", None)
        self._owner = self._reader or self._dataset
        self._name = f"{name or 'folder'}:{folder or root}"
        raw = _raw_numbers(self._owner)
        present = set(raw)
        own = Classes(raw, len(raw)) if raw else None
        if folder is not None:
            if labelled and "" in raw:
                raise ValueError(
                    f"{folder} has images outside class folders, so they have no class: put each into the folder of "
                    "its class, or remove it"
                )
            used = {label for _, label in self._owner.samples}
            present = {label for label in raw if raw[label] in used}
            own = None if "" in raw else _folder_classes(name, str(root), folder, train_split, options, raw, model)
        self.classes = None if own is None else match_classes(own, present, model, folder or self._name)
        # Labels of the data set to those of `classes`; many names of one number are synonyms.
        numbers = {} if self.classes is None else self.classes.numbers
        self._numbers: dict[int, int] = {}
        for label in present & numbers.keys():
            if self._numbers.setdefault(raw[label], numbers[label]) != numbers[label]:
                raise ValueError(
                    f"{self._name}: the number {raw[label]} stands for several classes of the model, one of which is "
                    f"{label!r}: leave class_map out, as classes are matched by name"
                )
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
                return convert_image(turn_upright(image), mode), self._number(label)
            if hasattr(self._reader, "samples"):
                path, label = self._reader.samples[index]
                return decode_image(read_image(path), mode), self._number(label)
            stream, label, *_ = self._reader[index]
            with stream:
                return decode_image(stream.read(), mode), self._number(label)
        except (OSError, ValueError, SyntaxError) as error:
            raise UnreadableSampleError(Fault(*self._place(index), str(error))) from error
        except (TypeError, LookupError, AssertionError) as error:
            # Of timm's readers, for rows without an image or with a label outside the class map.
            reason = f"{type(error).__name__}: {error}"
            raise UnreadableSampleError(Fault(*self._place(index), reason)) from error

    def labels(self) -> list[int]:
        """Return the class of each sample, -1 for none, without decoding images if the data set allows it."""
        if hasattr(self._owner, "samples"):
            raw = [label for _, label in self._owner.samples]
        elif hasattr(self._owner, "iter_targets"):
            raw = list(self._owner.iter_targets())
        else:
            targets = getattr(self._owner, "targets", None)
            # Some sets of torchvision hold a tensor.
            raw = [entry[1] for entry in self._dataset] if targets is None else np.asarray(targets).tolist()
        return [self._label(label) for label in raw]

    def _number(self, label: Any) -> int:
        number = class_number(label)
        if self._numbers and number not in self._numbers:
            raise ValueError(f"class {number} has no name among {len(self._numbers)}")
        return self._numbers.get(number, number)

    def _label(self, label: Any) -> int:
        try:
            return self._number(label)
        except ValueError:
            # The fault is counted when the sample is read.
            return -1

    def _check_labels(self, reader: Any) -> None:
        """Refuse a column of labels of another kind."""
        label = next((label for label in reader.iter_targets() if label is not None), 0)
        if isinstance(label, (str, list, tuple, dict)):
            raise ValueError(
                f"the labels of {self._name} are such as {brief(label)}, and a class is a number: name the numbers of "
                "texts by options={'class_map': {...}}, or another column by options={'target_key': ...}"
            )

    def _place(self, index: int) -> tuple[str, str]:
        if hasattr(self._owner, "samples"):
            return str(self._owner.samples[index][0]), ""
        return self._name, str(index)


def _open(name: str, root: str | None, split: str, options: dict[str, Any]) -> Any:
    from timm.data import create_dataset
    from timm.data.readers.class_map import load_class_map

    if name.lower() in FOLDERS:
        options = {**options, "search_split": False}
    try:
        dataset = create_dataset("" if name == "folder" else name, root, split, input_img_mode="", **options)
    except (RuntimeError, FileNotFoundError, AssertionError) as error:
        # An empty folder (for torchvision, of any class), or a missing class map.
        raise ValueError(f"source {name!r} cannot be read: {error}") from error
    if name.lower() in FOLDERS and "class_map" not in options:
        _check_filled(str(root), getattr(dataset, "reader", dataset).samples)
    elif name.lower() in FOLDERS and not hasattr(dataset, "reader"):
        _apply_map(dataset, load_class_map(options["class_map"], str(root)))
    if hasattr(dataset, "loader"):
        # torchvision's loader turns 16-bit images white.
        dataset.loader = _load
    return dataset


def _apply_map(dataset: Any, numbers: dict[str, int]) -> None:
    """Number the classes of torchvision's image folder as timm's reader does; it leaves out what the map lacks."""
    names = dataset.classes
    dataset.samples = [(path, numbers[names[label]]) for path, label in dataset.samples if names[label] in numbers]
    dataset.targets = [label for _, label in dataset.samples]
    dataset.class_to_idx = dict(numbers)


def _load(path: str) -> Image.Image:
    return open_image(read_image(path))


def split_folder(root: str | None, split: str) -> str:
    """Return the split's folder. timm would read all of `root` if it is missing; here that is an error."""
    if root is None or not os.path.isdir(root):
        raise ValueError(f"root={root!r} is no folder: name one by data.root, or by images in a study")
    folder = _find_folder(root, split)
    if folder is None:
        raise ValueError(f"{root} has no folder for the split {split!r}; it has: {', '.join(_folders(root)) or 'none'}")
    return folder


def _find_folder(root: str, split: str) -> str | None:
    """Return the folder of a split, by its name or a common synonym; `root` for an empty name."""
    if not split:
        return root
    names = next((synonyms for synonyms in _SYNONYMS if split in synonyms), ())
    folders = [os.path.join(root, name) for name in (split, *names)]
    return next((folder for folder in folders if os.path.isdir(folder)), None)


def _check_filled(folder: str, samples: list[tuple[str, int]]) -> None:
    """Refuse class folders without images: timm skips them, which changes the numbers of the other classes."""
    filled = {os.path.relpath(path, folder).split(os.sep)[0] for path, _ in samples}
    empty = [os.path.join(folder, name) for name in _folders(folder) if name not in filled and name[0] != "."]
    if empty:
        more = " and others" if len(empty) > 3 else ""
        raise ValueError(
            f"class folders without readable images: {', '.join(empty[:3])}{more}. Remove them, or name the "
            "classes by options={'class_map': ...}"
        )


def _raw_numbers(owner: Any) -> dict[str, int]:
    """Return the numbers of classes by name as timm or torchvision have them; empty where they name none."""
    numbers = getattr(owner, "class_to_idx", None)
    return dict(numbers) if isinstance(numbers, dict) else {}


def _folder_classes(
    name: str,
    root: str,
    folder: str,
    train_split: str,
    options: dict[str, Any],
    raw: dict[str, int],
    model: ModelClasses | None,
) -> Classes:
    """Return the classes of an image folder: those of the class map, of the training folder, or its own.

    A number of the last two is a rank, so that a class which the training folder lacks would shift the others.
    """
    if "class_map" in options:
        return Classes(raw, len(raw), given=True)
    train = _find_folder(root, train_split)
    if train in (None, folder) or (model is not None and raw.keys() <= model.numbers.keys()):
        return Classes(rank_names(raw), len(raw))
    training = _open(name, train, train_split, options)
    names = _raw_numbers(getattr(training, "reader", training))
    differing = sorted(raw.keys() - names.keys())
    if differing:
        raise ValueError(
            f"{folder} and {train} have images of different classes, so labels would not agree: "
            f"{', '.join(differing[:5])} {'and more ' if len(differing) > 5 else ''}only in one of them; "
            "give options={'class_map': ...}"
        )
    return Classes(rank_names(names), len(raw), is_plain=names.keys() == raw.keys())


def _folders(path: str) -> list[str]:
    return sorted(entry.name for entry in os.scandir(path) if entry.is_dir())
