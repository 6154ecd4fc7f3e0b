"""What stands for the files that an evaluation reads: others are other data."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain

from mmod.data.config import DataConfig, PairsConfig, TextConfig
from mmod.data.readers.conversations import ConversationsConfig
from mmod.data.readers.folders import map_folders, split_folder, walk_images
from mmod.data.readers.shards import expand_pattern
from mmod.io.remote import is_remote


def data_files(data: object) -> str | None:
    """Return what stands for the files that a config of data evaluates on: their number, and a checksum.

    The checksum is of names and sizes, which a copy of the data has too. None for sets that are drawn, streamed or
    remote, and for files that are not there. Of conversations the images are not looked up, nor the training data of
    any set.

    Example:
        >>> data_files(DataConfig("digits:tiny")) is None
        True
    """
    paths: tuple[str, ...] = ()
    # What is missing is told by what opens it.
    with suppress(ValueError):
        paths = tuple(_paths_of(data))
    if not paths:
        return None
    return _looked_up(paths)


def _paths_of(data: object) -> Iterator[str]:
    """Yield the files, and folders of files, that an evaluation reads."""
    if isinstance(data, DataConfig):
        reader, _, argument = data.source.partition(":")
        if reader == "folder":
            yield split_folder(data.root, data.val_split)
        elif reader == "maps":
            yield from map(str, map_folders(str(data.root), data.val_split))
        elif reader == "shards":
            yield from _shards(argument.replace("{split}", data.val_split))
    elif isinstance(data, PairsConfig):
        patterns = [data.val] if isinstance(data.val, str) else data.val
        for pattern in patterns:
            yield from _shards(pattern)
    elif isinstance(data, TextConfig) and data.source != "python":
        yield from sorted(glob.glob(data.source, recursive=True))
    elif isinstance(data, ConversationsConfig) and data.val is not None:
        yield from _shards(data.val)


def _shards(pattern: str) -> Iterator[str]:
    # Names of embedded sets and of streams of the hub name no file.
    if not pattern.startswith(("hf-datasets:", "scenes:", "questions:")):
        yield from (path for path in expand_pattern(pattern) if not is_remote(path))


def _looked_up(paths: Sequence[str]) -> str:
    names = hashlib.sha256()
    number = 0
    for path in paths:
        for file in _files_below(path):
            name = os.path.basename(file)
            if file != path:
                # Relative to a folder, which may be moved.
                name = os.path.relpath(file, path)
            with suppress(OSError):
                line = f"{name} {os.path.getsize(file)}\n"
                names.update(line.encode(errors="surrogateescape"))
                number += 1
    noun = "file" if number == 1 else "files"
    return f"{number:,} {noun}, {names.hexdigest()[:8]}"


def _files_below(path: str) -> list[str]:
    """Return a file, or the images of a folder that a reader reads."""
    if os.path.isfile(path):
        return [path]
    images, _ = walk_images(path)
    return sorted(chain.from_iterable(images.values()))
