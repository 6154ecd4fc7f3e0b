"""A journal: finished pieces of work that a killed process does not repeat."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mmod.io.claim import differences
from mmod.io.files import check_regular, parse_json, write_atomically, writing


class Journal:
    """Records of finished work, each a line with a checksum, in a file that belongs to one piece of work.

    A record that was cut when the process was killed is dropped. Nothing is written before the first record, or without
    a path. A file with another `identity` is refused; None reads any. `work` names the work in messages.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "journal.jsonl"
        >>> Journal(path, {"seed": 0}, "search").add({"batch": 0, "loss": 0.5})
        >>> Journal(path, {"seed": 0}, "search").records
        [{'batch': 0, 'loss': 0.5}]
    """

    def __init__(self, path: str | Path | None, identity: Mapping[str, Any] | None, work: str) -> None:
        self.path = path if path is None else Path(path)
        self.records = list[Any]()
        self._work = work
        self._identity = None if identity is None else dict(identity)
        if self.path is None or not self.path.exists():
            return
        try:
            check_regular(self.path)
        except ValueError as error:
            raise ValueError(f"{error}. Delete it or choose another file") from error
        content = self.path.read_bytes()
        complete = content[: content.rfind(b"\n") + 1]
        lines = [self._read(line, number) for number, line in enumerate(complete.splitlines(), 1)]
        if lines and self._identity is not None:
            changes = differences(lines[0], self._identity)
            self.check(not changes, changes)
        self.records = lines[1:]
        if len(complete) < len(content):
            os.truncate(self.path, len(complete))

    def add(self, record: Any) -> None:
        """Append a record of plain values."""
        self._make_folder()
        self.records.append(record)
        if self.path is None:
            return
        with writing(self.path), self.path.open("ab") as file:
            is_new = file.tell() == 0
            file.write(_lines([self._identity, record] if is_new else [record]))
            file.flush()
            os.fsync(file.fileno())

    def replace(self, record: Any) -> None:
        """Keep this record alone, for work whose state stands in one."""
        self._make_folder()
        self.records = [record]
        if self.path is not None:
            write_atomically(self.path, _lines((self._identity, record)))

    def close(self) -> None:
        """Remove the file, once the results are kept elsewhere."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def check(self, is_same: bool, why: str) -> None:
        """Raise a ValueError that says what differs, unless the file belongs to this work."""
        if not is_same:
            raise ValueError(
                f"{str(self.path)!r} belongs to another {self._work}: {why}. Delete it or choose another file"
            )

    def _make_folder(self) -> None:
        # Before the first record: a folder that is gone later is not created anew, with the last record alone.
        if self.path is not None and not self.records:
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def _read(self, line: bytes, number: int) -> Any:
        check, _, text = line.partition(b" ")
        if check != b"%08x" % zlib.crc32(text):
            raise ValueError(
                f"{str(self.path)!r} is damaged, or no journal: line {number} does not fit its checksum. "
                "Delete it or choose another file"
            )
        return parse_json(text, f"{self.path}, line {number}")


def _lines(values: Iterable[Any]) -> bytes:
    texts = (json.dumps(value).encode() for value in values)
    return b"".join(b"%08x %b\n" % (zlib.crc32(text), text) for text in texts)
