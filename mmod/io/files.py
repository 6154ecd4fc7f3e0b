"""Files and folders: checks before reading, atomic writes, locks."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeGuard

from mmod.names import prefixed, say_near, similar
from mmod.plain import without_nan

if TYPE_CHECKING:
    from webdataset import TarWriter

BYTE_ORDER_MARK = "\ufeff"
"""The byte order mark, which Windows and Excel write before a text; it is no part of the text."""

SIZES = "sizes.json"
"""File beside shards with the number of samples of each, which open_clip's training program reads."""

SUMS = "sha256.json"
"""File with the checksums of a checkpoint or of a saved model, which is written last."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# A file in the place of a folder exists.
_REFUSED = (errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS)


class DamagedFileError(ValueError):
    """A file that is truncated or has the wrong content."""


class DuplicateKeyError(ValueError):
    """A JSON object with a duplicate key, of which other readers silently take the last value."""


class UnwrittenError(OSError):
    """A file or folder could not be written: the disk is full, or its folder is read-only or gone."""


def check_regular(path: str | Path) -> None:
    """Refuse all but regular files: reading a pipe blocks, and a device such as `/dev/zero` never ends."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{path} is no regular file")


def check_file(path: str | Path) -> None:
    """Refuse all but regular files, see `check_regular`; a FileNotFoundError names files here that are near."""
    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no file {str(path)!r}{near_paths(path)}")
    check_regular(path)


def text_bytes(data: bytes, name: str) -> bytes:
    """Return the bytes of a text without its byte order mark; a ValueError refuses UTF-16 and UTF-32 by name.

    Args:
        name: What holds the text, for messages.

    Example:
        >>> text_bytes("two cats".encode("utf-8-sig"), "a caption")
        b'two cats'
    """
    encoding = json.detect_encoding(data)
    if not encoding.startswith("utf-8"):
        raise ValueError(f"{name} is no text in UTF-8 but in {encoding[:6].upper()}: save it as UTF-8")
    return data.removeprefix(BYTE_ORDER_MARK.encode())


def decode_text(data: bytes, name: str) -> str:
    """Return a text that a user wrote, without a byte order mark.

    Args:
        data: The text in UTF-8.
        name: What holds it, for messages.

    Raises:
        ValueError: The bytes are no UTF-8; the message has the first byte that is not.

    Example:
        >>> decode_text("zwei Käfer".encode(), "a caption")
        'zwei Käfer'
    """
    plain = text_bytes(data, name)
    try:
        return plain.decode()
    except UnicodeDecodeError as error:
        # Counted with a byte order mark, which is cut off.
        place = error.start + len(data) - len(plain)
        raise ValueError(f"{name} is no text in UTF-8: {error.reason} at byte {place}; save it as UTF-8") from error


def read_text(path: str | Path) -> str:
    """Read a text that a user wrote, see `decode_text`; lines end in "\\n", whatever ended them in the file."""
    check_file(path)
    text = decode_text(Path(path).read_bytes(), repr(str(path)))
    # As Python's text mode reads lines; the bytes were decoded without it.
    return text.replace("\r\n", "\n").replace("\r", "\n")


def open_rows(path: str | Path, newline: str | None = None) -> TextIO:
    """Open a file that is read by lines, as `read_text` reads others.

    Bytes that are not UTF-8 become lone surrogates, which have no form in UTF-8: faults of their row, not of the file.

    Args:
        newline: As for `open`; the parser of tables needs "".
    """
    check_file(path)
    with open(path, "rb") as file:
        # Four bytes tell UTF-16 and UTF-32 apart, and a large file is not read twice.
        text_bytes(file.read(4), repr(str(path)))
    return open(path, encoding="utf-8-sig", errors="surrogateescape", newline=newline)


def parse_json(data: str | bytes, name: str, *, unique_keys: bool = True) -> Any:
    """Parse JSON, bytes as `decode_text` decodes them; of duplicate keys the last wins if they are allowed."""
    text = data if isinstance(data, str) else decode_text(data, name)
    hook = _object if unique_keys else None
    try:
        return json.loads(text, object_pairs_hook=hook)
    except DuplicateKeyError as error:
        raise DuplicateKeyError(f"{name}: {error}") from error
    except (ValueError, RecursionError) as error:
        if not text.strip():
            raise ValueError(f"{name} is no JSON: it is empty") from error
        end = ""
        if isinstance(error, json.JSONDecodeError) and _is_cut(error):
            end = ": it seems to be cut off at its end"
        raise ValueError(f"{name} is no JSON: {error}{end}") from error


