"""Remote files through fsspec: time limits, retries with backoff, and errors that name the URL."""

from __future__ import annotations

import io
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from mmod.io.files import replacing
from mmod.lazy import name_missing_extra
from mmod.values import Checked

_URL = re.compile(r"^(pipe:|[a-z][a-z0-9+.-]*://)", re.IGNORECASE)
# Names under which file systems state a file's version, the most exact first.
_TAGS = ("ETag", "etag", "sha256", "mtime", "LastModified", "last_modified", "updated", "created")
_CHUNK = 1 << 20

Result = TypeVar("Result")


@dataclass
class RemoteConfig(Checked, group="data.remote"):
    """Config of reading shards from URLs.

    Args:
        timeout: Seconds without a byte after which an attempt ends.
        retries: Attempts after the first one that failed.
        backoff: Seconds before the first retry, doubled before each further one.
        copy: Copy shards to `root` before they are read; false reads every sample from its URL.
    """

    timeout: Annotated[float, "(0, inf)"] = 60.0
    retries: Annotated[int, "[0, inf)"] = 3
    backoff: Annotated[float, "[0, inf)"] = 1.0
    copy: bool = True


class RemoteError(OSError):
    """A remote file cannot be read; the message names its URL."""


class _AttemptError(Exception):
    """One attempt failed; the cause says how."""


def is_remote(url: str) -> bool:
    """Return whether this is a URL of another machine or a `pipe:` command, not a local path or `file://`."""
    return _URL.match(url) is not None and not url.startswith("file://")


class RemoteFiles:
    """Reads files by URL; processes share the count of retries, a tensor."""

    def __init__(self, config: RemoteConfig) -> None:
        import torch

        self.config = config
        self.retried = torch.zeros((), dtype=torch.int64).share_memory_()
        self._failed: dict[str, tuple[float, RemoteError]] = {}

    def describe(self, url: str) -> tuple[int | None, str | None]:
        """Return size and version (such as an ETag) of a file, each None if its file system does not state it."""

        def ask(files: Any, path: str) -> dict[str, Any]:
            # A listing that another process has changed since is not used.
            files.invalidate_cache()
            return files.info(path)

        info = self._ask(url, ask)
        tag = next((str(info[name]) for name in _TAGS if info.get(name) is not None), None)
        return info.get("size"), tag

    def read(self, url: str, offset: int, size: int) -> bytes:
        """Read `size` bytes from an offset. A file that failed fails again at once until `timeout` has passed."""

        def ask(files: Any, path: str) -> bytes:
            data = files.cat_file(path, start=offset, end=offset + size)
            if len(data) != size:
                raise OSError(f"got {len(data)} bytes for {size} from byte {offset}")
            return data

        since, error = self._failed.get(url, (0.0, None))
        if error is not None and time.monotonic() - since < self.config.timeout:
            raise error
        try:
            return self._ask(url, ask)
        except RemoteError as failure:
            # A shard has thousands of samples, and each would wait for all retries.
            self._failed[url] = time.monotonic(), failure
            raise

    def copy(self, url: str, path: Path) -> None:
        """Copy a file to a local path, where it appears complete; the caller holds a lock."""
        path.parent.mkdir(parents=True, exist_ok=True)

        def attempt() -> None:
            # Opened anew at each attempt, which truncates what the last one wrote.
            with open(partial, "wb") as file:
                for chunk in self._items(lambda: _stream(url)):
                    file.write(chunk)

        with replacing(path) as partial:
            self._retry(url, attempt)

    def open(self, url: str) -> io.BufferedReader:
        """Open a file for reading at any position, in steps of 8 MiB."""
        return io.BufferedReader(_Ranges(self, url), 8 * _CHUNK)

    def _ask(self, url: str, question: Callable[[object, str], Result]) -> Result:
        """Return what a function says of a file system and the path in it."""

        def produce() -> Iterator[Result]:
            yield question(*open_filesystem(url))

        # The first item alone: the function's answer, within the time limit of `_items`.
        return self._retry(url, lambda: next(self._items(produce)))

    def _retry(self, url: str, attempt: Callable[[], Result]) -> Result:
        attempts = 0
        while True:
            attempts += 1
            try:
                return attempt()
            except _AttemptError as error:
                cause = error.__cause__
                # No later attempt finds what is not there.
                if isinstance(cause, ModuleNotFoundError):
                    raise cause from None
                if attempts > self.config.retries or isinstance(cause, (FileNotFoundError, PermissionError)):
                    reason = f"{type(cause).__name__}: {cause}"
                    raise RemoteError(f"{url} cannot be read, in {attempts} attempts: {reason}") from cause
            self.retried += 1
            time.sleep(self.config.backoff * 2 ** (attempts - 1))

    def _items(self, produce: Callable[[], Iterator[Result]]) -> Iterator[Result]:
        """Yield from an iterator on another thread, which is left behind when an item takes longer than `timeout`.

        Drivers wait for minutes in places that no option of theirs limits, such as the search for credentials.
        """
        items: queue.Queue[tuple[str, Any]] = queue.Queue(4)
        is_abandoned = threading.Event()

        # In a thread, because no library of file systems keeps a time limit for all its protocols.
        def run() -> None:
            try:
                for item in produce():
                    items.put(("item", item))
                    # The reader gave up; without this check a slow download would go on behind it.
                    if is_abandoned.is_set():
                        return
                items.put(("end", None))
            except Exception as error:
                items.put(("error", error))

        threading.Thread(target=run, daemon=True).start()
        try:
            while True:
                try:
                    event, value = items.get(timeout=self.config.timeout)
                except queue.Empty:
                    limit = TimeoutError(f"no byte within {self.config.timeout:g} s")
                    raise _AttemptError from limit
                if event == "error":
                    raise _AttemptError from value
                if event == "end":
                    return
                yield value
        finally:
            is_abandoned.set()
            # Frees a thread that waits for room in the queue, so that it sees that it was abandoned.
            while not items.empty():
                items.get_nowait()


