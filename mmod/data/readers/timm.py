"""Image folders and the other random-access data sets of `timm.data.create_dataset`."""

from __future__ import annotations

import os
from typing import Any

from PIL import Image

from mmod.data.config import FOLDERS, check_name
from mmod.data.corrupt import Fault
from mmod.data.readers.images import UnreadableSampleError, convert_image, decode_image, open_image, read_image

_SYNONYMS = (("train", "training"), ("val", "valid", "validation", "eval", "evaluation"))


class TimmSource:
    """The samples of a timm data set; all splits of an image folder must share the class numbers of `train_split`.

    timm replaces an unreadable image by the next one and only logs it. Here they are counted.
    """

    def __init__(
        self,
        name: str,
        root: str | None,
        split: str,
        options: dict[str, Any] | None = None,
        train_split: str = "train",
    ):
        check_name(name)
        options = dict(options or {})
        folder = _split_folder(root, split) if name.lower() in FOLDERS else None
        self._dataset = _open(name, folder or root, split, options)
        self._reader = getattr(self._dataset, "reader", None)
        self._owner = self._reader or self._dataset
        self._name = f"{name or 'folder'}:{folder or root}"
        # timm applies a class map only in its own reader.
        if folder is not None and ("class_map" not in options or self._reader is None):
            train = _find_folder(str(root), train_split)
            if train not in (None, folder):
                _check_classes(self._dataset, folder, _open(name, train, train_split, options), str(train))

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, index: int, mode: str) -> tuple[Image.Image, int]:
        """Read one sample; see `ImageSource.read`."""
        try:
            if self._reader is None:
                image, label = self._dataset[index]
                return convert_image(image, mode), int(label)
            if hasattr(self._reader, "samples"):
                path, label = self._reader.samples[index]
                return decode_image(read_image(path), mode), int(label)
            stream, label, *_ = self._reader[index]
            with stream:
                return decode_image(stream.read(), mode), int(label)
        except (OSError, ValueError, SyntaxError) as error:
            raise UnreadableSampleError(Fault(*self._place(index), str(error))) from error

    def labels(self) -> list[int]:
        """Return the class of each sample, without decoding images if the data set allows it."""
        if hasattr(self._owner, "samples"):
            return [int(label) for _, label in self._owner.samples]
        if hasattr(self._owner, "iter_targets"):
            return [int(label) for label in self._owner.iter_targets()]
        targets = getattr(self._owner, "targets", None)
        return [int(label) for label in (targets if targets is not None else (entry[1] for entry in self._dataset))]

    def _place(self, index: int) -> tuple[str, str]:
        if hasattr(self._owner, "samples"):
            return str(self._owner.samples[index][0]), ""
        return self._name, str(index)


def _open(name: str, root: str | None, split: str, options: dict[str, Any]) -> Any:
    from timm.data import create_dataset

    if name.lower() in FOLDERS:
        options = {**options, "search_split": False}
    try:
        dataset = create_dataset("" if name == "folder" else name, root, split, input_img_mode="", **options)
    except (RuntimeError, FileNotFoundError, AssertionError) as error:
        # An empty folder (for torchvision, of any class), or a missing class map.
        raise ValueError(f"source {name!r} cannot be read: {error}") from error
    if name.lower() in FOLDERS and "class_map" not in options:
        _check_filled(str(root), getattr(dataset, "reader", dataset).samples)
    if hasattr(dataset, "loader"):
        # torchvision's loader turns 16-bit images white.
        dataset.loader = _load
    return dataset


def _load(path: str) -> Image.Image:
    return open_image(read_image(path))


def _split_folder(root: str | None, split: str) -> str:
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


def _check_classes(dataset: Any, folder: str, train: Any, train_folder: str) -> None:
    """Refuse splits with different classes: a class number is a rank, so a missing class shifts the others."""
    numbers, train_numbers = (getattr(split, "reader", split).class_to_idx for split in (dataset, train))
    if numbers != train_numbers:
        differing = sorted({*numbers} ^ {*train_numbers})
        raise ValueError(
            f"{folder} and {train_folder} have images of different classes, so labels would not agree: "
            f"{', '.join(differing[:5])} {'and more ' if len(differing) > 5 else ''}only in one of them; "
            "give options={'class_map': ...}"
        )


def _folders(path: str) -> list[str]:
    return sorted(entry.name for entry in os.scandir(path) if entry.is_dir())
