"""Local and remote shards by number, copies of remote ones, and indices that later starts read."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mmod.data.corrupt import CorruptReport, Fault
from mmod.io.files import locked, locked_where_possible, replacing
from mmod.io.progress import progress_bar
from mmod.io.remote import RemoteConfig, RemoteError, RemoteFiles, check_drivers, is_remote

Index = tuple[np.ndarray, list[Fault]]
"""Offset and size of image and target of every sample (S, 4), and the faults of the shard."""
_VERSION = 2
# Bytes of a checksum, with which an index begins.
_DIGEST = 32
_COPIES = 4
# Fewer are read faster than another process starts.
_SHARDS_PER_PROCESS = 8
# Image and target of a sample are read at once where at most this lies between them.
_GAP = 1 << 16


class ShardFiles:
    """The shards of a list, read by number.

    Args:
        cache: Folder for copies of remote shards; also for indices, by default next to the shards.
    """

    def __init__(
        self, urls: list[str], cache: str | Path | None, report: CorruptReport, config: RemoteConfig | None = None
    ) -> None:
        self.urls = urls
        self.report = report
        self._cache = None if cache is None else Path(cache)
        self._files = RemoteFiles(config or RemoteConfig())
        report.retried = self._files.retried
        remote = [url for url in urls if is_remote(url)]
        if remote and cache is None:
            raise ValueError(f"the remote shard {remote[0]!r} needs a folder for its copy: set root")
        check_drivers(remote)
        self._copies: list[Path | None] = []
        # Of each shard or its copy; None for those that are read from their URL.
        self._paths: list[str | None] = []
        for url in urls:
            if is_remote(url):
                self._copies.append(_copy_path(url, str(cache)))
                self._paths.append(None)
            else:
                self._copies.append(None)
                self._paths.append(url)

    def fetch(self, number: int) -> str:
        """Copy a remote shard unless there is a copy, and return the local path; one process of a node copies it."""
        path = self._paths[number]
        if path is not None:
            return path
        copy = self._copies[number]
        assert copy is not None
        if not copy.exists():
            # Asked again under the lock: another process may have copied it in the meantime.
            with locked(copy, wait=True):
                if not copy.exists():
                    self._files.copy(self.urls[number], copy)
        self._paths[number] = str(copy)
        return str(copy)

    def open(self, number: int) -> BinaryIO:
        """Open a shard for reading at any position."""
        path = self._paths[number]
        if path is None:
            return self._files.open(self.urls[number])
        return open(path, "rb")

    def read(self, number: int, spans: list[tuple[int, int]]) -> list[bytes]:
        """Read several spans, offset and size each; a ValueError if the shard is shorter than when it was indexed."""
        path = self._paths[number]
        if path is not None:
            with open(path, "rb") as file:
                return [read_at(file, offset, size) for offset, size in spans]
        first = min(offset for offset, _ in spans)
        last = max(offset + size for offset, size in spans)
        url = self.urls[number]
        read_apart = sum(size for _, size in spans)
        if last - first > read_apart + _GAP:
            return [self._files.read(url, offset, size) for offset, size in spans]
        # One request for both members of a sample, which usually lie side by side.
        data = self._files.read(url, first, last - first)
        parts = []
        for offset, size in spans:
            start = offset - first
            parts.append(data[start : start + size])
        return parts

    def indices(
        self, suffix: str, make: Callable[[BinaryIO, str], Index], progress: bool
    ) -> Iterator[tuple[int, Index]]:
        """Yield number and index of every shard that can be read, in order; missing indices are made and kept."""
        numbers = range(len(self.urls))
        paths = [self._index_path(number, suffix) for number in numbers]
        missing = sum(not path.exists() for path in paths)
        is_remote = any(copy is not None for copy in self._copies)
        # Processes, because parsing headers takes the interpreter's time; threads would wait for each other.
        processes = min((os.cpu_count() or 1), missing // _SHARDS_PER_PROCESS)
        with ExitStack() as stack:
            if missing and not is_remote:
                # One process of a node makes the indices of a folder, and the others read them.
                stack.enter_context(_locked(paths[0].with_name("shards")))
            find = partial(self._find, suffix=suffix, make=make)
            results: Iterable[Index | RemoteError]
            if is_remote:
                # Threads wait for the network together.
                results = stack.enter_context(ThreadPoolExecutor(_COPIES)).map(find, numbers)
            elif processes > 1:
                pool = stack.enter_context(ProcessPoolExecutor(processes))
                results = pool.map(find, numbers, chunksize=_SHARDS_PER_PROCESS)
            else:
                results = map(find, numbers)
            bar = progress_bar(results, desc="index", unit="shards", total=len(numbers), shown=progress)
            for number, index in enumerate(bar):
                if isinstance(index, RemoteError):
                    self.report.add([Fault(self.urls[number], "", str(index))])
                else:
                    yield number, index

    def _find(self, number: int, suffix: str, make: Callable[[BinaryIO, str], Index]) -> Index | RemoteError:
        try:
            return self._index(number, suffix, make)
        except RemoteError as error:
            # Raised in a pool, it would end the iteration over all shards.
            return error

    def _index(self, number: int, suffix: str, make: Callable[[BinaryIO, str], Index]) -> Index:
        url = self.urls[number]
        copy = self._copies[number]
        # The output of a command cannot be read by parts.
        if copy is not None and (self._files.config.copy or url.startswith("pipe:") or copy.exists()):
            self.fetch(number)
        size, tag = self._identity(number)
        path = self._index_path(number, suffix)
        index = _read_index(path, url, size, tag)
        if index is not None:
            return index
        # Reading the headers of a remote shard takes long, so each has a lock.
        lock = nullcontext() if copy is None else _locked(path)
        with lock:
            # Asked again under the lock.
            index = _read_index(path, url, size, tag)
            if index is None:
                with self.open(number) as file:
                    index = make(file, url)
                _write_index(path, index, size, tag)
        return index

    def _identity(self, number: int) -> tuple[int | None, str | None]:
        """Return size and version of a shard; the version None if any is right, as for copies."""
        path = self._paths[number]
        if path is None:
            return self._files.describe(self.urls[number])
        stat = os.stat(path)
        if self._copies[number] is not None:
            # A copy has the time of its download, which says nothing of its version.
            return stat.st_size, None
        return stat.st_size, f"{stat.st_mtime_ns}-{stat.st_ino}"

    def _index_path(self, number: int, suffix: str) -> Path:
        url = self.urls[number]
        copy = self._copies[number]
        if copy is None and self._cache is None:
            return Path(url).with_name(f".{Path(url).name}.{suffix}.index")
        copy = copy or _copy_path(os.path.abspath(url), str(self._cache))
        return copy.with_name(f".{copy.name}.{suffix}.index")


def _copy_path(url: str, folder: str) -> Path:
    name = re.sub(r"[^A-Za-z0-9._-]", "_", url.split("/")[-1])
    stem = name[-80:].removesuffix(".tar")
    # A hash behind the readable name: URLs may end in the same file name.
    checksum = hashlib.sha256(url.encode()).hexdigest()[:12]
    return Path(folder, f"{stem}-{checksum}.tar")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of an index, for which a folder is made."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    with locked_where_possible(path):
        yield


def _read_index(path: Path, url: str, size: int | None, tag: str | None) -> Index | None:
    """Return a kept index if it is whole, and of this version of the shard."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    content = data[_DIGEST:]
    if data[:_DIGEST] != _checksum(content):
        return None
    head, _, body = content.partition(b"\n")
    header = json.loads(head)
    is_current = header["version"] == _VERSION and header["size"] == size and tag in (None, header["tag"])
    if size is None or not is_current:
        return None
    faults = [Fault(url, *fault) for fault in header["faults"]]
    return np.frombuffer(body, "<i8").reshape(-1, 4), faults


def _write_index(path: Path, index: Index, size: int | None, tag: str | None) -> None:
    """Write the checksum of an index, its header as JSON, and four numbers of 64 bits for each sample."""
    rows, faults = index
    header = {"version": _VERSION, "size": size, "tag": tag, "faults": [fault[1:] for fault in faults]}
    content = json.dumps(header).encode() + b"\n" + rows.astype("<i8").tobytes()
    # An index saves time only, so a folder that cannot be written is no error.
    with suppress(OSError), replacing(path, shared=True, durable=False) as partial:
        partial.write_bytes(_checksum(content) + content)


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def read_at(file: BinaryIO, offset: int, size: int) -> bytes:
    """Read `size` bytes of a file from an offset; raise a ValueError if there are fewer."""
    file.seek(offset)
    data = file.read(size)
    if len(data) != size:
        raise ValueError(f"the shard changed since it was indexed: it ends before byte {offset + size}")
    return data
