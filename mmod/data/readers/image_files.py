"""Image files that a data set names by path: regular ones, and none outside the folder they are said to lie in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mmod.data.corrupt import UnusableError
from mmod.data.readers.images import MAX_BYTES
from mmod.io.files import check_regular


class ImageFiles:
    """The image files of a folder, by the paths that a data set gives for them.

    Folders are listed once, so that many files are found in the time of few requests to the disk.

    Args:
        folder: The folder.
        follow_links: Also take files outside of the folder to which symbolic links in it lead.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> _ = Path(folder, "a.png").write_bytes(b"...")
        >>> ImageFiles(folder).locate("a.png") == f"{folder}/a.png"
        True
    """

    def __init__(self, folder: str | Path, follow_links: bool = False) -> None:
        self.folder = str(folder)
        self._resolve = os.path.abspath if follow_links else os.path.realpath
        self._root = self._resolve(self.folder)
        self._listed: dict[str, frozenset[str]] = {}

    def locate(self, name: str) -> str:
        """Return the path of an image that is a regular file in the folder.

        Args:
            name: Path relative to the folder, or an absolute one.

        Raises:
            UnusableError: If there is no such file.
        """
        path = os.path.join(self.folder, name)
        parent, base = os.path.split(path)
        if parent not in self._listed:
            self._listed[parent] = self._list(parent)
        if base not in self._listed[parent]:
            # A link, or something that is no sound file.
            with _faults_of(path):
                if not self._is_inside(path):
                    raise UnusableError("image outside the folder", f"{path} is not in {self.folder}")
                check_regular(path)
        return path

    def read(self, name: str) -> bytes:
        """Read the bytes of an image.

        Raises:
            UnusableError: If there is no such file, or it cannot be read.
        """
        return read_image(self.locate(name))

    def _list(self, folder: str) -> frozenset[str]:
        """Return the names of a folder's own files, which need no second look."""
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
    """Read the bytes of an image from a regular file.

    Args:
        path: The file; links are followed.

    Raises:
        UnusableError: If there is no such file, it is longer than `MAX_BYTES`, or it cannot be read.
    """
    with _faults_of(path):
        check_regular(path)
        if os.path.getsize(path) > MAX_BYTES:
            raise UnusableError("image file too long", f"{path} has more than {MAX_BYTES} bytes")
        with open(path, "rb") as file:
            return file.read(MAX_BYTES)


@contextmanager
def _faults_of(path: str) -> Iterator[None]:
    """Turn what goes wrong with a file into one of a few reasons."""
    try:
        yield
    except UnusableError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UnusableError("image not found", path) from error
    except (OSError, ValueError) as error:
        # The latter for names that no file can have, which errors leave out, and for what is no regular file.
        details = str(error) if path in str(error) else f"{path!a}: {error}"
        raise UnusableError("image cannot be read", details) from error
