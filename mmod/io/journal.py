"""A journal: finished pieces of work that a killed process does not repeat."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmod.io.claim import differences
from mmod.io.files import check_regular, parse_json, writing

__all__ = ["Journal"]


class Journal:
    """Records of finished pieces of work, each a line with a checksum, in a file that belongs to one piece of work.

    A record that was cut when the process was killed is dropped. Nothing is written before the first record.

    Args:
        path: The file; None keeps the records in memory alone.
        identity: What the work is, as plain values: a file that was begun for another is refused. None reads any.
        kind: What the work is called in messages, as "search".

    Attributes:
        records: What was kept, the oldest first.

    Raises:
        ValueError: The file is damaged, or belongs to other work; the message names what differs.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "journal.jsonl"
        >>> Journal(path, {"seed": 0}, "search").add({"batch": 0, "loss": 0.5})
        >>> Journal(path, {"seed": 0}, "search").records
        [{'batch': 0, 'loss': 0.5}]
        >>> Journal(path, {"seed": 1}, "search")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: ... belongs to another search: seed: 0 there, 1 now. Delete it or choose another file
    """

    def __init__(self, path: str | Path | None, identity: Mapping[str, Any] | None, kind: str) -> None:
        self.path, self.records, self._kind = path if path is None else Path(path), list[Any](), kind
        self._identity = None if identity is None else dict(identity)
        if self.path is None or not self.path.exists():
            return
        try:
            check_regular(self.path)
        except ValueError as error:
            raise ValueError(f"{error}. Delete it or choose another file") from error
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        lines = [self._read(line, number) for number, line in enumerate(whole.splitlines(), 1)]
        if lines and self._identity is not None:
            changes = differences(lines[0], self._identity)
            self.check(
                not changes, "; ".join(f"{key}: {old!r} there, {new!r} now" for key, (old, new) in changes.items())
            )
        self.records = lines[1:]
        if len(whole) < len(content):
            os.truncate(self.path, len(whole))

    def add(self, record: Any) -> None:
        """Keep a record, plain values.

        Raises:
            UnwrittenError: The disk is full.
        """
        self.records.append(record)
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with writing(self.path), self.path.open("ab") as file:
            for value in (record,) if file.tell() else (self._identity, record):
                text = json.dumps(value).encode()
                file.write(b"%08x %b\n" % (zlib.crc32(text), text))
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Remove the file, once the results are kept elsewhere."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def check(self, is_same: bool, why: str) -> None:
        """Refuse the file unless what it holds is of this work.

        Args:
            is_same: Whether it is.
            why: What differs, for the message.

        Raises:
            ValueError: It is not.
        """
        if not is_same:
            raise ValueError(
                f"{str(self.path)!r} belongs to another {self._kind}: {why}. Delete it or choose another file"
            )

    def _read(self, line: bytes, number: int) -> Any:
        """Return the values of a line."""
        check, _, text = line.partition(b" ")
        if check != b"%08x" % zlib.crc32(text):
            raise ValueError(
                f"{str(self.path)!r} is damaged, or no journal: line {number} does not fit its checksum. "
                "Delete it or choose another file"
            )
        return parse_json(text, f"{self.path}, line {number}")
