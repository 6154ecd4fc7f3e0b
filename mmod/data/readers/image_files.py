"""Image files named by a data set: regular files inside one folder only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mmod.data.corrupt import UnusableError
from mmod.data.readers.images import MAX_BYTES
from mmod.io.files import check_regular


class ImageFiles:
    """Image files of a folder, by the paths of a data set.

    Args:
        folder: The folder; it is listed once, which is much faster than one disk request per file.
        follow_links: Also accept files outside the folder that symbolic links in it point to.
    """

    def __init__(self, folder: str | Path, follow_links: bool = False) -> None:
        self.folder = str(folder)
        self._resolve = os.path.abspath if follow_links else os.path.realpath
        self._root = self._resolve(self.folder)
        self._listed: dict[str, frozenset[str]] = {}

    def locate(self, name: str) -> str:
        """Return the path of an image in the folder; an `UnusableError` unless it is a regular file there."""
        path = os.path.join(self.folder, name)
        parent, base = os.path.split(path)
        if parent not in self._listed:
            self._listed[parent] = self._list(parent)
        if base not in self._listed[parent]:
            # A symbolic link, or no regular file.
            with _faults_of(path):
                if not self._is_inside(path):
                    raise UnusableError("image outside the folder", f"{path} is not in {self.folder}")
                check_regular(path)
        return path

    def read(self, name: str) -> bytes:
        """Read the bytes of an image; an `UnusableError` if that is impossible."""
        return read_image(self.locate(name))

    def _list(self, folder: str) -> frozenset[str]:
        """Return the names of the regular files of a folder inside the root; links are left out."""
        try:
            if not self._is_inside(folder):
                return frozenset()
            with os.scandir(folder) as entries:
                return frozenset(entry.name for entry in entries if entry.is_file(follow_symlinks=False))
        except (OSError, ValueError):
            return frozenset()

    def _is_inside(self, path: str) -> bool:
        return os.path.commonpath([self._root, self._resolve(path)]) == self._root


def read_image(path: str) -> bytes:
    """Read an image of at most `MAX_BYTES` from a regular file; an `UnusableError` if that is impossible."""
    with _faults_of(path):
        check_regular(path)
        if os.path.getsize(path) > MAX_BYTES:
            raise UnusableError("image file too long", f"{path} has more than {MAX_BYTES} bytes")
        with open(path, "rb") as file:
            return file.read(MAX_BYTES)


@contextmanager
def _faults_of(path: str) -> Iterator[None]:
    """Turn errors of a file into `UnusableError`s with one of a few reasons."""
    try:
        yield
    except UnusableError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UnusableError("image not found", path) from error
    except (OSError, ValueError) as error:
        # ValueError: a name that no file can have (such messages lack the path), or no regular file.
        details = str(error) if path in str(error) else f"{path!a}: {error}"
        raise UnusableError("image cannot be read", details) from error