class _Ranges(io.RawIOBase):
    """A remote file whose reads are requests for ranges."""

    def __init__(self, files: RemoteFiles, url: str) -> None:
        size, _ = files.describe(url)
        if size is None:
            raise RemoteError(f"{url} does not state its size, so that it can only be copied: set data.remote.copy")
        self._files = files
        self._url = url
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        size = max(0, min(len(buffer), self._size - self._position))
        if size:
            buffer[:size] = self._files.read(self._url, self._position, size)
        self._position += size
        return size


def open_filesystem(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path in it."""
    with name_missing_extra():
        from fsspec.core import url_to_fs
    try:
        files, path = url_to_fs(url)
    except ImportError as error:
        # fsspec's message names the package of the protocol.
        raise ModuleNotFoundError(f"{url} needs a driver that is not installed: {error}") from error
    except ValueError as error:
        raise ValueError(f"{url}: {error}; https://, s3://, gs://, hf:// and others of fsspec are valid") from error
    return files, path


def check_drivers(urls: list[str]) -> None:
    """Raise, before anything is read, if a protocol is unknown or its package is missing; see `open_filesystem`."""
    first = {url.partition("://")[0].lower(): url for url in reversed(urls) if not url.lower().startswith("pipe:")}
    for protocol, url in first.items():
        try:
            # Making the file system would search for credentials, which may take minutes.
            from fsspec import get_filesystem_class

            get_filesystem_class(protocol)
        # Asked again only to raise the error with advice.
        except (ImportError, ValueError):
            open_filesystem(url)


def _stream(url: str) -> Iterator[bytes]:
    """Yield a file in chunks, and fail if it ends early."""
    size = None
    length = 0
    if url.lower().startswith("pipe:"):
        from webdataset.gopen import gopen

        opened = gopen(url)
    else:
        files, path = open_filesystem(url)
        size = files.info(path).get("size")
        opened = files.open(path, "rb")
    # Closing a pipe checks the exit status of the command behind it.
    with opened as stream:
        while chunk := stream.read(_CHUNK):
            length += len(chunk)
            yield chunk
    if size is not None and length != size:
        raise OSError(f"the file ended after {length} of {size} bytes")
