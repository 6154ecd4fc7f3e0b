"""Files that are no images or shards: each stops with a message that names it, or is counted and left out.

Nothing in a file is run, nothing is waited for, and no error but those of the data's own kinds comes out.
"""

from __future__ import annotations

import json
import pickle
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
    ARCHIVES,
    CAPTIONS,
    CLASSES,
    END,
    IMAGES,
    NO_JSON,
    PNG,
    RECORDS,
    SOUND,
    SPECIAL,
    Payload,
    body,
    incomplete,
    tar,
    with_checksums,
    zipped,
)
from tests.kit.bad_readers import BESIDE, READERS, read_archive, read_folder

pytestmark = [pytest.mark.timeout(20), pytest.mark.usefixtures("trap_folder")]


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("reader", READERS)
def test_images_that_are_none(reader: str, name: str) -> None:
    file = r"val/a/0\.png" if reader == "folder" else r"0\.tar \[0"
    with pytest.raises(CorruptDataError, match=rf"{file}.*: image of {len(IMAGES[name])} bytes cannot be decoded: \S"):
        READERS[reader](IMAGES[name], "raise")
    read, report = READERS[reader](IMAGES[name], "skip")
    assert read == 1
    assert list(report.counts.values()) == [1]


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize("reader", READERS)
def test_unusual_images_that_are_sound(reader: str, name: str) -> None:
    assert READERS[reader](SOUND[name], "raise")[0] == 2


INCOMPLETE = sorted(incomplete(".txt", b""))


@pytest.mark.parametrize("name", ARCHIVES)
@pytest.mark.parametrize("reader", BESIDE)
def test_archives_that_lie(reader: str, name: str) -> None:
    with pytest.raises(CorruptDataError, match=r"^0\.tar( \[.*\])?: .*on_corrupt='skip'"):
        read_archive(reader, ARCHIVES[name], "raise")
    read, report = read_archive(reader, ARCHIVES[name], "skip")
    assert read == 1
    assert report.counts == {"0.tar": 1}


@pytest.mark.parametrize("reader", BESIDE)
def test_a_key_that_comes_again_is_counted_once(reader: str) -> None:
    suffix, beside = BESIDE[reader]
    appended = b"".join(body({f"{key}.png": PNG, f"{key}{suffix}": beside}) for key in "878") + END
    with pytest.raises(CorruptDataError, match=r"^0\.tar \[7\]: an earlier sample of the shard has the same key"):
        read_archive(reader, appended, "raise")
    read, report = read_archive(reader, appended, "skip")
    assert (read, [fault.sample for fault in report.faults]) == (2, ["7", "8"])


@pytest.mark.parametrize("name", ["../../8", "/tmp/8", "a/../8", "./8", "\\\\8"])
@pytest.mark.parametrize("reader", BESIDE)
def test_names_that_lead_out_of_a_folder_are_keys_alone(reader: str, name: str) -> None:
    suffix, beside = BESIDE[reader]
    before = sorted(Path("..").iterdir())
    read, _ = read_archive(reader, body({f"{name}.png": PNG, f"{name}{suffix}": beside}) + END, "raise")
    assert read == 2
    # The index of a shard of images, and the lock of those who write it, stay beside it.
    kept = [] if reader == "conversations" else [f".0.tar{suffix}.index", ".shards.lock"]
    assert sorted(path.name for path in Path().iterdir()) == [*kept, "0.tar"]
    assert sorted(Path("..").iterdir()) == before


@pytest.mark.parametrize("name", INCOMPLETE)
@pytest.mark.parametrize("reader", BESIDE)
def test_samples_that_are_incomplete(reader: str, name: str) -> None:
    appended = incomplete(*BESIDE[reader])[name]
    with pytest.raises(CorruptDataError, match=r"^0\.tar \[8\]: .*on_corrupt='skip'"):
        read_archive(reader, appended, "raise")
    read, report = read_archive(reader, appended, "skip")
    assert read == 1
    assert report.counts == {"0.tar": 1}


@pytest.mark.parametrize(
    "data",
    [b"", bytes(10240), b"text" * 5000, zipped(PNG), pickle.dumps(Payload()), tar({"a": b""}), tar({"a.pkl": b""})],
)
@pytest.mark.parametrize("reader", BESIDE)
def test_files_that_are_no_shards(reader: str, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    suffix, _ = BESIDE[reader]
    monkeypatch.setitem(BESIDE, reader, (suffix, b""))
    monkeypatch.setattr("tests.kit.bad_readers.body", lambda members: b"")
    with pytest.raises(CorruptDataError, match=r"0\.tar"):
        read_archive(reader, data, "raise")
    with pytest.raises(ValueError, match=r"hold no complete sample|no conversation is left"):
        read_archive(reader, data, "skip")


@pytest.mark.parametrize(
    ("reader", "beside"),
    [
        *(("shard", data) for data in CLASSES.values()),
        *(("pairs", data) for data in CAPTIONS.values()),
        *(("conversations", data) for data in NO_JSON.values()),
        *(("conversations", json.dumps(record).encode()) for record in RECORDS.values()),
    ],
)
def test_what_stands_beside_an_image(reader: str, beside: bytes) -> None:
    suffix, _ = BESIDE[reader]
    appended = body({"8.png": PNG, f"8{suffix}": beside}) + END
    if reader == "shard":
        Path("val-0.tar").write_bytes(body({"7.png": PNG, "7.cls": b"7"}) + appended)
        stream = image_stream(DataConfig("shards:{split}-0.tar", channels=3, on_corrupt="skip"))
        assert [classes.tolist() for _, classes in stream.batches(0)] == [[7]]
        assert list(stream.report.counts.values()) == [1]
        return
    with pytest.raises(CorruptDataError, match=r"^0\.tar \[8"):
        read_archive(reader, appended, "raise")
    read, report = read_archive(reader, appended, "skip")
    assert (read, report.counts) == (1, {"0.tar": 1})


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


@pytest.mark.parametrize("folders", [[], ["train"], ["train/a", "train/b"], ["val"]])
def test_folders_without_images(folders: list[str]) -> None:
    for name in folders:
        Path(name).mkdir(parents=True)
    with pytest.raises(ValueError, match=r"no folder for the split 'train'; it has: |holds no image that is read"):
        image_stream(DataConfig("folder", ".", channels=3), 0)
    with pytest.raises(ValueError, match="no shard matches"):
        image_stream(DataConfig("shards:{split}/*.tar", channels=3), 0)


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
