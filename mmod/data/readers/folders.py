"""Folders of images: the one walk over them, classes that are folders, and photographs with label maps."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping
from itertools import chain
from pathlib import Path

import numpy as np
from PIL import Image

from mmod.data.labels import Classes, ModelClasses, beside_near, match_classes, name_key, rank_names, some_names
from mmod.data.readers.images import (
    IMAGE_EXTENSIONS,
    decode_image,
    open_image,
    patch_classes,
    read_image,
)
from mmod.io.files import near_paths

NO_CLASS = (".", "__", "@")
"""Beginnings of names of folders that tools leave: `.ipynb_checkpoints`, `__MACOSX`, `@eaDir`."""
_SYNONYMS = (("train", "training"), ("val", "valid", "validation", "eval", "evaluation"))
_SPLITS = {*chain.from_iterable(_SYNONYMS), "test"}

PathsByFolder = dict[str, list[str]]
"""Paths of images by the folder below the walked one that holds them, at any depth; "" for those in none."""


def walk_images(folder: str, named: Collection[str] = ()) -> tuple[PathsByFolder, list[str]]:
    """Return the images in and below a folder, and what is left out and why.

    Folders whose names begin with one of `NO_CLASS` are left out, as are hidden files and those whose ending is of none
    of the formats in `mmod.data.readers.images.EXTENSIONS`.

    Args:
        named: Names of classes, whose folders are read whatever they begin with.
    """
    images: PathsByFolder = {}
    tools = Counter[str]()
    loops = Counter[str]()
    hidden = Counter[str]()
    others = Counter[str]()

    for parent, folders, files in os.walk(folder, followlinks=True, onerror=_refuse):
        below = os.path.relpath(parent, folder)
        label = "" if below == os.curdir else below.split(os.sep)[0]
        entered = []
        for name in folders:
            if name.startswith(NO_CLASS) and (label or name not in named):
                tools[name] += 1
            elif _is_loop(parent, name):
                loops[name] += 1
            else:
                entered.append(name)

        # In place: `os.walk` goes on with these.
        folders[:] = entered
        paths = images.setdefault(label, [])
        for name in files:
            ending = os.path.splitext(name)[1].lower()
            if name.startswith("."):
                hidden[name] += 1
            elif ending[1:] in IMAGE_EXTENSIONS:
                paths.append(os.path.join(parent, name))
            else:
                others[ending or "none"] += 1

    # Only the walked folder itself has this entry without images.
    if not images[""]:
        del images[""]
    begin = " or ".join(NO_CLASS)
    reasons = {
        f"folders whose names begin with {begin} (data.classes may name one, which makes it a class)": tools,
        "links to a folder that holds them": loops,
        "hidden files": hidden,
        "files by their ending": others,
    }
    return images, [f"{reason}: {_counted(counts)}" for reason, counts in reasons.items() if counts]


def _refuse(error: OSError) -> None:
    """Raise where `os.walk` would leave out a folder that cannot be listed."""
    raise error


def _is_loop(parent: str, name: str) -> bool:
    path = os.path.join(parent, name)
    if not os.path.islink(path):
        return False
    # A link to one of its own parents, in which the walk would never end.
    return Path(os.path.realpath(parent)).is_relative_to(os.path.realpath(path))


def _counted(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts, key=lambda name: (-counts[name], name))
    return some_names([f"{name} ({counts[name]})" for name in ordered])


def _note(folder: str | Path, reasons: list[str]) -> str:
    """Return a sentence, without a full stop, of what is left out of a folder; empty for nothing."""
    if not reasons:
        return ""
    return f"{folder}: left out are {'; '.join(reasons)}"


class FolderSource:
    """The images of class folders: `ROOT/SPLIT/CLASS/`, at any depth below CLASS; see `walk_images`.

    Attributes:
        classes: The classes with the numbers of the training folder or of a model; None for images that are in no class
            folder.
        names: The class folders with images.
        left_out: What is left out and why, and a folder of another name than the split's; empty for nothing.

    Args:
        split: A folder of class folders in `root`, by its name or a common synonym; "" for `root` itself.
        model: The classes of the model that reads the images, if they are known by name.
        labelled: Refuse images that are in no class folder.
    """

    def __init__(
        self,
        root: str | None,
        split: str,
        train_split: str = "train",
        model: ModelClasses | None = None,
        labelled: bool = True,
    ) -> None:
        folder = split_folder(root, split)
        images, reasons = _open_classes(folder, model)
        self.left_out = _note(folder, reasons)
        # The usual names stand for their synonyms; who names another one means that folder.
        if split not in ("", "train", "val") and Path(folder) != Path(str(root), split):
            told = f"the split {split!r} of {root} is read from {folder}"
            self.left_out = "; ".join(filter(None, [told, self.left_out]))
        self.names = [*rank_names(name for name in images if name)]
        if not split and self.names and _SPLITS.issuperset(self.names):
            raise ValueError(
                f"{folder} holds splits, {', '.join(self.names)}, and no class folders: name one of them, such as "
                f"{os.path.join(folder, self.names[0])}"
            )
        if labelled and "" in images:
            first = os.path.basename(min(images[""]))
            raise ValueError(
                f"{folder} has images outside class folders, such as {first}, so they have no class: put each into the "
                "folder of its class, or remove it"
            )
        self.classes = None
        numbers: Mapping[str, int] = {}
        if "" not in images:
            own = _own_classes(str(root), folder, train_split, images, model)
            self.classes = match_classes(own, images, model, folder)
            numbers = self.classes.numbers
        labels: dict[str, int] = {}
        for name, paths in images.items():
            labels |= dict.fromkeys(paths, numbers.get(name, -1))
        # In timm's order, which runs have kept.
        self._paths = sorted(labels, key=name_key)
        self._labels = np.array([labels[path] for path in self._paths])

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, index: int, mode: str) -> tuple[Image.Image, int]:
        """Read one sample; see `ImageSource.read`."""
        return decode_image(read_image(self._paths[index]), mode), int(self._labels[index])

    def place(self, index: int) -> tuple[str, str]:
        """Return where a sample is; see `ImageSource.place`."""
        return self._paths[index], ""

    def labels(self) -> list[int]:
        """Return the class of each sample, -1 for none, without decoding images."""
        return self._labels.tolist()


def _open_classes(folder: str, model: ModelClasses | None) -> tuple[PathsByFolder, list[str]]:
    """Return the images of the class folders that have some, and what is left out."""
    known = {} if model is None else model.numbers
    images, reasons = walk_images(folder, known)
    filled = {name: paths for name, paths in images.items() if paths}
    if not filled:
        left_out = ""
        if reasons:
            left_out = f"; left out are {'; '.join(reasons)}"
        raise ValueError(
            f"{folder} holds no image that is read; endings of images are {', '.join(IMAGE_EXTENSIONS)}{left_out}"
        )
    names_of_empty = rank_names(images.keys() - filled.keys())
    empty = [os.path.join(folder, name) for name in names_of_empty]
    if empty and "" not in filled and not filled.keys() <= known.keys():
        # Their classes would have no number, which changes those of others.
        more = " and others" if len(empty) > 3 else ""
        raise ValueError(
            f"class folders without readable images: {', '.join(empty[:3])}{more}. Remove them, or list the classes in "
            "a file, data.classes"
        )
    return filled, reasons


def _own_classes(
    root: str, folder: str, train_split: str, images: PathsByFolder, model: ModelClasses | None
) -> Classes:
    """Return the classes of class folders, those of the training folder or their own.

    A number is a rank, so that a class which the training folder lacks would shift the others.
    """
    origin = f"the folders {some_names([*rank_names(images)], 20)} of {folder}"
    train = _find_folder(root, train_split)
    is_known = model is not None and images.keys() <= model.numbers.keys()
    if is_known or train in (None, folder):
        # The folder is the training set, or all its names are the model's: nothing has to be compared.
        return Classes(rank_names(images), len(images), origin=origin)
    names = _open_classes(str(train), None)[0].keys()
    differing = [*rank_names(images.keys() - names)]
    if differing:
        told = beside_near(differing, names - images.keys())
        raise ValueError(
            f"{folder} has class folders that {train} lacks, so labels would not agree: {told}. Rename them, or list "
            "the classes of both in a file, data.classes"
        )
    return Classes(rank_names(names), len(images), is_plain=names == images.keys(), origin=origin)


def split_folder(root: str | None, split: str) -> str:
    """Return the split's folder; an error where it is missing."""
    if root is None:
        raise ValueError("data.root=None is no folder: name one")
    if not os.path.isdir(root):
        raise ValueError(f"data.root={root!r} is no folder{near_paths(root)}")
    folder = _find_folder(root, split)
    if folder is None:
        told = [f"{root} has no folder for the split {split!r}"]
        # Where a split is named as the root.
        parent = str(Path(root).parent)
        if _find_folder(parent, split) is not None:
            told.append(f"its parent {parent!r} has one: name that as the root")
        present = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        told.append(f"it has: {', '.join(present) or 'none'}")
        raise ValueError("; ".join(told))
    return folder


