"""What stands for the files that an evaluation reads: data that changed in place are other data."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

from mmod.data.config import DataConfig, PairsConfig, TextConfig
from mmod.data.readers.conversations import ConversationsConfig
from mmod.data.readers.folders import map_folders, split_folder
from mmod.data.readers.shards import expand_pattern
from mmod.io.remote import is_remote


class DataFiles(NamedTuple):
    """The files of an evaluation split.

    Attributes:
        names: Their number, and a checksum of names and sizes.
        times: A checksum of the times at which they were changed.
    """

    names: str
    times: str


def data_files(data: object) -> DataFiles | None:
    """Return what stands for the files that a config of data evaluates on.

    None for sets that are drawn, streamed or remote, and for files that are not there. Of conversations the images are
    not looked up, nor the training data of any set. A folder is read once, until `forget_files`.

    Example:
        >>> data_files(DataConfig("digits:tiny")) is None
        True
    """
    paths: tuple[str, ...] = ()
    # What is missing is told by what opens it.
    with suppress(ValueError):
        paths = tuple(_paths_of(data))
    return _looked_up(paths) if paths else None


def forget_files() -> None:
    """Look files up anew, as at the start of a study: they may have changed since another one of this process."""
    _looked_up.cache_clear()


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
        for pattern in [data.val] if isinstance(data.val, str) else data.val:
            yield from _shards(pattern)
    elif isinstance(data, TextConfig) and data.source != "python":
        yield from sorted(glob.glob(data.source, recursive=True))
    elif isinstance(data, ConversationsConfig) and data.val is not None:
        yield from _shards(data.val)


def _shards(pattern: str) -> Iterator[str]:
    # Names of embedded sets and of streams of the hub name no file.
    if not pattern.startswith(("hf-datasets:", "scenes:", "questions:")):
        yield from (path for path in expand_pattern(pattern) if not is_remote(path))


@lru_cache
def _looked_up(paths: tuple[str, ...]) -> DataFiles:
    names = hashlib.sha256()
    times = hashlib.sha256()
    number = 0
    for path in paths:
        for file in _files_below(path):
            with suppress(OSError):
                stat = os.stat(file)
                # Relative to a folder, which may be moved.
                name = os.path.relpath(file, path) if file != path else os.path.basename(file)
                names.update(f"{name} {stat.st_size}\n".encode(errors="surrogateescape"))
                times.update(f"{stat.st_mtime_ns}\n".encode())
                number += 1
    return DataFiles(f"{number:,} files, {names.hexdigest()[:8]}", times.hexdigest()[:16])


def _files_below(path: str) -> Iterator[str]:
    """Yield a file, or those of a folder in order of their names."""
    if os.path.isfile(path):
        yield path
        return
    entered = set()
    for parent, folders, files in os.walk(path, followlinks=True):
        real = os.path.realpath(parent)
        # Links may lead in circles.
        if real in entered:
            folders.clear()
            continue
        entered.add(real)
        folders.sort()
        yield from (os.path.join(parent, name) for name in sorted(files))
