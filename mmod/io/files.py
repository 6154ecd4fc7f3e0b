"""Files: checked before they are read, and written so that they are either whole or not there."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any


def check_regular(path: str | Path) -> None:
    """Refuse what is no regular file: a pipe would be waited for, and a device such as `/dev/zero` never ends.

    Args:
        path: The file; links are followed.

    Raises:
        OSError: If nothing is there.
        ValueError: If something else is.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{path} is no regular file")


def parse_json(data: bytes, name: str) -> Any:
    """Parse JSON in any encoding of Unicode.

    Args:
        data: The text.
        name: What it is called in the message.

    Raises:
        ValueError: If it is no JSON, or nested too deeply.

    Example:
        >>> parse_json(b"[1,", "line 3")
        Traceback (most recent call last):
        ValueError: line 3 is no JSON: Expecting value: line 1 column 4 (char 3)
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no JSON: {error}") from error


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
