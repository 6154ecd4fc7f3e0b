"""The store: results by what produced them, so that an interrupted call resumes and nothing is computed twice."""

from __future__ import annotations

import base64
import dataclasses
import errno
import hashlib
import io
import json
import os
import secrets
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mmod.io.environment import environment
from mmod.io.files import check_regular, lock_of, locked, parse_json, writing
from mmod.io.progress import say
from mmod.io.tensors import raw_bytes
from mmod.plain import from_plain
from mmod.values import brief
from mmod.version import __version__

Result = TypeVar("Result")
STORE = "store.jsonl"
"""Name of the store in a folder of results."""
_MAGIC = b"mmod store 1 "
# No header is longer.
_LONGEST_HEADER = 2**20
# Arrays are compressed where that saves much: features of a model are noise to it.
_WORTHWHILE = 0.8
# How a file of numpy begins.
_NPY = b"\x93NUMPY"
_ARRAY = "$array"
_TENSOR = "$tensor"


class Store:
    """Results by their identity, in memory or in one file, which several processes may read and write at once.

    An identity is a mapping of plain values that names all a result depends on: config, seed, samples, weights, data.
    The store adds mmod's version. Another identity finds nothing, and its result joins the others. Results of another
    version stay in the file unread, which is said in one line.

    The file has a header, and a line for each result: a checksum, then version, identity and value as JSON. A line that
    was cut when its process was killed is dropped; a damaged one is refused. A later result of an identity supersedes
    the earlier one, which stays in the file. Only writing takes the lock, the file `.NAME.lock`, so that processes see
    each other's results while all of them run. Nothing is written before the first result.

    Args:
        path: The file; None keeps the results in memory.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "store.jsonl"
        >>> Store(path).once({"seed": 0, "batch": 3}, lambda: {"losses": np.array([0.5, 0.25])})
        {'losses': array([0.5 , 0.25])}
        >>> Store(path).get({"seed": 0, "batch": 3})
        {'losses': array([0.5 , 0.25])}
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        # By the hash of a result's identity, its line without a file.
        self._memory: dict[str, bytes] = {}
        # Whether the file was there at any time.
        self._was_there = False
        self._forget()
        # Reads the file at once, so that a damaged one is refused before anything is computed.
        self._find("")

    def get(
        self, identity: Mapping[str, object], as_type: type[Result] | None = None, *, timed_on: str | None = None
    ) -> Result | None:
        """Return the result of an identity; None without one.

        Args:
            as_type: A dataclass that the result's values are the fields of.
            timed_on: Device on which the result was timed. Versions, machine and threads then join the identity.
        """
        line = self._find(key_of(_record_of(identity, timed_on)))
        if line is None:
            return None
        return self._value_in(line, as_type)

    def put(self, identity: Mapping[str, object], value: object, *, timed_on: str | None = None) -> None:
        """Keep the result of an identity in place of an earlier one, see `get`.

        Args:
            value: Plain values, arrays, tensors, and dataclasses, whose fields are kept.
        """
        self._write(_record_of(identity, timed_on), value, supersede=True)

    def once(
        self, identity: Mapping[str, object], compute: Callable[[], Result], *, timed_on: str | None = None
    ) -> Result:
        """Return the result of an identity, and compute it if there is none.

        It is returned as the file holds it, so that it does not depend on who computed it: a tuple is a list, keys are
        texts. Of processes that compute it at once, all return the result of the first.
        """
        record = _record_of(identity, timed_on)
        # Not locked while it computes, which may take hours: two processes may compute the same result, and the first
        # wins.
        line = self._find(key_of(record))
        if line is None:
            line = self._write(record, compute(), supersede=False)
        return self._value_in(line)

    def __contains__(self, identity: Mapping[str, object]) -> bool:
        return self._find(key_of(_record_of(identity, None))) is not None

    def remove(self) -> None:
        """Remove the file and its lock, once its results are kept elsewhere."""
        if self.path is not None:
            for file in (self.path, lock_of(self.path)):
                file.unlink(missing_ok=True)

    def _forget(self) -> None:
        # By the hash of a result's identity, start and length of the last line that holds one.
        self._spans: dict[str, tuple[int, int]] = {}
        self._versions: set[str] = set()
        self._header = b""
        # Bytes and results of the file that have been read.
        self._end = 0
        self._number = 0

    def _find(self, key: str) -> bytes | None:
        """Read what was written since the last time, and return the line of a result."""
        if self.path is None:
            return self._memory.get(key)
        try:
            check_regular(self.path)
            file = self.path.open("rb")
        except FileNotFoundError:
            self._forget()
            return None
        except ValueError as error:
            raise ValueError(f"{error}. Delete it or choose another file") from error
        with file:
            self._read(file)
            if key not in self._spans:
                return None
            start, size = self._spans[key]
            file.seek(start)
            return file.read(size)

    def _read(self, file: BinaryIO) -> None:
        """Read what was written since the last time; a cut line at the end is not read."""
        header = file.readline(_LONGEST_HEADER)
        # A file of other results has another header.
        is_other = header != self._header or file.seek(0, os.SEEK_END) < self._end
        if is_other:
            self._forget()
            if not self._accepts(header):
                return
            self._was_there = True
            self._header = header
            self._end = len(header)
        file.seek(self._end)
        for line in file:
            # A line without its end: another process is writing it, or was killed. The next append truncates it.
            if not line.endswith(b"\n"):
                break
            self._add(line)
        if is_other and self._versions and __version__ not in self._versions:
            others = ", ".join(sorted(self._versions))
            say(f"{str(self.path)!r} holds results of mmod {others}, which stay in it: mmod {__version__} starts anew")

    def _accepts(self, header: bytes) -> bool:
        """Return whether the first line of a file is a whole header; refuse any that is none of a store."""
        if not header.endswith(b"\n"):
            # A header that another process is still writing.
            if header.startswith(_MAGIC) or _MAGIC.startswith(header):
                return False
            self._refuse("it has no header")
        text, _, check = header[:-1].rpartition(b" ")
        if not text.startswith(_MAGIC) or check != _checksum(text):
            self._refuse("its header does not fit its checksum")
        return True

    def _add(self, line: bytes) -> None:
        """Note where a line is by the hash of its identity."""
        self._number += 1
        # Behind the eight digits of the checksum and a blank.
        text = line[9:-1]
        if line[:9] != _checksum(text) + b" ":
            self._refuse(f"result {self._number} does not fit its checksum")
        try:
            record = parse_json(text, f"result {self._number}")
        except ValueError as error:
            self._refuse(str(error))
        if not isinstance(record, dict) or record.keys() != {"mmod", "identity", "value"}:
            self._refuse(f"result {self._number} has no version, identity and value")
        # Values stay in the file, and are parsed when they are asked for.
        del record["value"]
        self._spans[key_of(record)] = (self._end, len(line))
        self._versions.add(str(record["mmod"]))
        self._end += len(line)

    def _value_in(self, line: bytes, as_type: type[Result] | None = None) -> Result:
        try:
            value = json.loads(line[9:], object_hook=_unpacked)["value"]
            if as_type is None:
                return value
            return from_plain(as_type, value, "value", limit=None)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError, zlib.error) as error:
            self._refuse(f"{type(error).__name__}: {error}")

    def _refuse(self, why: str) -> NoReturn:
        raise ValueError(f"{str(self.path)!r} is damaged, or no store: {why}. Delete it or choose another file")

    def _write(self, record: Mapping[str, object], value: object, *, supersede: bool) -> bytes:
        """Write the line of a result, and return it, or the one that is not to be superseded."""
        key = key_of(record)
        text = json.dumps({**record, "value": value}, default=_packed).encode()
        line = b"%b %b\n" % (_checksum(text), text)
        if self.path is None:
            self._memory[key] = line
            return line
        with writing(self.path):
            # A folder that vanished after its first result is not made anew, with the last result alone.
            if self._was_there and not self.path.parent.is_dir():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
            with locked(self.path, wait=True):
                existing = self._find(key)
                # An equal line is not written again, although it may supersede.
                if existing is not None and (existing == line or not supersede):
                    return existing
                self._append(line)
                self._find(key)
        return line

    def _append(self, line: bytes) -> None:
        """Write a line behind the last whole one."""
        assert self.path is not None
        header = b""
        if not self._header:
            # Like no other: it tells processes that read the file whether they have read its beginning.
            text = _MAGIC + secrets.token_hex(8).encode()
            header = b"%b %b\n" % (text, _checksum(text))
        # Unbuffered, so that nothing is left to be written after an error.
        with self.path.open("ab", buffering=0) as file:
            # What a killed process left half-written.
            file.truncate(self._end)
            content = memoryview(header + line)
            try:
                while content:
                    content = content[file.write(content) :]
                os.fsync(file.fileno())
            except BaseException:
                with suppress(OSError):
                    # A half-written line would look damaged to the next reader that appends.
                    file.truncate(self._end)
                raise


class OptionalStore:
    """A store that saves time alone: a damaged file is made anew, and whatever else goes wrong with it ends nothing.

    A file at its path that is no store stays as it is.

    Args:
        path: The file, in a folder that exists.
        otherwise: What follows where the file cannot be used, which is said once; empty to say nothing.
    """

    def __init__(self, path: str | Path, otherwise: str = "") -> None:
        self._path = Path(path)
        self._otherwise = otherwise
        self._store: Store | None = None
        self._is_usable = True

    def once(self, identity: Mapping[str, object], compute: Callable[[], Result]) -> Result:
        """Return the result of an identity, and compute it if there is none."""
        value = self._tried(lambda store: store.get(identity))
        if value is None:
            value = compute()
            self._tried(lambda store: store.put(identity, value))
        return value

    def remove(self) -> None:
        """Remove the file, once its results are of no use any more."""
        # Where it cannot be removed, it stays as it is.
        with suppress(OSError):
            if self._store is not None and not _is_other(self._path):
                self._store.remove()

    def _tried(self, step: Callable[[Store], Result]) -> Result | None:
        if not self._is_usable:
            return None
        try:
            try:
                return step(self._opened())
            except ValueError:
                # Damaged. What lies there by chance is not ours to remove.
                if _is_other(self._path):
                    raise
                self._path.unlink(missing_ok=True)
                return step(self._opened())
        except (OSError, RuntimeError, ValueError) as error:
            self._is_usable = False
            if self._otherwise:
                say(f"{self._otherwise}: {error}")
            return None

    def _opened(self) -> Store:
        if self._store is None:
            self._store = Store(self._path)
        return self._store


def _is_other(path: Path) -> bool:
    """Return whether there is something that does not begin as a store does."""
    if not path.is_file():
        return path.exists()
    with path.open("rb") as file:
        # A full disk leaves an empty file at the first write, or part of a header.
        return not _MAGIC.startswith(file.read(len(_MAGIC)))


def fingerprint(*outputs: Tensor) -> str:
    """Return what stands for a model and its inputs in an identity: shapes of outputs, their size, and a weighted mean.

    Few digits, because the last ones depend on the number of threads.

    Example:
        >>> fingerprint(torch.full((2, 3), -0.5))
        '2x3 5.000000e-01 -2.774e-01'
    """
    parts = []
    for output in outputs:
        value_RC = output.detach().double().reshape(len(output), -1)
        rows, columns = value_RC.shape
        # The weights tell outputs from the same in another order.
        column_R = value_RC @ _weights(columns, 0.618034).to(value_RC) / columns
        mean = float(_weights(rows, 0.414214).to(column_R) @ column_R) / rows
        shape = "x".join(map(str, output.shape))
        size = float(value_RC.abs().mean())
        parts.append(f"{shape} {size:.6e} {mean:.3e}")
    return ", ".join(parts)


def _weights(count: int, step: float) -> Tensor:
    # Multiples of an irrational number modulo 1, no two of which are equal.
    return 0.5 + torch.arange(count) * step % 1


def checksum(batch: object, before: str = "") -> str:
    """Return what stands for a batch in an identity: a checksum of its tensors, arrays, numbers and texts.

    Args:
        before: That of the batches before, if it stands for these too.
    """
    digest = hashlib.sha256(before.encode())
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Mapping):
            # What a processor returns, and other mappings that torch takes for leaves.
            digest.update(checksum(dict(leaf)).encode())
        elif isinstance(leaf, Tensor):
            digest.update(repr((leaf.dtype, leaf.shape)).encode())
            digest.update(raw_bytes(leaf))
        elif isinstance(leaf, np.ndarray):
            digest.update(repr(leaf.tolist()).encode())
        elif isinstance(leaf, (str, int, float)):
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


def _record_of(identity: Mapping[str, object], timed_on: str | None) -> dict[str, object]:
    """Return the record of a result without its value: identity and mmod's version, of times the environment too."""
    if timed_on is not None:
        identity = {**identity, "environment": environment(timed_on)}
    return {"mmod": __version__, "identity": dict(identity)}


