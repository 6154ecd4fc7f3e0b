"""Image folders and every other data set by number that `timm.data.create_dataset` knows."""

from __future__ import annotations

import os
from typing import Any

from PIL import Image

from mmod.data.corrupt import Fault
from mmod.data.sources import UnreadableSampleError, decode_image

_STREAMS = ("hfids", "tfds", "wds")
_SYNONYMS = (("train", "training"), ("val", "valid", "validation", "eval", "evaluation"))


class TimmSource:
    """The samples of a timm data set.

    timm's own data set replaces an unreadable image by the next one with a log line; this class reads through
    timm's reader instead, so that such images are counted.

    Args:
        name: Name for `timm.data.create_dataset`: "" or "folder" for a folder with one folder per class, "torch/...",
            "hfds/...".
        root: Folder of the data set.
        split: Its split; for a folder, a folder within `root` ("" is `root` itself).
        options: Further arguments of `create_dataset`, as `class_map`.

    Raises:
        ValueError: If the split's folder does not exist, the train and evaluation folders have different classes, or
            the data set is a stream without numbered samples.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> root = Path(tempfile.mkdtemp())
        >>> for label in ("cat", "dog"):
        ...     (root / "train" / label).mkdir(parents=True)
        ...     Image.new("RGB", (8, 8)).save(root / "train" / label / "0.png")
        >>> len(TimmSource("", str(root), "train"))
        2
    """

    def __init__(self, name: str, root: str | None, split: str, options: dict[str, Any] | None = None):
        from timm.data import create_dataset
        from timm.data.dataset import ImageDataset

        if name.partition("/")[0].lower() in _STREAMS:
            raise ValueError(
                f"source {name!r} is a stream: its samples have no numbers, so that it cannot be resumed exactly; "
                "for webdataset shards use 'shards:PATTERN'"
            )
        options = dict(options or {})
        folder = name in ("", "folder")
        if folder:
            root = _split_folder(root, split)
            if "class_map" not in options:
                _check_classes(root, split)
            options["search_split"] = False
        dataset = create_dataset("" if folder else name, root=root, split=split, input_img_mode="", **options)
        self._dataset = dataset
        self._name = f"{name or 'folder'}:{root}"
        self._reader = dataset.reader if isinstance(dataset, ImageDataset) else None

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, index: int, mode: str) -> tuple[Image.Image, int]:
        """Read one sample; see `ImageSource.read`."""
        try:
            if self._reader is None:
                image, label = self._dataset[index]
                return image.convert(mode), int(label)
            stream, label, *_ = self._reader[index]
            with stream:
                return decode_image(stream.read(), mode), int(label)
        except (OSError, ValueError, SyntaxError) as error:
            raise UnreadableSampleError(Fault(*self._place(index), str(error))) from error

    def _place(self, index: int) -> tuple[str, str]:
        if self._reader is not None and hasattr(self._reader, "samples"):
            return str(self._reader.filename(index, absolute=True)), ""
        return self._name, str(index)


def _split_folder(root: str | None, split: str) -> str:
    """timm reads all of `root` when the split has no folder; here that is an error."""
    if root is None or not os.path.isdir(root):
        raise ValueError(f"root={root!r} is no folder")
    if not split:
        return root
    names = next((synonyms for synonyms in _SYNONYMS if split in synonyms), (split,))
    for name in (split, *names):
        if os.path.isdir(os.path.join(root, name)):
            return os.path.join(root, name)
    raise ValueError(f"{root} has no folder for the split {split!r}; it has: {', '.join(_folders(root)) or 'none'}")


def _check_classes(folder: str, split: str) -> None:
    """Labels are ranks among a split's own class folders, so a class absent from one split would shift them."""
    if split in ("", *_SYNONYMS[0]):
        return
    root = os.path.dirname(folder)
    train = next((os.path.join(root, name) for name in _SYNONYMS[0] if os.path.isdir(os.path.join(root, name))), None)
    if train is None:
        return
    missing = sorted({*_folders(train)} ^ {*_folders(folder)})
    if missing:
        raise ValueError(
            f"{folder} and {train} have different class folders, so labels would not agree: {', '.join(missing[:5])} "
            f"{'and more ' if len(missing) > 5 else ''}only in one of them; give options={{'class_map': ...}}"
        )


def _folders(path: str) -> list[str]:
    return sorted(entry.name for entry in os.scandir(path) if entry.is_dir())
