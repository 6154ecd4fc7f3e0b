"""What lies in a folder, and a disk that takes no more than so many bytes of a file."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_disk(size: int) -> Iterator[None]:
    """Let every write beyond a file's first bytes fail, as on a full disk.

    Args:
        size: Bytes that a file may have.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def visible(folder: Path) -> set[str]:
    """Return the names in a folder, without hidden ones such as locks."""
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder and of those in it, by their paths in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
