"""Files that are either whole or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that a reader finds the old content or the new, never a part.

    Args:
        path: The file, in UTF-8. What has no form in it is written as an escape.
        text: Its content.
    """
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8", errors="backslashreplace")
    sync(partial)
    os.replace(partial, path)


def sync(path: Path) -> None:
    """Push a file or folder to disk, so that the rename after it cannot overtake its content.

    Args:
        path: The file or folder.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def open_shard(path: Path) -> Iterator[Any]:
    """Open a webdataset shard to be written, which takes its name when it is whole.

    Args:
        path: The shard, a TAR file. The same samples give the same bytes.

    Yields:
        webdataset's writer of samples whose members are bytes.
    """
    from webdataset import TarWriter

    partial = path.with_name(f".{path.name}.partial")
    with closing(TarWriter(str(partial), mtime=0, user="", group="", encoder=False)) as writer:
        yield writer
    os.replace(partial, path)
