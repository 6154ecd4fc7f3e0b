"""Locks on folders, so that one process at a time builds a data set or writes a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


class LockedError(RuntimeError):
    """Another process holds the lock of a folder."""


@contextmanager
def locked(folder: str | Path, *, wait: bool) -> Iterator[None]:
    """Hold the lock of a folder: a file beside it, which the system releases when the process ends or crashes."""
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
