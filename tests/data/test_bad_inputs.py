"""Bad inputs: each stops with one message that names the file, or is counted and left out where that is allowed.

Nothing in an input is run, nothing is waited for, and no error but those of the data's own kinds comes out.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmod.data.convert.conversations import ConvertConversationsConfig, convert_conversations
from mmod.data.convert.pairs import ConvertConfig, convert_pairs
from mmod.data.corrupt import CorruptDataError, CorruptReport
from mmod.data.loader import DataConfig, create_eval_stream, create_train_stream
from mmod.data.readers.conversations import ConversationsConfig, open_conversations
from mmod.data.readers.images import decode_image
from mmod.data.readers.pairs import PairsConfig, create_eval_pairs, create_train_pairs
from mmod.data.readers.shards import ShardSource
from mmod.data.synthetic.digits import LEVELS, build_digits
from tests.data.bad_files import (
    ARCHIVES,
    CAPTIONS,
    CLASSES,
    END,
    IMAGE_NAMES,
    IMAGES,
    NO_JSON,
    PNG,
    RECORDS,
    SAID,
    SOUND,
    Payload,
    body,
    incomplete,
    tar,
    with_checksums,
    zipped,
)

pytestmark = pytest.mark.timeout(20)
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, in which a payload that is run leaves a file."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not (tmp_path / "executed").exists()


def lengths(captions: list[str]) -> torch.Tensor:
    return torch.tensor([[len(caption)] for caption in captions])


def zeros(image: Any) -> torch.Tensor:
    return torch.zeros(3, 1, 1)


def read_folder(data: bytes, on_corrupt: Any) -> tuple[int, CorruptReport]:
    for label, image in (("a", data), ("b", PNG)):
        Path("val", label).mkdir(parents=True, exist_ok=True)
        Path("val", label, "0.png").write_bytes(image)
    stream = create_eval_stream(DataConfig("folder", ".", channels=3, on_corrupt=on_corrupt))
    return sum(len(classes) for _, classes in stream.batches(0)), stream.report


def read_shard(data: bytes, on_corrupt: Any) -> tuple[int, CorruptReport]:
    Path("val-0.tar").write_bytes(tar({"0.png": data, "0.cls": b"0", "1.png": PNG, "1.cls": b"1"}))
    stream = create_eval_stream(DataConfig("shards:{split}-0.tar", channels=3, on_corrupt=on_corrupt))
    return sum(len(classes) for _, classes in stream.batches(0)), stream.report


def read_exact(data: bytes, on_corrupt: Any) -> tuple[int, CorruptReport]:
    Path("0.tar").write_bytes(tar({"0.png": data, "0.txt": b"a", "1.png": PNG, "1.txt": b"bb"}))
    stream = create_eval_pairs(PairsConfig(val="0.tar", on_corrupt=on_corrupt), zeros, lengths)
    return sum(len(tokens) for _, tokens in stream.batches(0)), stream.report


def read_resampled(data: bytes, on_corrupt: Any) -> tuple[int, CorruptReport]:
    Path("0.tar").write_bytes(tar({"0.png": data, "0.txt": b"a", "1.png": PNG, "1.txt": b"bb"}))
    config = PairsConfig("0.tar", sampling="resampled", samples=4, batch_size=4, shuffle=1, on_corrupt=on_corrupt)
    stream = create_train_pairs(config, zeros, lengths, 0)
    return len(set(next(stream.batches(0))[1].flatten().tolist())), stream.report


READERS = {"folder": read_folder, "shard": read_shard, "exact pairs": read_exact, "resampled pairs": read_resampled}


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


def test_converters_drop_exactly_the_images_that_readers_count(folder: Path) -> None:
    files = {**IMAGES, **SOUND}
    for number, data in enumerate(files.values()):
        Path(f"{number}.png").write_bytes(data)
    Path("t.csv").write_text("image,caption\n" + "".join(f"{number}.png,a\n" for number in range(len(files))))
    expected = {"image cannot be decoded": len(IMAGES)}
    report = convert_pairs(ConvertConfig("t.csv", "pairs", max_aspect=1000), progress=False)
    assert (report.samples, report.dropped) == (len(SOUND), expected)
    records = [{"image": f"{number}.png", "conversations": SAID} for number in range(len(files))]
    Path("t.json").write_text(json.dumps(records))
    config = ConvertConversationsConfig("t.json", "talks", on_fault="drop", shards=True)
    checked = convert_conversations(config, progress=False)
    assert (checked.kept, checked.dropped) == (len(SOUND), expected)
    shards = open_conversations("talks/*.tar")
    assert [shards[index].images[0].mode for index in range(len(shards))] == ["RGB"] * len(SOUND)


BESIDE = {
    "shard": (".cls", b"7"),
    "exact pairs": (".txt", b"seven"),
    "resampled pairs": (".txt", b"seven"),
    "conversations": (".json", json.dumps({"image": "7.png", "conversations": SAID}).encode()),
}
INCOMPLETE = sorted(incomplete(".txt", b""))


def read_archive(reader: str, rest: bytes, on_corrupt: Any) -> tuple[int, CorruptReport]:
    """Write a good sample and what follows, and return how many are read."""
    suffix, beside = BESIDE[reader]
    Path("0.tar").write_bytes(body({"7.png": PNG, f"7{suffix}": beside}) + rest)
    if reader == "conversations":
        found = open_conversations("0.tar", ConversationsConfig(on_corrupt=on_corrupt))
        return len(found), found.report
    if reader == "shard":
        report = CorruptReport(on_corrupt)
        return len(ShardSource("0.tar", report)), report
    if reader == "exact pairs":
        stream = create_eval_pairs(PairsConfig(val="0.tar", on_corrupt=on_corrupt), zeros, lengths)
        return sum(len(tokens) for _, tokens in stream.batches(0)), stream.report
    config = PairsConfig("0.tar", sampling="resampled", samples=4, batch_size=4, shuffle=1, on_corrupt=on_corrupt)
    stream = create_train_pairs(config, zeros, lengths, 0)
    return len(set(next(stream.batches(0))[1].flatten().tolist())), stream.report


@pytest.mark.parametrize("name", ARCHIVES)
@pytest.mark.parametrize("reader", BESIDE)
def test_archives_that_lie(reader: str, name: str) -> None:
    with pytest.raises(CorruptDataError, match=r"^0\.tar( \[.*\])?: .*on_corrupt='skip'"):
        read_archive(reader, ARCHIVES[name], "raise")
    read, report = read_archive(reader, ARCHIVES[name], "skip")
    assert read == 1
    assert report.counts == {"0.tar": 1}


@pytest.mark.parametrize("name", INCOMPLETE)
@pytest.mark.parametrize("reader", BESIDE)
def test_samples_that_are_incomplete(reader: str, name: str) -> None:
    rest = incomplete(*BESIDE[reader])[name]
    with pytest.raises(CorruptDataError, match=r"^0\.tar \[8\]: .*on_corrupt='skip'"):
        read_archive(reader, rest, "raise")
    read, report = read_archive(reader, rest, "skip")
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
    monkeypatch.setattr("tests.data.test_bad_inputs.body", lambda members: b"")
    with pytest.raises(CorruptDataError, match=r"0\.tar"):
        read_archive(reader, data, "raise")
    with pytest.raises(ValueError, match=r"hold no complete sample|no conversation is left|gave no sample"):
        read_archive(reader, data, "skip")


@pytest.mark.parametrize(
    ("reader", "beside"),
    [
        *(("shard", data) for data in CLASSES.values()),
        *(("exact pairs", data) for data in CAPTIONS.values()),
        *(("resampled pairs", data) for data in CAPTIONS.values()),
        *(("conversations", data) for data in NO_JSON.values()),
        *(("conversations", json.dumps(record).encode()) for record in RECORDS.values()),
    ],
)
def test_what_stands_beside_an_image(reader: str, beside: bytes) -> None:
    suffix, _ = BESIDE[reader]
    rest = body({"8.png": PNG, f"8{suffix}": beside}) + END
    if reader == "shard":
        Path("val-0.tar").write_bytes(body({"7.png": PNG, "7.cls": b"7"}) + rest)
        stream = create_eval_stream(DataConfig("shards:{split}-0.tar", channels=3, on_corrupt="skip"))
        assert [classes.tolist() for _, classes in stream.batches(0)] == [[7]]
        assert list(stream.report.counts.values()) == [1]
        return
    with pytest.raises(CorruptDataError, match=r"^0\.tar \[8"):
        read_archive(reader, rest, "raise")
    read, report = read_archive(reader, rest, "skip")
    assert (read, report.counts) == (1, {"0.tar": 1})


@pytest.mark.parametrize("name", NO_JSON)
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_files_that_are_no_json(suffix: str, name: str) -> None:
    Path(f"t{suffix}").write_bytes(NO_JSON[name])
    config = ConvertConversationsConfig(f"t{suffix}", "out", on_fault="drop")
    if suffix == ".jsonl":
        # A line is a record, which may be left out; here that leaves none.
        found = json.dumps({"conversations": SAID, "image": "0.png"}).encode()
        Path("t.jsonl").write_bytes(found + b"\n" + NO_JSON[name].replace(b"\n", b" "))
        Path("0.png").write_bytes(PNG)
        if name == "nothing":
            assert len(open_conversations("t.jsonl")) == 1
            return
        with pytest.raises(CorruptDataError, match=r"^t\.jsonl \[1\]: line 2 is no JSON"):
            open_conversations("t.jsonl")
        assert convert_conversations(config, progress=False).dropped == {"unsound record": 1}
        return
    for read in (lambda: open_conversations("t.json"), lambda: convert_conversations(config, progress=False)):
        with pytest.raises(ValueError, match=r"^t\.json is no JSON: "):
            read()
    with pytest.raises(ValueError, match=r"'t\.json' is no JSON: "):
        convert_pairs(ConvertConfig("t.json", "out"), progress=False)


@pytest.mark.parametrize("name", [*RECORDS, *IMAGE_NAMES])
def test_records_of_wrong_types(name: str) -> None:
    Path("0.png").write_bytes(PNG)
    sound = {"image": "0.png", "conversations": SAID}
    Path("t.json").write_text(json.dumps([sound, {**RECORDS, **IMAGE_NAMES}[name]]))
    with pytest.raises(CorruptDataError, match=r"^t\.json \[1\]: \S"):
        open_conversations("t.json")
    found = open_conversations("t.json", ConversationsConfig(on_corrupt="skip"))
    assert (len(found), found.report.counts) == (1, {"t.json": 1})
    config = ConvertConversationsConfig("t.json", "out", on_fault="drop")
    assert convert_conversations(config, progress=False).dropped == {"unsound record": 1}


COCO: dict[str, Any] = {
    "a list": [],
    "no images": {"annotations": []},
    "images that are null": {"images": None, "annotations": []},
    "annotations that are a dict": {"images": [], "annotations": {}},
    "an image that is a number": {"images": [1], "annotations": []},
    "an image without a file": {"images": [{"id": 1}], "annotations": []},
    "an id that is a list": {"images": [{"id": [], "file_name": "0.png"}], "annotations": []},
    "one id twice": {"images": [{"id": 1, "file_name": f"{n}.png"} for n in range(2)], "annotations": []},
    "no annotation": {"images": [], "annotations": []},
}
TABLES: dict[str, bytes] = {
    "empty.csv": b"",
    "header.csv": b"image,caption\n",
    "columns.csv": b"file,text\n0.png,a\n",
    "twice.csv": b"image,caption,caption\n0.png,a,b\n",
    "long.csv": b"image,caption\n0.png," + b"a" * 200_000 + b"\n",
    "tabs.csv": b"image\tcaption\n0.png\ta\n",
    "wide.csv": "image,caption\n0.png,a\n".encode("utf-16"),
    "empty.parquet": b"",
    "text.parquet": b"image,caption\n",
    "cut.parquet": b"PAR1" + bytes(100),
    "pickle.parquet": pickle.dumps(Payload()),
    **{f"{name}.json": json.dumps(content).encode() for name, content in COCO.items()},
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_that_are_none(name: str) -> None:
    Path(name).write_bytes(TABLES[name])
    with pytest.raises(ValueError, match=rf"^'{re.escape(name)}'.* \S") as caught:
        convert_pairs(ConvertConfig(name, "out"), progress=False)
    assert "\n" not in str(caught.value)
    assert not Path("out").exists()


def test_rows_of_wrong_types_are_dropped_with_their_reason() -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    Path("0.png").write_bytes(PNG)
    rows = b"0.png,a\n0.png\n,a\n0.png,\n0.png,\xe9\n0\0.png,a\n0.png,a, b\n0.png,c,\n"
    Path("t.csv").write_bytes(b"image,caption\n" + rows)
    report = convert_pairs(ConvertConfig("t.csv", "csv"), progress=False)
    assert report.samples == 2
    singles = ("no image", "caption is not UTF-8", "image cannot be read", "unsound row")
    assert report.dropped == {"no caption": 2, **dict.fromkeys(singles, 1)}
    annotations = [
        {"image_id": 1, "caption": "a"},
        None,
        {"image_id": [1]},
        {"image_id": 2},
        {"image_id": 1, "caption": 3},
    ]
    Path("t.json").write_text(json.dumps({"images": [{"id": 1, "file_name": "0.png"}], "annotations": annotations}))
    report = convert_pairs(ConvertConfig("t.json", "coco"), progress=False)
    assert (report.samples, report.dropped) == (1, {"unsound row": 2, "no caption": 2})
    columns = {"paths": ["0.png", "../0.png", "", None], "bytes": [PNG, PNG[:99], b"", None], "numbers": [1, 2, 3, 4]}
    for name, images in columns.items():
        for captions, kept in ((["a"] * 4, name != "numbers"), ([1, 2, 3, 4], False), ([["a"]] * 4, False)):
            pq.write_table(pa.table({"image": images, "caption": captions}), "t.parquet")
            output = f"{name}-{type(captions[0]).__name__}"
            report = convert_pairs(ConvertConfig("t.parquet", output), progress=False)
            assert (report.samples, sum(report.dropped.values())) == (int(kept), 4 - int(kept))


SPECIAL = {
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "device": lambda path: os.symlink("/dev/zero", path),
    "dangling link": lambda path: os.symlink("nowhere", path),
    "link to itself": lambda path: os.symlink(path, path),
}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("suffix", ["tar", "json", "jsonl", "csv", "parquet"])
def test_sources_that_are_no_files(kind: str, suffix: str) -> None:
    path = f"t.{suffix}"
    SPECIAL[kind](path)
    reads = []
    if suffix == "tar":
        resampled = PairsConfig(path, sampling="resampled", samples=1, batch_size=1)
        reads += [lambda: ShardSource(path, CorruptReport()), lambda: create_train_pairs(resampled, zeros, lengths, 0)]
    if suffix in ("tar", "json", "jsonl"):
        reads.append(lambda: open_conversations(path, ConversationsConfig(on_corrupt="skip")))
    if suffix in ("json", "jsonl"):
        reads.append(lambda: convert_conversations(ConvertConversationsConfig(path, "out"), progress=False))
    if suffix in ("csv", "parquet", "json"):
        reads.append(lambda: convert_pairs(ConvertConfig(path, "out"), progress=False))
    for read in reads:
        with pytest.raises((ValueError, OSError), match=rf"t\.{suffix}"):
            read()


@pytest.mark.parametrize("kind", SPECIAL)
def test_images_that_are_no_files(kind: str) -> None:
    for split in ("train", "val"):
        Path(split, "a").mkdir(parents=True)
        Path(split, "a", "1.png").write_bytes(PNG)
    SPECIAL[kind]("val/a/0.png")
    if kind == "folder":
        assert len(create_eval_stream(DataConfig("folder", ".", channels=3)).reader) == 1
        return
    for workers in (0, 1):
        config = DataConfig("folder", ".", channels=3, workers=workers, on_corrupt="skip")
        stream = create_eval_stream(config)
        assert sum(len(classes) for _, classes in stream.batches(0)) == 1
        assert list(stream.report.counts.values()) == [1]


def test_a_file_that_may_not_be_read_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, *_: Any) -> Any:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("mmod.data.readers.image_files.open", refuse, raising=False)
    with pytest.raises(CorruptDataError, match=r"val/a/0\.png: image cannot be read: .*Permission denied"):
        read_folder(PNG, "raise")


@pytest.mark.parametrize("folders", [[], ["train"], ["train/a", "train/b"], ["val"]])
def test_folders_without_images(folders: list[str]) -> None:
    for name in folders:
        Path(name).mkdir(parents=True)
    with pytest.raises(ValueError, match=r"no folder for the split 'train'; it has: |Found 0 images in subfolders"):
        create_train_stream(DataConfig("folder", ".", channels=3), 0)
    with pytest.raises(ValueError, match="no shard matches"):
        create_train_stream(DataConfig("shards:{split}/*.tar", channels=3), 0)


@pytest.mark.parametrize(
    ("script", "source", "content"),
    [
        ("convert_pairs", "t.csv", b"file,text\n"),
        ("convert_pairs", "t.json", b"[" * 200_000),
        ("convert_pairs", "t.parquet", b""),
        ("convert_pairs", "t.csv", None),
        ("convert_conversations", "t.json", b"{"),
        ("convert_conversations", "t.jsonl", b"{\n"),
        ("convert_conversations", "t.json", b'[{"image": "../0.png"}]'),
        ("convert_conversations", "t.json", None),
    ],
)
def test_command_lines_end_with_one_message(script: str, source: str, content: bytes | None) -> None:
    if content is not None:
        Path(source).write_bytes(content)
    main = runpy.run_path(str(ROOT / "datasets" / f"{script}.py"))["main"]
    with pytest.raises(SystemExit, match=rf"(?s)^error: .*(t\.{source[2:]}|dropped\.csv)"):
        main([source, "out"])


@pytest.mark.parametrize("name", ["out/00000_stats.json", "out/conversion.json", "digits/manifest.json"])
def test_broken_notes_of_conversions_and_builds_are_named(name: str) -> None:
    Path("0.png").write_bytes(PNG)
    Path("t.csv").write_text("image,caption\n0.png,a\n")

    def again() -> None:
        if name.startswith("digits"):
            build_digits("digits", LEVELS["tiny"])
        else:
            convert_pairs(ConvertConfig("t.csv", "out"), progress=False)

    again()
    for data in (b"", b"{", b"[]", b"null", b"[" * 200_000):
        Path(name).write_bytes(data)
        with pytest.raises(ValueError, match=rf"^{name} (is no JSON|holds no JSON object|is no manifest)"):
            again()


EDITS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1 << 20), st.binary(min_size=1, max_size=12)), max_size=4)


def edited(data: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
    """Overwrite, insert, cut and repeat at some places, headers of archives among them."""
    for kind, place, patch in edits:
        at = place % (len(data) + 1)
        header = at // 512 * 512 + (100, 124, 135, 156, 157)[place % 5]
        rest = data[at + len(patch) :] if kind == 0 else data[at:]
        versions = (data[:at] + patch + rest, data[:at] + patch + data[at:], data[:at], data[:at] + data[:at])
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
