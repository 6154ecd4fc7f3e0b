"""Hostile images, shards, captions, classes and conversations."""

from __future__ import annotations

import functools
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmod.data.config import DataConfig
from mmod.data.corrupt import CorruptReport
from mmod.data.loader import image_stream
from mmod.data.readers.conversations import ConversationsConfig, open_conversations
from tests.hostile import Case
from tests.kit import bad_readers as files
from tests.kit.bad_files import (
    ARCHIVES,
    CAPTIONS,
    CLASSES,
    END,
    IMAGE_NAMES,
    IMAGES,
    JPEG,
    LINES,
    NO_JSON,
    NO_JSON_LINES,
    NO_SHARDS,
    PNG,
    RECORDS,
    SAID,
    SOUND,
    body,
    encode,
    incomplete,
    png,
)


def image_cases() -> Iterator[Case]:
    exif = Image.Exif()
    exif[0x0112] = 6
    frames = [Image.new("RGB", (8, 8), (value, 0, 0)) for value in (0, 128, 255)]
    deep = io.BytesIO()
    Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000).save(deep, format="PNG")
    sound = {
        **SOUND,
        "EXIF that rotates": encode("JPEG", exif=exif.tobytes()),
        "EXIF of noise": encode("JPEG", exif=b"Exif\0\0" + bytes(range(256)) * 8),
        "an animated GIF": _animated("GIF", frames),
        "an animated WebP": _animated("WEBP", frames),
        "an animated PNG": _animated("PNG", frames),
        "several pages": _animated("TIFF", frames),
        "16 bits": deep.getvalue(),
        "a colour profile of noise": encode("PNG", icc_profile=bytes(range(256)) * 16),
        "1 x 4,000 pixels": _flat(1, 4000),
        "4,000 x 4,000 pixels of one colour": _flat(4000, 4000),
    }
    bombs = {
        "bomb of 20,000 x 20,000 pixels": png(20_000, 20_000, colour=0, pixels=bytes(20_000 * 20_001)),
        "bomb of 200,000 x 2,000 pixels": png(200_000, 2_000, colour=0, pixels=bytes(1000)),
        "webp bomb": encode("WEBP").replace(b"VP8 ", b"VP8X"),
        "jpeg whose tables are noise": JPEG[:20] + bytes(range(200)) + JPEG[220:],
        "png whose rows are cut": png(64, 64, pixels=bytes(100)),
    }
    for reader, read in files.READERS.items():
        file = r"val/a/0\.png" if "folder" in reader else r"0\.tar \[0"
        count = functools.partial(_count, read)
        for name, data in {**IMAGES, **bombs}.items():
            says = rf"{file}.*: image of {len(data)} bytes cannot be decoded: \S"
            yield Case("images", f"{reader}: {name}", "counted", functools.partial(count, data), says)
        for name, data in sound.items():
            yield Case("images", f"{reader}: {name}", "read", functools.partial(count, data), sound=2)


def _count(read: Callable[[bytes, Any], Any], data: bytes, on_corrupt: Any) -> tuple[int, CorruptReport]:
    images, report = read(data, on_corrupt)
    return len(images), report


def _animated(kind: str, frames: list[Image.Image]) -> bytes:
    file = io.BytesIO()
    frames[0].save(file, format=kind, save_all=True, append_images=frames[1:])
    return file.getvalue()


def _flat(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (width, height)).save(file, format="PNG")
    return file.getvalue()


def shard_cases() -> Iterator[Case]:
    for reader, (suffix, beside) in files.BESIDE.items():
        for name, data in ARCHIVES.items():
            read = functools.partial(files.read_archive, reader, data)
            yield Case("shards", f"{reader}: {name}", "counted", read, r"^0\.tar( \[.*\])?: ")
        for name, data in incomplete(suffix, beside).items():
            read = functools.partial(files.read_archive, reader, data)
            yield Case("shards", f"{reader}: {name}", "counted", read, r"^0\.tar \[8\]: ")
        for name, data in NO_SHARDS.items():
            read = functools.partial(files.read_shards, reader, data)
            yield Case("shards", f"{reader}: {name}", "refused", read, r"0\.tar")
            says = "hold no complete sample|no conversation is left"
            yield Case("shards", f"{reader}: {name}, skipped", "refused", functools.partial(_skip, read), says)
        for name in ("../../8", "/tmp/8", "a/../8", "./8", "\\\\8", "/etc/cron.d/8", "~/8", "a" * 90 + "/8", "C:8"):
            data = body({f"{name}.png": PNG, f"{name}{suffix}": beside}) + END
            read = functools.partial(files.read_archive, reader, data)
            yield Case("shards", f"{reader}: a member called {name[:20]}", "read", read, sound=2)
        again = b"".join(body({f"{key}.png": PNG, f"{key}{suffix}": beside}) for key in "87") + END
        read = functools.partial(files.read_archive, reader, again)
        says = r"^0\.tar \[7\]: an earlier sample of the shard has the same key"
        yield Case("shards", f"{reader}: a key that comes again", "counted", read, says, sound=2)