def key_of(record: Mapping[str, object]) -> str:
    """Return the checksum of plain values, by which a result is found and a file may be named."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _checksum(text: bytes) -> bytes:
    return b"%08x" % zlib.crc32(text)


def _packed(value: object) -> object:
    """Return what JSON cannot hold as plain values."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Tensor):
        return {_TENSOR: _packed_array(value.detach().cpu().numpy())}
    if isinstance(value, np.ndarray):
        return {_ARRAY: _packed_array(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise TypeError(f"a store keeps plain values, arrays, tensors and dataclasses, got {brief(value)}")


def _packed_array(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    content = file.getvalue()
    squeezed = zlib.compress(content, 1)
    # Whether it was compressed shows in its first bytes, see `_unpacked`.
    if len(squeezed) < _WORTHWHILE * len(content):
        content = squeezed
    return base64.b64encode(content).decode()


def _unpacked(value: dict[str, str]) -> object:
    """Return what a JSON object stands for: an array, a tensor, or itself."""
    if value.keys() not in ({_ARRAY}, {_TENSOR}):
        return value
    ((kind, packed),) = value.items()
    content = base64.b64decode(packed)
    if not content.startswith(_NPY):
        content = zlib.decompress(content)
    array = np.load(io.BytesIO(content), allow_pickle=False)
    if kind == _ARRAY:
        return array
    return torch.from_numpy(array)
