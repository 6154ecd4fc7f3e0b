"""Files: checked before they are read, and written so that they are either whole or not there."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DamagedFileError(ValueError):
    """A file that is not whole, or holds something else than it should."""


class DuplicateKeyError(ValueError):
    """A JSON object that names a key twice, of which other readers take the last."""


class UnwrittenError(OSError):
    """A file or folder that the disk could not take."""


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


def parse_json(data: str | bytes, name: str, *, unique_keys: bool = True) -> Any:
    """Parse JSON in any encoding of Unicode, each key once.

    Args:
        data: The text.
        name: What it is called in the message.
        unique_keys: Refuse a key that an object names twice, instead of taking its last value.

    Raises:
        DuplicateKeyError: If an object names a key twice.
        ValueError: If it is no JSON, or nested too deeply.

    Example:
        >>> parse_json(b"[1,", "line 3")
        Traceback (most recent call last):
        ValueError: line 3 is no JSON: Expecting value: line 1 column 4 (char 3)
    """
    try:
        return json.loads(data, object_pairs_hook=_object if unique_keys else None)
    except DuplicateKeyError as error:
        raise DuplicateKeyError(f"{name}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no JSON: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise DuplicateKeyError(f"the key {twice!r} is given twice")
    return found


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Raises:
        ValueError: If it holds something else.
    """
    content = parse_json(path.read_bytes(), str(path))
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    return content


@contextmanager
def writing(target: str | Path, kept: str | Path | None = None) -> Iterator[None]:
    """Name a file or folder that the disk could not take, and what is kept.

    Libraries report a full disk by errors of their own, most of which do not say which file it was.

    Args:
        target: What the block writes.
        kept: An earlier version of it; by default `target` where it is there.

    Raises:
        UnwrittenError: If the disk was full, or a file too long for it.
    """
    try:
        yield
    except Exception as error:
        reason = _disk_fault(error)
        if reason is None:
            raise
        target = Path(target)
        folder = next(parent for parent in target.absolute().parents if parent.is_dir())
        kept = target if kept is None and target.exists() else kept
        remains = "nothing was written" if kept is None else f"{str(kept)!r} is kept as it was"
        raise UnwrittenError(
            f"{str(target)!r} could not be written: {reason}; {shutil.disk_usage(folder).free / 1e6:.0f} MB are free "
            f"on its disk, {remains}; make room and start again"
        ) from error


@contextmanager
def replacing(
    target: str | Path, *, shared: bool = False, durable: bool = True, kept: str | Path | None = None
) -> Iterator[Path]:
    """Write a file or folder under a temporary name; it takes its own name when the block ends.

    A reader finds the old content or the new, never a part. When the block fails, nothing is left; what a killed
    process left is removed by the next one that writes the same target.

    Args:
        target: The file, replaced if it is there, or the folder, which must not be there or be empty.
        shared: Whether several processes may write the target at once. Otherwise the caller holds a lock.
        durable: Push all content to disk first, so that this holds for a crash of the machine, too. It takes
            milliseconds a file.
        kept: See `writing`.

    Yields:
        A path beside `target` at which the block makes the file or folder.

    Raises:
        FileExistsError: If `target` is a folder with files in it.
        UnwrittenError: If the disk is full.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "images"
        >>> with replacing(target) as folder:
        ...     folder.mkdir()
        ...     _ = (folder / "0.txt").write_text("pixels")
        ...     target.exists()
        False
        >>> target.exists()
        True
    """
    target = Path(target)
    if target.is_dir() and any(target.iterdir()):
        raise FileExistsError(f"{str(target)!r} is not empty; choose another folder")
    partial = target.with_name(f".{target.name}.partial" + f"-{os.getpid()}" * shared)
    _remove(partial)
    try:
        with writing(target, kept):
            yield partial
            for path in (*partial.rglob("*"), partial) if durable else ():
                _sync(path)
            os.replace(partial, target)
    finally:
        _remove(partial)
    _sync(target.parent)


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write a file so that a reader finds the old content or the new, never a part.

    Args:
        path: The file, replaced if it is there.
        content: Bytes, or a text for UTF-8. What has no form in UTF-8 is written as an escape.
    """
    with replacing(path) as partial:
        partial.write_bytes(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)


@contextmanager
def open_shard(path: Path) -> Iterator[Any]:
    """Open a webdataset shard to be written, which takes its name when it is whole.

    Args:
        path: The shard, a TAR file. The same samples give the same bytes.

    Yields:
        webdataset's writer of samples whose members are bytes.
    """
    from webdataset import TarWriter

    with (
        replacing(path) as partial,
        closing(TarWriter(str(partial), mtime=0, user="", group="", encoder=False)) as writer,
    ):
        yield writer


def _disk_fault(error: BaseException | None) -> str | None:
    """Return why a disk could not take a file; None where an error says something else."""
    if error is None or isinstance(error, UnwrittenError):
        return None
    if isinstance(error, OSError) and error.errno in _FULL:
        return os.strerror(error.errno)
    # What safetensors and torch say of it: the one names the system's error, the other does not.
    number = re.search(r"\(os error (\d+)\)", str(error))
    if type(error).__name__ == "SafetensorError" and number is not None:
        return os.strerror(int(number[1]))
    if isinstance(error, RuntimeError) and re.search("PytorchStreamWriter|inline_container", str(error)):
        return "the disk took a part of it only"
    return _disk_fault(error.__cause__ or error.__context__)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Push a file or folder to disk, so that the rename after it cannot overtake its content."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
