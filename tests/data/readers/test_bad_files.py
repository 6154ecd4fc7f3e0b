"""What is no file, and random edits of files: a message that names it, or counted; `tests/hostile` has the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmod.data.config import DataConfig
from mmod.data.corrupt import CorruptDataError
from mmod.data.loader import image_stream
from mmod.data.readers.images import decode_image
from tests.kit.bad_files import (
    PNG,
    SOUND,
    SPECIAL,
    tar,
    with_checksums,
)
from tests.kit.bad_readers import BESIDE, read_archive, read_folder

pytestmark = [pytest.mark.timeout(20), pytest.mark.usefixtures("trap_folder")]


@pytest.mark.parametrize("kind", SPECIAL)
def test_images_that_are_no_files(kind: str) -> None:
    for split in ("train", "val"):
        Path(split, "a").mkdir(parents=True)
        Path(split, "a", "1.png").write_bytes(PNG)
    SPECIAL[kind]("val/a/0.png")
    if kind == "folder":
        assert len(image_stream(DataConfig("folder", ".", channels=3)).reader) == 1
        return
    for workers in (0, 1):
        config = DataConfig("folder", ".", channels=3, workers=workers, on_corrupt="skip")
        stream = image_stream(config)
        assert sum(len(classes) for _, classes in stream.batches(0)) == 1
        assert list(stream.report.counts.values()) == [1]


def test_a_file_that_may_not_be_read_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, *_: Any) -> Any:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("mmod.data.readers.images.open", refuse, raising=False)
    with pytest.raises(CorruptDataError, match=r"val/a/0\.png: image cannot be read: .*Permission denied"):
        read_folder(PNG, "raise")


EDITS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1 << 20), st.binary(min_size=1, max_size=12)), max_size=4)


def edited(data: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
    """Overwrite, insert, cut and repeat at some places, headers of archives among them."""
    for kind, place, patch in edits:
        at = place % (len(data) + 1)
        header = at // 512 * 512 + (100, 124, 135, 156, 157)[place % 5]
        tail = data[at + len(patch) :] if kind == 0 else data[at:]
        versions = (data[:at] + patch + tail, data[:at] + patch + data[at:], data[:at], data[:at] + data[:at])
        data = versions[kind] if kind < 4 else data[:header] + patch + data[header + len(patch) :]
    return data


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(EDITS, st.booleans())
def test_edits_of_an_archive_cost_no_sample_before_them(edits: list[tuple[int, int, bytes]], sums: bool) -> None:
    for reader, (suffix, beside) in BESIDE.items():
        members = {f"{key}{end}": data for key in "012" for end, data in ((".png", PNG[:700]), (suffix, beside))}
        data = edited(tar(members), edits)
        assert read_archive(reader, with_checksums(data) if sums else data, "skip")[0] >= 1


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(SOUND)), EDITS)
def test_edited_images_are_read_or_refused(name: str, edits: list[tuple[int, int, bytes]]) -> None:
    data = edited(SOUND[name], edits)
    try:
        outcome = decode_image(data, "RGB").mode
    except ValueError as error:
        outcome = str(error)
    assert outcome == "RGB" or outcome.startswith(f"image of {len(data)} bytes cannot be decoded: ")
