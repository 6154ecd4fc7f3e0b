"""Converters and readers agree on what is bad, and what is no file or a broken note is named; see `tests/hostile`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mmod.data import commands
from mmod.data.convert.conversations import ConversationsConversion, convert_conversations
from mmod.data.convert.pairs import PairsConversion, convert_pairs
from mmod.data.corrupt import CorruptDataError, CorruptReport, Fault
from mmod.data.readers.conversations import ConversationsConfig, open_conversations
from mmod.data.readers.shards import ShardSource
from mmod.data.synthetic.digits import DIGITS
from tests.kit.bad_files import IMAGE_NAMES, IMAGES, LINES, NO_JSON_LINES, PNG, RECORDS, SAID, SOUND, SPECIAL

pytestmark = [pytest.mark.timeout(20), pytest.mark.usefixtures("trap_folder")]


def test_converters_drop_exactly_the_images_that_readers_count() -> None:
    files = {**IMAGES, **SOUND}
    for number, data in enumerate(files.values()):
        Path(f"{number}.png").write_bytes(data)
    Path("t.csv").write_text("image,caption\n" + "".join(f"{number}.png,a\n" for number in range(len(files))))
    expected = {"image cannot be decoded": len(IMAGES)}
    report = convert_pairs(PairsConversion("t.csv", "pairs", on_corrupt="skip"), progress=False)
    assert (report["samples"], report["dropped"]) == (len(SOUND), expected)
    records = [{"image": f"{number}.png", "conversations": SAID} for number in range(len(files))]
    Path("t.json").write_text(json.dumps(records))
    config = ConversationsConversion("t.json", "talks", on_corrupt="skip", shards=True)
    checked = convert_conversations(config, progress=False)
    assert (checked["samples"], checked["dropped"]) == (len(SOUND), expected)
    shards = open_conversations("talks/*.tar")
    assert [shards[index].images[0].mode for index in range(len(shards))] == ["RGB"] * len(SOUND)


def test_conversion_drops_exactly_the_records_that_readers_count() -> None:
    Path("0.png").write_bytes(PNG)
    sound = json.dumps({"image": "0.png", "conversations": SAID}).encode()
    records = [json.dumps(record).encode() for record in (RECORDS | IMAGE_NAMES).values()]
    lines = [*records, *LINES.values(), *NO_JSON_LINES.values()]
    Path("t.jsonl").write_bytes(b"\n".join([sound, *lines, sound]))
    conversations = open_conversations("t.jsonl", ConversationsConfig(on_corrupt="skip"))
    assert (len(conversations), conversations.report.counts) == (2, {"t.jsonl": len(lines)})
    report = convert_conversations(ConversationsConversion("t.jsonl", "out", on_corrupt="skip"), progress=False)
    # A path that no system takes is an image that cannot be read.
    assert (report["samples"], sum(report["dropped"].values())) == (2, len(lines))
    written = Path("out/dropped.csv").read_text()
    assert "line 2" in written
    assert len(written) < 6000 * len(lines)


def test_a_command_names_its_own_option_and_the_first_item() -> None:
    Path("0.png").write_bytes(PNG)
    Path("t.json").write_text(json.dumps([{"image": f"{name}.png", "conversations": SAID} for name in range(3)]))
    told = r"the first, counted from 0, is item 1, image not found: .* lists them; --on_corrupt skip, in Python"
    with pytest.raises(SystemExit, match=told):
        commands.main(["conversations", "t.json", "out"])


def test_rows_of_wrong_types_are_dropped_with_their_reason() -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    Path("0.png").write_bytes(PNG)
    rows = b"0.png,a\n0.png\n,a\n0.png,\n0.png,\xe9\n0\0.png,a\n0.png,a, b\n0.png,c,\n"
    Path("t.csv").write_bytes(b"image,caption\n" + rows)
    report = convert_pairs(PairsConversion("t.csv", "csv", on_corrupt="skip"), progress=False)
    assert report["samples"] == 2
    singles = ("no image", "caption is not UTF-8", "image cannot be read", "invalid row")
    assert report["dropped"] == {"no caption": 2, **dict.fromkeys(singles, 1)}
    annotations = [
        {"image_id": 1, "caption": "a"},
        None,
        {"image_id": [1]},
        {"image_id": 2},
        {"image_id": 1, "caption": 3},
    ]
    Path("t.json").write_text(json.dumps({"images": [{"id": 1, "file_name": "0.png"}], "annotations": annotations}))
    report = convert_pairs(PairsConversion("t.json", "coco", on_corrupt="skip"), progress=False)
    assert (report["samples"], report["dropped"]) == (1, {"invalid row": 2, "no caption": 2})
    columns = {"paths": ["0.png", "../0.png", "", None], "bytes": [PNG, PNG[:99], b"", None], "numbers": [1, 2, 3, 4]}
    for name, images in columns.items():
        for captions, kept in ((["a"] * 4, name != "numbers"), ([1, 2, 3, 4], False), ([["a"]] * 4, False)):
            pq.write_table(pa.table({"image": images, "caption": captions}), "t.parquet")
            output = f"{name}-{type(captions[0]).__name__}"
            report = convert_pairs(PairsConversion("t.parquet", output, on_corrupt="skip"), progress=False)
            assert (report["samples"], sum(report["dropped"].values())) == (int(kept), 4 - int(kept))


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("suffix", ["tar", "json", "jsonl", "csv", "parquet"])
def test_sources_that_are_no_files(kind: str, suffix: str) -> None:
    path = f"t.{suffix}"
    SPECIAL[kind](path)
    reads = []
    if suffix == "tar":
        reads.append(lambda: ShardSource(path, CorruptReport()))
    if suffix in ("tar", "json", "jsonl"):
        reads.append(lambda: open_conversations(path, ConversationsConfig(on_corrupt="skip")))
    if suffix in ("json", "jsonl"):
        reads.append(lambda: convert_conversations(ConversationsConversion(path, "out"), progress=False))
    if suffix in ("csv", "parquet", "json"):
        reads.append(lambda: convert_pairs(PairsConversion(path, "out"), progress=False))
    for read in reads:
        with pytest.raises((ValueError, OSError), match=rf"t\.{suffix}"):
            read()


@pytest.mark.parametrize(
    ("conversion", "source", "content"),
    [
        ("pairs", "t.csv", b"file,text\n"),
        ("pairs", "t.json", b"[" * 200_000),
        ("pairs", "t.parquet", b""),
        ("pairs", "t.csv", None),
        ("conversations", "t.json", b"{"),
        ("conversations", "t.jsonl", b"{\n"),
        ("conversations", "t.json", b'[{"image": "../0.png"}]'),
        ("conversations", "t.json", None),
    ],
)
def test_command_lines_end_with_one_message(conversion: str, source: str, content: bytes | None) -> None:
    if content is not None:
        Path(source).write_bytes(content)
    with pytest.raises(SystemExit, match=rf"(?s)^error: .*(t\.{source[2:]}|dropped\.csv)"):
        commands.main([conversion, source, "out"])


@pytest.mark.parametrize("name", ["out/00000_stats.json", "out/conversion.json", "digits/manifest.json"])
def test_broken_notes_of_conversions_and_builds_are_named(name: str) -> None:
    Path("0.png").write_bytes(PNG)
    Path("t.csv").write_text("image,caption\n0.png,a\n")

    def again() -> None:
        if name.startswith("digits"):
            DIGITS.build("digits", "tiny")
        else:
            convert_pairs(PairsConversion("t.csv", "out", on_corrupt="skip"), progress=False)

    again()
    for data in (b"", b"{", b"[]", b"null", b"[" * 200_000):
        Path(name).write_bytes(data)
        with pytest.raises(ValueError, match=rf"^{name} (is no JSON|holds no JSON object|is no manifest)"):
            again()


@pytest.mark.parametrize("reasons", [[0], [0, 1, 0], [2, 2, 2, 2, 2, 2, 1, 2, 0], [3, 0, 3, 3, 1, 3, 2, 3]], ids=str)
def test_faults_of_other_reasons_are_told_before_more_of_one(reasons: list[int]) -> None:
    faults = [Fault("a.json", str(place), f"reason {reason}") for place, reason in enumerate(reasons)]
    with pytest.raises(CorruptDataError) as told:
        CorruptReport().add(faults)
    named = [int(reason) for reason in re.findall(r"reason (\d)", str(told.value))]
    firsts = list(dict.fromkeys(reasons))
    assert named[: len(firsts)] == firsts
    assert len(named) == min(len(faults), 5)