def _is_cut(error: json.JSONDecodeError) -> bool:
    """Return whether the text of an error ends where more must follow."""
    rest = error.doc[error.pos :].strip()
    return not rest or error.msg.startswith("Unterminated string")


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    # `dict` drops duplicates, so a shorter mapping has some.
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise DuplicateKeyError(f"the key {twice!r} occurs twice")
    return values


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file with a JSON object; raise a ValueError for anything else."""
    content = parse_json(path.read_bytes(), str(path))
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    return content


def is_of_transformers(name: str | Path) -> bool:
    """Return whether a path is a folder that transformers saved a model in."""
    path = Path(name) / "config.json"
    return path.is_file() and "model_type" in read_json_object(path)


def near_paths(path: str | Path, fits: Callable[[Path], bool] = Path.exists) -> str:
    """Return as the end of an error message which paths here are near a missing one, or that it is of the other type.

    Args:
        fits: Whether a path may be named.
    """
    missing = Path(path)
    if missing.is_dir():
        return "; it is a folder"
    if missing.exists():
        return "; it is a file"
    # Where a folder on the way is missing too, its name is the mistake.
    while not missing.parent.exists():
        missing = missing.parent
    inside = Path(path).relative_to(missing)
    try:
        names = [other.name for other in missing.parent.iterdir() if fits(other) or fits(other / inside)]
    # The folder may not be read.
    except OSError:
        return ""
    near = []
    for name in similar(missing.name, names):
        other = missing.parent / name
        if (other / inside).exists():
            other /= inside
        near.append(other)
    return prefixed("; ", say_near(near))


def check_folder(path: str | Path, name: str) -> None:
    """Raise a FileNotFoundError unless a path is a folder that holds something.

    Args:
        name: The option or key that names it, for the message.
    """
    folder = Path(path)
    fault = ""
    if not folder.exists():
        fault = f"there is no folder {str(path)!r}{near_paths(path, Path.is_dir)}"
    elif not folder.is_dir():
        fault = f"{str(path)!r} is a file, and no folder"
    elif not any(folder.iterdir()):
        fault = f"the folder {str(path)!r} is empty"
    if fault:
        raise FileNotFoundError(f"{name}: {fault}")


def check_free(path: str | Path, overwrite: bool) -> None:
    """Raise a FileExistsError if a path exists that the caller may not overwrite."""
    if not overwrite and Path(path).exists():
        raise FileExistsError(f"{str(path)!r} exists; pass overwrite=True to replace it")


def folder_name(path: str) -> str:
    """Return the name of one folder for a path or a name on a hub.

    Example:
        >>> folder_name("../runs/mine/"), folder_name("open_clip:ViT-B-32:openai")
        ('runs-mine', 'open_clip-ViT-B-32-openai')
    """
    return "-".join(part for part in re.split(r"[/:\\]+", path) if part not in ("", ".", ".."))


def check_place(path: str | Path) -> None:
    """Raise a FileExistsError where a file stands in the place of a folder that is to be written, or of one above."""
    for place in (Path(path), *Path(path).parents):
        if place.exists() and not place.is_dir():
            raise FileExistsError(f"{str(place)!r} is a file, and a folder is needed there: name another folder")


def make_folder(path: str | Path) -> Path:
    """Make a folder that a user named, where it is missing, and its parents; return its path.

    Raises:
        FileExistsError: A file is in its place.
        UnwrittenError: It cannot be made, as below a read-only folder.
    """
    folder = Path(path)
    check_place(folder)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def sha256(path: Path) -> str:
    """Return the checksum of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def writing(target: str | Path, kept: str | Path | None = None) -> Iterator[None]:
    """Turn the errors of a full disk and of a folder that is read-only or gone into an `UnwrittenError`.

    Libraries raise different errors for them, and most do not name the file. Messages name `kept`, the previous
    version.
    """
    try:
        yield
    except Exception as error:
        target = Path(target)
        fault = _disk_fault(error)
        if fault is not None:
            folder = next(parent for parent in target.absolute().parents if parent.is_dir())
            free = shutil.disk_usage(folder).free / 1e6
            reason = f"{fault}; {free:.0f} MB are free on its disk"
            remedy = "make room"
        elif _is_refused(error, target):
            reason = os.strerror(error.errno or 0)
            remedy = f"make {str(target.parent)!r} a folder that can be written"
        else:
            raise
        remains = "nothing was written"
        if kept is not None:
            remains = f"{str(kept)!r} is kept as it was"
        raise UnwrittenError(
            f"{str(target)!r} could not be written: {reason}, {remains}; {remedy} and start again"
        ) from error


