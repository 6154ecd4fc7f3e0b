"""The files that a config of data names: whether they are there, and what stands for them."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import os
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Literal

from mmod.data.config import DataConfig, PairsConfig, TextConfig
from mmod.data.readers.conversations import ConversationsConfig, file_of_image, open_conversations
from mmod.data.readers.folders import map_folders, split_folder, walk_images
from mmod.data.readers.hf_datasets import PREFIX
from mmod.data.readers.shards import expand_pattern
from mmod.io.files import near_paths
from mmod.io.remote import is_remote
from mmod.names import plural

Use = Literal["train", "val"]
"""What samples are read for: training or evaluation."""
# Folders of the standard library with data, tests or third-party packages.
_NOT_READ = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "site-packages", "dist-packages"}


def check_files(data: object) -> None:
    """Raise if files of a data set are missing, before anything is read; sets that are built have none.

    Example:
        >>> check_files(DataConfig("folder", root="nowhere"))
        Traceback (most recent call last):
        ValueError: data.root='nowhere' is no folder
    """
    files_of(data, "train")
    files_of(data, "val")


def data_files(data: object, use: Use = "val", folders: Sequence[str] = ()) -> str | None:
    """Return what stands for the files of a config of data: their number, and a checksum.

    The checksum is of names and sizes, which a copy of the data has too. Of folders of training images it is of names
    alone, as to look up a million sizes takes minutes on some disks. None for sets that are drawn, streamed or remote,
    and for files that are not there. The images of conversations are looked up for evaluation alone.

    Args:
        folders: Other folders of images that are read beside the data.

    Example:
        >>> data_files(DataConfig("digits:tiny")) is None
        True
    """
    paths: list[str] = []
    # What is missing is told by what opens it.
    with suppress(ValueError, FileNotFoundError):
        paths = files_of(data, use)
        if use == "val" and isinstance(data, ConversationsConfig):
            paths += _images_of(paths, data)
    paths += [folder for folder in folders if Path(folder).is_dir()]
    if not paths:
        return None
    return _looked_up(paths, with_sizes=use == "val")


def files_of(data: object, use: Use) -> list[str]:
    """Return the files, and folders of files, that a config of data names here; none of what is drawn or streamed.

    Raises:
        ValueError: A folder is missing, or a pattern matches no file.
        FileNotFoundError: A file of conversations, or the folder of their images, is missing.
    """
    if isinstance(data, DataConfig):
        reader, _, argument = data.source.partition(":")
        split = data.train_split if use == "train" else data.val_split
        if reader == "folder":
            return [split_folder(data.root, split)]
        if reader == "maps":
            return [str(folder) for folder in map_folders(str(data.root), split)]
        if reader == "shards":
            return _shards(argument.replace("{split}", split))
    elif isinstance(data, PairsConfig):
        pattern = data.train if use == "train" else data.val
        # Streams of the hub and drawn scenes are no files.
        if not (isinstance(pattern, str) and pattern.startswith((PREFIX, "scenes:"))):
            return _shards(pattern)
    elif isinstance(data, TextConfig):
        # The standard library is there, and to list its files takes longer than a small run's step.
        if data.source != "python" and not data.source.startswith(PREFIX):
            return [str(path) for path in text_files(data.source)]
    elif isinstance(data, ConversationsConfig):
        source = data.train if use == "train" else data.val
        if source is None or source.startswith("questions:"):
            return []
        if source.endswith(".tar"):
            return _shards(source)
        if not Path(source).is_file():
            raise FileNotFoundError(f"no file of conversations at {source!r}{near_paths(source)}")
        if data.images is not None and not Path(data.images).is_dir():
            raise FileNotFoundError(
                f"data.images={data.images!r} is no folder: name the one from which the conversations name their images"
                f"{near_paths(data.images, Path.is_dir)}"
            )
        return [source]
    return []


def _images_of(paths: Sequence[str], data: ConversationsConfig) -> list[str]:
    """Return the images that files of conversations name; shards hold theirs."""
    images: set[str] = set()
    for path in paths:
        if path.endswith((".json", ".jsonl")):
            # Records without an image that is there are left out, whatever a run does with them.
            chats = open_conversations(path, dataclasses.replace(data, on_corrupt="skip", max_corrupt=None))
            images.update(*(map(file_of_image, chats.record(index)["images"]) for index in range(len(chats))))
    return sorted(images)


def _shards(pattern: str | Sequence[str]) -> list[str]:
    """Return the local shards of a pattern."""
    return [path for path in expand_pattern(pattern) if not is_remote(path)]


def text_files(source: str) -> list[Path]:
    """Return the files of a pattern, or of the standard library for "python"; a ValueError without any."""
    if source == "python":
        root = Path(sysconfig.get_path("stdlib"))
        paths = list(root.glob("LICENSE*"))
        for folder, folders, names in os.walk(root):
            folders[:] = set(folders) - _NOT_READ
            paths += [Path(folder, name) for name in names if name.endswith(".py")]
        return sorted(paths)
    paths = [path for path in map(Path, sorted(glob.glob(source, recursive=True))) if path.is_file()]
    if not paths:
        raise ValueError(f"data.source={source!r} matches no file{near_paths(source)}")
    return paths


def _looked_up(paths: Sequence[str], *, with_sizes: bool) -> str:
    """Return the number and the checksum of files, and of those in folders, of which sizes may be left out."""
    names = hashlib.sha256()
    number = 0
    for path in paths:
        for file in _files_below(path):
            name = os.path.basename(file)
            size = ""
            if file != path:
                # Relative to a folder, which may be moved.
                name = os.path.relpath(file, path)
            with suppress(OSError):
                if with_sizes or file == path:
                    size = f" {os.path.getsize(file)}"
                names.update(f"{name}{size}\n".encode(errors="surrogateescape"))
                number += 1
    return f"{number:,} {plural('file', number)}, {names.hexdigest()[:8]}"


def _files_below(path: str) -> list[str]:
    """Return a file, or the images of a folder that a reader reads."""
    if os.path.isfile(path):
        return [path]
    images, _ = walk_images(path)
    return sorted(chain.from_iterable(images.values()))
