"""Texts of users: every reader takes a byte order mark and any line ends, and refuses other encodings by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import open_clip
import pytest

from mmod import RoutingConfig
from mmod.data.convert.pairs import PairsConversion, read_rows
from mmod.data.labels import read_classes
from mmod.data.loader import read_corpus
from mmod.data.readers.shards import parse_caption, parse_class
from mmod.data.records import check_record, read_records
from mmod.io.yaml import read_yaml
from mmod.opening.open_clip import add_model_configs

RECORD = {"conversations": [{"from": "human", "value": "Größe ?"}, {"from": "gpt", "value": " é "}]}
COCO = {"images": [{"id": 1, "file_name": "é.png"}], "annotations": [{"image_id": 1, "caption": " Größe "}]}
CLIP = {"embed_dim": 8, "vision_cfg": {}, "text_cfg": {"hf_model_name": "é"}}


class Reader(NamedTuple):
    """A reader, a file that it reads, and whether a row that cannot be read is a fault of its own."""

    name: str
    text: str
    read: Callable[[Path], Any]
    by_rows: bool = False


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1)


def table(path: Path) -> list[Any]:
    return list(read_rows(PairsConversion(str(path), "out")))


def records(path: Path) -> list[Any]:
    return [record if isinstance(record, ValueError) else check_record(record) for record in read_records(path)]


def corpus(path: Path) -> bytes:
    """Return the document of all splits."""
    for split in ("train", "val", "test"):
        try:
            return read_corpus(str(path), split).tobytes()
        except ValueError as error:
            if "none is in the split" not in str(error):
                raise
    raise AssertionError("no split has the document")


def clip_config(path: Path) -> Any:
    add_model_configs(path)
    return open_clip.factory._MODEL_CONFIGS.pop(path.stem)


def refused_field(path: Path) -> str:
    """Return the refusal of a field of a routing, which follows reading."""
    with pytest.raises(ValueError, match=r"UTF-8|note") as error:
        RoutingConfig.load(path)
    if "UTF-8" in str(error.value):
        raise error.value
    return str(error.value).replace(str(path), "")


READERS = [
    Reader("names.txt", "Größe\n cat\t\ndog\n\n", read_classes),
    Reader("names.json", dumps(["Größe", "cat"]), read_classes),
    Reader("a.csv", 'image,caption\né.png,"two\nlines"\nb.png, c \n', table, by_rows=True),
    Reader("a.tsv", "image\tcaption\né.png\tGröße\n", table, by_rows=True),
    Reader("coco.json", dumps(COCO), table),
    Reader("chat.json", dumps([RECORD]), records),
    Reader("chat.jsonl", f"{json.dumps(RECORD, ensure_ascii=False)}\n\n{json.dumps(RECORD)}\n", records, by_rows=True),
    Reader("config.yaml", "output: Größe\nmodel:\n  name: é\n", read_yaml),
    Reader("routing.json", '{"router": "linear",\n"note": "é"}', refused_field),
    Reader("clip.json", dumps(CLIP), clip_config),
]


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_a_mark_and_any_line_ends_change_nothing(reader: Reader, tmp_path: Path) -> None:
    def read(encoding: str, end: str) -> Any:
        place = tmp_path / f"{encoding}{len(end)}{'n' in repr(end)}"
        place.mkdir()
        (place / reader.name).write_bytes(reader.text.replace("\n", end).encode(encoding))
        return reader.read(place / reader.name)

    expected = read("utf-8", "\n")
    assert expected
    for encoding in ("utf-8", "utf-8-sig"):
        for end in ("\r\n", "\r"):
            value = read(encoding, end)
            if reader.name == "a.csv":
                # A caption keeps the line ends inside it.
                assert value[0].caption == f"two{end}lines"
                value[0] = expected[0]
            assert value == expected, (encoding, end)


ENCODINGS = ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1")
# ASCII is the same in Latin-1.
OTHERS = [pair for pair in product(READERS, ENCODINGS) if not (pair[0].text.isascii() and pair[1] == "latin-1")]


@pytest.mark.parametrize(("reader", "encoding"), OTHERS, ids=lambda value: getattr(value, "name", value))
def test_another_encoding_is_refused_by_name(reader: Reader, encoding: str, tmp_path: Path) -> None:
    path = tmp_path / reader.name
    path.write_bytes(reader.text.encode(encoding))
    if reader.by_rows and encoding == "latin-1":
        # The rows that hold such a letter are faults.
        assert any(isinstance(row, ValueError) or "\\udc" in ascii(row) for row in reader.read(path))
        return
    known = "" if encoding == "latin-1" else f" but in {encoding[:6].upper()}: save it as UTF-8"
    with pytest.raises(ValueError, match=rf"is no text in UTF-8{known}") as error:
        reader.read(path)
    assert path.stem in str(error.value)
    assert "save it as UTF-8" in str(error.value)


def test_members_of_shards_are_texts_too() -> None:
    for mark in ("", "\ufeff"):
        for caption in ("two cats", " two\r\ncats\n"):
            assert parse_caption(f"{mark}{caption}".encode()) == caption
        assert parse_class(f"{mark}7\r\n".encode()) == 7
    for encoding in ("utf-16", "utf-32", "latin-1"):
        with pytest.raises(ValueError, match=r"the \.txt member is no text in UTF-8.*save it as UTF-8"):
            parse_caption("Größe".encode(encoding))
    with pytest.raises(ValueError, match=r"the \.cls member is no text in UTF-8 but in UTF-16"):
        parse_class("7".encode("utf-16"))


def test_a_document_is_its_bytes_without_the_mark(tmp_path: Path) -> None:
    for encoding in ("utf-8", "utf-8-sig", "latin-1"):
        path = tmp_path / f"{encoding}.txt"
        path.write_bytes("Größe\r\n".encode(encoding))
        plain = encoding.removesuffix("-sig")
        assert corpus(path) == "Größe\r\n".encode(plain) + b"\0"
    path.write_bytes("Größe".encode("utf-16"))
    with pytest.raises(ValueError, match=r"latin-1\.txt is no text in UTF-8 but in UTF-16"):
        read_corpus(f"{path.parent}/lat*.txt", "train")