def _skip(read: Callable[[Any], Any], _: Any) -> Any:
    return read("skip")


def label_cases() -> Iterator[Case]:
    long = "words " * (10**7 // 6)
    for reader, texts in (("shard", CLASSES), ("pairs", CAPTIONS)):
        suffix, _ = files.BESIDE[reader]
        for name, data in texts.items():
            read = functools.partial(_read_label, reader, body({"8.png": PNG, f"8{suffix}": data}) + END)
            yield Case("captions and classes", f"{reader}: {name}", "counted", read, r"^0\.tar \[8")
    caption = functools.partial(files.read_archive, "pairs", body({"8.png": PNG, "8.txt": long.encode()}) + END)
    yield Case("captions and classes", "pairs: a caption of 10 MB", "read", caption, sound=2)
    broken = functools.partial(
        files.read_archive, "pairs", body({"8.png": PNG, "8.txt": long.encode() + b"\xff"}) + END
    )
    yield Case("captions and classes", "pairs: 10 MB that end in broken UTF-8", "counted", broken, r"^0\.tar \[8")


def _read_label(reader: str, appended: bytes, on_corrupt: Any) -> tuple[int, CorruptReport]:
    if reader == "pairs":
        return files.read_archive(reader, appended, on_corrupt)
    Path("0.tar").write_bytes(body({"7.png": PNG, "7.cls": b"7"}) + appended)
    stream = image_stream(DataConfig("shards:{split}.tar", val_split="0", channels=3, on_corrupt=on_corrupt))
    return sum(len(classes) for _, classes in stream.batches(0)), stream.report


def conversation_cases() -> Iterator[Case]:
    def read_file(text: bytes, name: str, on_corrupt: Any) -> tuple[int, CorruptReport]:
        Path("0.png").write_bytes(PNG)
        Path(name).write_bytes(text)
        chats = open_conversations(name, ConversationsConfig(on_corrupt=on_corrupt))
        return len(chats), chats.report

    sound = {"image": "0.png", "conversations": SAID}
    first = json.dumps(sound).encode() + b"\n"
    records = {**RECORDS, **IMAGE_NAMES, **_PATHS}
    for name, record in records.items():
        for file, text in (
            ("t.json", json.dumps([sound, record]).encode()),
            ("t.jsonl", first + json.dumps(record).encode()),
        ):
            read = functools.partial(read_file, text, file)
            yield Case("conversations", f"{file}: {name}", "counted", read, rf"^{re.escape(file)} \[1\]: \S")
    # Lines end, begin and are counted as editors of every system write them.
    broken = {name: b"\xef\xbb\xbf" + first[:-1] + b"\r\n\n" + line for name, line in NO_JSON_LINES.items()}
    for name, text in {**broken, **{name: first + line for name, line in LINES.items()}}.items():
        says = r"^t\.jsonl \[1\]: line 3 is no (JSON|text in UTF-8)" if name in broken else r"^t\.jsonl \[1\]: \S"
        read = functools.partial(read_file, text, "t.jsonl")
        yield Case("conversations", f"t.jsonl: {name}", "counted", read, says)
    for name, text in NO_JSON.items():
        read = functools.partial(read_file, text, "t.json")
        yield Case("conversations", f"t.json: {name}", "refused", read, r"^t\.json is no (JSON: |text in UTF-8)")
    for name, text in {**NO_JSON, **{key: json.dumps(value).encode() for key, value in RECORDS.items()}}.items():
        read = functools.partial(files.read_archive, "conversations", body({"8.png": PNG, "8.json": text}) + END)
        yield Case("conversations", f"shard: {name}", "counted", read, r"^0\.tar \[8\]")
    long = {"image": "0.png", "conversations": [SAID[0], {"from": "gpt", "value": "words " * (10**7 // 6)}]}
    read = functools.partial(read_file, json.dumps([long]).encode(), "t.json")
    yield Case("conversations", "an answer of 10 MB", "read", read)


_PATHS: dict[str, Any] = {
    f"an image at {path[:30]!r}": {"image": path, "conversations": SAID}
    for path in (
        "../0.png",
        "/etc/hostname",
        "/dev/zero",
        "a/../../0.png",
        "0\0.png",
        "a" * 300,
        "https://a/0.png",
        ".",
    )
}
