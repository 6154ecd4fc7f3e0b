"""Locks on folders: one process at a time builds a data set or trains into a run folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

__all__ = ["LockedError", "locked"]


class LockedError(RuntimeError):
    """Another process holds the lock of a folder."""


@contextmanager
def locked(folder: str | Path, *, wait: bool) -> Iterator[None]:
    """Hold the lock of a folder, a file beside it that the system frees when this process ends, however it ends.

    Args:
        folder: The folder; it need not be there, and the one it lies in is made.
        wait: Wait for another process that holds the lock.

    Raises:
        LockedError: If another process holds the lock and `wait` is not set.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp() + "/run"
        >>> with locked(folder, wait=False):
        ...     try:
        ...         with locked(folder, wait=False):
        ...             pass
        ...     except LockedError as error:
        ...         print(str(error).partition(" '")[0])
        another process is writing to
    """
    path = Path(folder).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.parent / f".{path.name}.lock", blocking=wait)
    try:
        lock.acquire()
    except Timeout as error:
        raise LockedError(f"another process is writing to {str(folder)!r}: wait for it to end") from error
    try:
        yield
    finally:
        lock.release()
