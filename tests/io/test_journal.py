"""Journals: a killed process loses the record that it was writing, and nothing that is damaged or foreign is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmod.io.journal import Journal

IDENTITY = {"options": [[0.5, "block"]], "part": "image"}
RECORDS: list[Any] = [{"batch": 0, "loss": 0.1 + 0.2}, ["é", None], 3]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "below" / "journal.jsonl"
    journal = Journal(file, IDENTITY, "search")
    assert not file.parent.exists(), "nothing is written before the first record"
    for record in RECORDS:
        journal.add(record)
    return file


def test_a_killed_process_goes_on_after_its_last_whole_record(path: Path) -> None:
    content = path.read_bytes()
    ends = [place + 1 for place, byte in enumerate(content) if byte == ord("\n")]
    for size in range(len(content) + 1):
        path.write_bytes(content[:size])
        complete = max(0, sum(end <= size for end in ends) - 1)
        journal = Journal(path, IDENTITY, "search")
        assert journal.records == RECORDS[:complete]
        for record in RECORDS[complete:]:
            journal.add(record)
        assert path.read_bytes() == content, "as if it had never been killed"


@given(st.data())
def test_every_changed_byte_is_refused_by_name(data: st.DataObject) -> None:
    import tempfile

    file = Path(tempfile.mkdtemp()) / "journal.jsonl"
    journal = Journal(file, IDENTITY, "search")
    for record in RECORDS:
        journal.add(record)
    content = bytearray(file.read_bytes())
    # Without its last byte the last record is cut, and dropped.
    place = data.draw(st.integers(0, len(content) - 2))
    content[place] ^= data.draw(st.integers(1, 255))
    file.write_bytes(bytes(content))
    with pytest.raises(ValueError, match=r"journal\.jsonl' is damaged, .*: line \d .*Delete it or choose another file"):
        Journal(file, IDENTITY, "search")
    assert file.read_bytes() == bytes(content)


def test_other_work_is_refused_with_what_differs(path: Path) -> None:
    with pytest.raises(ValueError, match=r"belongs to another search: part: 'image' there, 'text' now\. Delete it"):
        Journal(path, {**IDENTITY, "part": "text"}, "search")
    assert Journal(path, {"options": [(0.5, "block")], "part": "image"}, "search").records == RECORDS


def test_what_is_no_file_is_refused_and_none_keeps_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is no regular file\. Delete it or choose another file"):
        Journal(tmp_path, IDENTITY, "search")
    journal = Journal(None, IDENTITY, "search")
    journal.add(1)
    journal.close()
    assert journal.records == [1]


def test_a_closed_journal_is_gone(path: Path) -> None:
    Journal(path, IDENTITY, "search").close()
    assert not path.exists()