def _find_folder(root: str, split: str) -> str | None:
    """Return the folder of a split, by its name or a common synonym; `root` for an empty name."""
    if not split:
        return root
    # "valid" and "val" are one split, since authors name it as they like.
    names = next((synonyms for synonyms in _SYNONYMS if split in synonyms), ())
    folders = [os.path.join(root, name) for name in (split, *names)]
    return next((folder for folder in folders if os.path.isdir(folder)), None)


def map_folders(root: str | Path, split: str) -> tuple[Path, Path]:
    """Return the folders of images and label maps of a split; a ValueError if one is missing."""
    folders = Path(root) / "images" / split, Path(root) / "labels" / split
    for folder in folders:
        if not folder.is_dir():
            near = "" if Path(root).is_dir() else near_paths(root)
            raise ValueError(
                f"label maps need the folder {folder}, which does not exist: name its root by data.root{near}"
            )
    return folders


class MapSource:
    """The images of `ROOT/images/SPLIT`, each with a map of the same name and size in `ROOT/labels/SPLIT`.

    Folders below are read too, see `walk_images`; `left_out` says what is left out.

    Both are cropped to the central square and scaled to `side`. A map is a PNG file whose values or palette indices are
    classes, 255 stands for none; a patch of `patch` pixels gets its most frequent one.
    """

    def __init__(self, root: str | Path, split: str, side: int, patch: int) -> None:
        self.side = side
        self.patch = patch
        images, labels = map_folders(root, split)
        found, reasons = walk_images(str(images))
        self.left_out = _note(images, reasons)
        paths = [Path(path) for path in sorted(chain.from_iterable(found.values()))]
        if not paths:
            raise ValueError(f"{images} holds no image; {self.left_out}".removesuffix("; "))
        # Label maps are PNG whatever the image is: other formats would blur the numbers.
        self._paths = [(path, labels / path.relative_to(images).with_suffix(".png")) for path in paths]
        missing = [str(path.relative_to(labels)) for _, path in self._paths if not path.is_file()]
        if missing:
            raise ValueError(f"{labels} lacks {len(missing)} of {len(paths)} label maps, the first {missing[0]}")

    def __len__(self) -> int:
        return len(self._paths)

    def labels(self) -> list[int]:
        """Return -1 for each sample, which has many classes."""
        return [-1] * len(self)

    def read(self, index: int, mode: str) -> tuple[Image.Image, list[int]]:
        """Read one sample; see `ImageSource.read`."""
        path, map_path = self._paths[index]
        image = decode_image(read_image(str(path)), mode)
        labels = open_image(read_image(str(map_path)))
        if labels.size != image.size or labels.mode not in ("L", "P"):
            raise ValueError(
                f"the label map {map_path.name} has {labels.width}x{labels.height} pixels and mode {labels.mode}; "
                f"it must have {image.width}x{image.height} pixels, as its image, and mode L or P"
            )
        # Numbers of classes are not interpolated: between two of them lies a third that is not there.
        classes = patch_classes(np.asarray(self._square(labels, Image.Resampling.NEAREST)), self.patch)
        return self._square(image, Image.Resampling.BICUBIC), classes

    def place(self, index: int) -> tuple[str, str]:
        """Return where a sample is; see `ImageSource.place`."""
        path, _ = self._paths[index]
        return str(path.parent), path.name

    def _square(self, image: Image.Image, resampling: Image.Resampling) -> Image.Image:
        short = min(image.size)
        # The middle square of image and map alike.
        left, top = (image.width - short) // 2, (image.height - short) // 2
        return image.resize((self.side, self.side), resampling, (left, top, left + short, top + short))