@contextmanager
def replacing(
    target: str | Path, *, shared: bool = False, durable: bool = True, kept: str | Path | None = None
) -> Iterator[Path]:
    """Write a file, or a missing or empty folder, under the yielded temporary path, renamed to `target` on success.

    Readers see the old or the new content, never a mix. A failed block leaves nothing, and the next writer removes
    what a killed process left. With `shared`, several processes may write at once; otherwise the caller holds a
    lock. `durable` flushes to disk first, against crashes of the machine, which takes milliseconds per file.
    """
    target = Path(target)
    if target.is_dir() and any(target.iterdir()):
        raise FileExistsError(f"{str(target)!r} is not empty; choose another folder")
    if kept is None and target.exists():
        kept = target
    suffix = f"-{os.getpid()}" if shared else ""
    partial = target.with_name(f".{target.name}.partial{suffix}")
    _remove(partial)
    try:
        with writing(target, kept):
            yield partial
            if durable:
                # Content first, then its folder; otherwise the rename below could reach the disk before them.
                for path in (*partial.rglob("*"), partial):
                    _sync(path)
            os.replace(partial, target)
    finally:
        _remove(partial)
    _sync(target.parent)


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write bytes, or text as UTF-8 with escapes where it has no encoding: readers see the old or the new content."""
    if isinstance(content, str):
        content = content.encode("utf-8", "backslashreplace")
    with replacing(path) as partial:
        partial.write_bytes(content)


def write_json(path: str | Path, values: object, indent: int = 2) -> None:
    """Write plain values as JSON, atomically; null stands for numbers that are not finite, as figures of no samples."""
    write_atomically(path, json.dumps(without_nan(values), indent=indent, allow_nan=False) + "\n")


@contextmanager
def open_shard(path: Path) -> Iterator[TarWriter]:
    """Write a webdataset shard of samples with bytes as members; equal samples give equal bytes."""
    from webdataset import TarWriter

    with (
        replacing(path) as partial,
        closing(TarWriter(str(partial), mtime=0, user="", group="", encoder=False)) as writer,
    ):
        yield writer


def _disk_fault(error: BaseException | None) -> str | None:
    """Return the reason if an error comes from a full disk; None for other errors."""
    if error is None or isinstance(error, UnwrittenError):
        return None
    if isinstance(error, OSError) and error.errno in _FULL:
        return os.strerror(error.errno)
    # safetensors reports the system's error number in its text; torch reports only that its writer failed.
    number = re.search(r"\(os error (\d+)\)", str(error))
    if type(error).__name__ == "SafetensorError" and number is not None:
        return os.strerror(int(number[1]))
    if isinstance(error, RuntimeError) and re.search("PytorchStreamWriter|inline_container", str(error)):
        return "the file was written only partially"
    # Libraries wrap the system's error, some `from` it and some while handling it.
    return _disk_fault(error.__cause__ or error.__context__)


def _is_refused(error: Exception, target: Path) -> TypeGuard[OSError]:
    """Return whether the system refused to write into the folder of a file, or to make that folder."""
    if not isinstance(error, OSError) or error.errno not in _REFUSED:
        return False
    if not isinstance(error.filename, (str, Path)):
        return False
    refused = Path(error.filename)
    # Either the file's folder is read-only, or a parent of it could not be made.
    return refused.is_relative_to(target.parent) or target.is_relative_to(refused)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Flush a file or folder to disk, so that a later rename cannot precede its content."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class LockedError(RuntimeError):
    """Another process holds the lock of a folder."""


def lock_of(folder: str | Path) -> Path:
    """Return the file that `locked` locks for a folder, or for a file."""
    path = Path(folder).absolute()
    return path.parent / f".{path.name}.lock"


def is_locked(folder: str | Path) -> bool:
    """Return whether another process holds the lock of a folder; nothing is written, and nobody else kept waiting.

    False where that cannot be asked, as in a folder that cannot be read, or on a system without such locks.
    """
    try:
        import fcntl
    # On Windows.
    except ImportError:
        return False
    try:
        # A lock that is shared needs no right to write, and others may ask at the same time.
        with lock_of(folder).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def check_free_of_others(folder: str | Path) -> None:
    """Raise a LockedError if another process holds the lock of a folder; nothing is written."""
    if is_locked(folder):
        raise _taken(folder)


def _taken(folder: str | Path) -> LockedError:
    return LockedError(
        f"another process is writing to {str(folder)!r}: wait for it to end, or name another folder, --output FOLDER"
    )


@contextmanager
def locked(folder: str | Path, *, wait: bool) -> Iterator[None]:
    """Hold the lock of a folder: a file next to it, which the system releases when the process ends or crashes.

    Raises:
        LockedError: Another process holds it, and `wait` is false.
        UnwrittenError: The folder that holds the file cannot be written.
    """
    from filelock import FileLock, Timeout

    path = Path(folder).absolute()
    file = lock_of(path)
    lock = FileLock(file, blocking=wait)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not file.exists()
        # filelock takes some folders in which no file can be made for locked ones.
        if is_new:
            file.touch()
        try:
            lock.acquire()
        except Timeout as error:
            raise _taken(folder) from error
    try:
        yield
    except BaseException:
        # What is refused leaves nothing behind. A process that waits would get the lock of a file that is gone.
        if is_new and not wait and not path.exists():
            with suppress(OSError):
                file.unlink()
        raise
    finally:
        lock.release()


@contextmanager
def locked_where_possible(path: str | Path) -> Iterator[None]:
    """Hold the lock of what saves time alone, and wait for it; without one where it cannot be written."""
    lock = lock_of(path)
    written = [lock.parent]
    # In a folder that several users share, the lock may be another's.
    if lock.exists():
        written.append(lock)
    if not all(os.access(place, os.W_OK) for place in written):
        yield
        return
    with locked(path, wait=True):
        yield
