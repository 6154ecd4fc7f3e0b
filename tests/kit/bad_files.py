"""Bad files of many kinds, as bytes: images that are none, archives that lie, tables and records of wrong types."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import tarfile
import zipfile
import zlib
from typing import Any

import numpy as np
from PIL import Image


class Payload:
    """Writes a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("open('executed', 'w').close()",)


def encode(kind: str, side: int = 32, mode: str = "RGB", **options: Any) -> bytes:
    """Encode a picture of noise."""
    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
    Image.fromarray(noise).convert(mode).save(file, format=kind, **options)
    return file.getvalue()


def png(width: int, height: int, *, depth: int = 8, colour: int = 2, pixels: bytes = b"", after: bytes = b"") -> bytes:
    """Build a PNG by hand, whose header may claim anything."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + after
        + chunk(b"IDAT", zlib.compress(pixels))
        + chunk(b"IEND", b"")
    )


def flip(data: bytes, place: int) -> bytes:
    """Change one byte."""
    return data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]


def zipped(data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.png", data)
    return file.getvalue()


PNG, JPEG = encode("PNG"), encode("JPEG")
IMAGES: dict[str, bytes] = {
    "no bytes": b"",
    "one byte": b"\x89",
    "text": b"not an image",
    "a web page": b"<!DOCTYPE html><title>404 Not Found</title>",
    "zeros": bytes(4096),
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="8" height="8"/>',
    "pdf": b"%PDF-1.4\n1 0 obj <</OpenAction 2 0 R>> endobj\n",
    "eps": encode("EPS"),
    "ico": encode("ICO"),
    "zip": zipped(PNG),
    "gzip": gzip.compress(PNG),
    "pickle": pickle.dumps(Payload()),
    "npy": b"\x93NUMPY\x01\x00",
    "git lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n",
    "png without its first byte": PNG[1:],
    "png turned into text": PNG.replace(b"\r\n", b"\n"),
    "png signature alone": PNG[:8],
    "png header alone": PNG[:33],
    "png cut": PNG[: len(PNG) // 2],
    "png with a wrong checksum": flip(PNG, 30),
    "png with damaged pixels": flip(PNG, 60),
    "png of no size": png(0, 8),
    "png of an unknown colour type": png(8, 8, colour=5, pixels=bytes(200)),
    "png without pixels": png(8, 8, pixels=b""),
    "png bomb": png(60_000, 60_000, pixels=bytes(100)),
    "png of more sides than there are": png(1 << 31, 1 << 31),
    "png with a bomb of text": png(8, 8, pixels=bytes(200), after=struct.pack(">I", 0xFFFFFFF0) + b"zTXt"),
    "jpeg start alone": JPEG[:2],
    "jpeg header alone": JPEG[:100],
    "jpeg cut": JPEG[: len(JPEG) // 2],
    "jpeg of another kind of file": b"\xff\xd8\xff" + PNG,
    "jpeg bomb": JPEG.replace(b"\xff\xc0\x00\x11\x08\x00\x20\x00\x20", b"\xff\xc0\x00\x11\x08\xff\xff\xff\xff"),
    "gif cut": encode("GIF")[:40],
    "gif bomb": b"GIF89a\xff\xff\xff\xff" + encode("GIF")[10:],
    "webp cut": encode("WEBP")[:60],
    "bmp cut": encode("BMP")[:100],
    "bmp bomb": b"BM" + bytes(8) + struct.pack("<IIiiHHI", 54, 40, 1 << 30, 1 << 30, 1, 24, 0) + bytes(24),
    "tiff whose directory is itself": b"II*\0\x08\0\0\0\x00\x00\x08\0\0\0",
    "tiff cut": encode("TIFF")[:200],
    "ppm cut": encode("PPM")[:100],
    "ppm bomb": b"P6 100000 100000 255\n",
    "jpeg 2000 cut": encode("JPEG2000")[:120],
    "avif cut": encode("AVIF")[:200],
    "floats": encode("TIFF", mode="F"),
    "32-bit integers": encode("TIFF", mode="I"),
}
SOUND: dict[str, bytes] = {
    "bytes after the end": PNG + b"trailing",
    "a pickle after the end": JPEG + pickle.dumps(Payload()),
    "grey": encode("PNG", mode="L"),
    "palette": encode("PNG", mode="P"),
    "transparent": encode("PNG", mode="RGBA"),
    "cmyk": encode("JPEG", mode="CMYK"),
    "black and white": encode("PNG", mode="1"),
    "one pixel": encode("PNG", side=1),
    "progressive": encode("JPEG", progressive=True),
}


def header(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE, link: str = "") -> bytes:
    """Build the header of a tar member, whose size may be any number."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT)[:512])
    if size < 0:
        block[124:136] = size.to_bytes(12, "big", signed=True)
    elif size >= 1 << 33:
        block[124:136] = b"\x80" + size.to_bytes(11, "big")
    else:
        block[124:136] = b"%011o\0" % size
    block[148:156] = b"%06o\0 " % (sum(block) - sum(block[148:156]) + 256)
    return bytes(block)


def pax(text: bytes) -> bytes:
    """Build a pax header for the member that follows."""
    return header("pax", len(text), tarfile.XHDTYPE) + text.ljust(512, b"\0")


def pax_record(key: str, value: str) -> bytes:
    body = f" {key}={value}\n"
    length = len(body) + 2
    return f"{length}{body}".encode()


def tar(members: dict[str, bytes], kind: int = tarfile.USTAR_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=kind) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def body(members: dict[str, bytes]) -> bytes:
    """Return the members of an archive without its end."""
    return b"".join(header(name, len(data)) + data + bytes(-len(data) % 512) for name, data in members.items())


def with_checksums(data: bytes) -> bytes:
    """Write the right checksum into every block that looks like a header of a tar member."""
    blocks = [bytearray(data[at : at + 512]) for at in range(0, len(data), 512)]
    for block in blocks:
        if block[257:262] == b"ustar":
            block[148:156] = b"%06o\0 " % (sum(block) - sum(block[148:156]) + 256)
    return b"".join(blocks)


END = bytes(10240)
LONG_NAME = header("long", 1, tarfile.GNUTYPE_LONGNAME) + b"a".ljust(512, b"\0")
SPARSE = pax_record("GNU.sparse.major", "0") + pax_record("GNU.sparse.minor", "1")
HOLES = pax_record("GNU.sparse.numblocks", "1") + pax_record("GNU.sparse.size", str(1 << 40))
# What follows a good sample of 2,048 bytes or more, which is read; the rest is lost.
ARCHIVES: dict[str, bytes] = {
    "no end": b"",
    "end within a member": header("8.png", 4096) + bytes(1000),
    "end within a header": header("8.png", 4096)[:200],
    "a wrong checksum": flip(header("8.png", 512), 3) + bytes(512) + END,
    "noise": bytes(range(1, 256)) * 40,
    "a negative size": header("8.png", -512) + END,
    "a negative size that leads back": header("8.png", -2560) + END,
    "a negative size in a pax header": pax(pax_record("size", "-5120")) + header("8.png", 512) + END,
    "a size beyond any disk": header("8.png", 1 << 80) + END,
    "a long name beyond any disk": header("long", 1 << 70, tarfile.GNUTYPE_LONGNAME) + END,
    "a long name of negative size": header("long", -1, tarfile.GNUTYPE_LONGNAME) + END,
    "a pax header of no length": pax(b"0 size=1\n") + header("8.png", 512) + END,
    "a pax header cut": header("pax", 4096, tarfile.XHDTYPE) + b"30 size=1",
    "long names of long names": LONG_NAME * 3000 + END,
    "a sparse map of words": pax(SPARSE + pax_record("GNU.sparse.map", "a,b")) + header("8.png", 512) + END,
}


def incomplete(suffix: str, beside: bytes) -> dict[str, bytes]:
    """Return what follows a good sample: one that lacks its image or what stands beside it.

    Args:
        suffix: Suffix of what stands beside an image.
        beside: What it is.
    """
    name = f"8{suffix}"
    beginning = body({name: beside}) + END
    both = body({"8.png": PNG, name: beside})
    return {
        "a link for an image": header("8.png", kind=tarfile.SYMTYPE, link="/etc/hostname") + beginning,
        "a hard link for an image": header("8.png", kind=tarfile.LNKTYPE, link="7.png") + beginning,
        "a device for an image": header("8.png", kind=tarfile.CHRTYPE) + beginning,
        "a pipe for an image": header("8.png", kind=tarfile.FIFOTYPE) + beginning,
        "a folder for an image": header("8.png/", kind=tarfile.DIRTYPE) + beginning,
        "zeros for an image that take no room": pax(pax_record("GNU.sparse.map", "0,0") + HOLES)
        + header("8.png")
        + beginning,
        "two images": body({"8.png": PNG, "8.jpg": JPEG}) + beginning,
        "one key twice": both + both + END,
        "no image": beginning,
        "an image alone": body({"8.png": PNG}) + END,
        "a pickle beside it": body({"8.png": PNG, "8.pkl": pickle.dumps(Payload())}) + END,
    }


CAPTIONS: dict[str, bytes] = {
    "empty": b"",
    "spaces": b" \n\t",
    "another encoding": "Größe".encode("latin-1"),
    "two bytes a letter": "\ufeffnumber 8".encode("utf-16"),
    "half a letter": "é".encode()[:1],
    "a surrogate": "\ud800".encode("utf-8", "surrogatepass"),
}
CLASSES: dict[str, bytes] = {
    "empty": b"",
    "a word": b"cat",
    "negative": b"-1",
    "a fraction": b"1.5",
    "two": b"1 2",
    "too many digits": b"9" * 30,
    "digits without end": b"9" * 5000,
    "digits of another script": "١".encode(),
    "a pickle": pickle.dumps(3),
}
SAID = [{"from": "human", "value": "<image> what ?"}, {"from": "gpt", "value": "a square"}]
RECORDS: dict[str, Any] = {
    "null": None,
    "a number": 3,
    "a list": [],
    "no keys": {},
    "messages as text": {"image": "0.png", "conversations": "hello"},
    "messages as numbers": {"image": "0.png", "conversations": [1, 2]},
    "a message without text": {"image": "0.png", "conversations": [{"from": "human"}, SAID[1]]},
    "text that is a number": {"image": "0.png", "conversations": [{"from": "human", "value": 3}, SAID[1]]},
    "text that is a list": {"image": "0.png", "conversations": [SAID[0], {"from": "gpt", "value": ["a"]}]},
    "a role that is a list": {"image": "0.png", "conversations": [{"from": ["human"], "value": "<image>"}, SAID[1]]},
    "a role that is unknown": {"image": "0.png", "conversations": [SAID[0], {"from": "bot", "value": "a"}]},
    "a lone surrogate": {"image": "0.png", "conversations": [SAID[0], {"from": "gpt", "value": "\ud800"}]},
    "an image that is false": {"image": False, "conversations": [{"from": "human", "value": "what ?"}, SAID[1]]},
    "kinds that are a number": {"image": "0.png", "kinds": 3, "conversations": SAID},
    "kinds that are numbers": {"image": "0.png", "kinds": [3], "conversations": SAID},
}
# In a shard, images are members, whatever the record says of files.
IMAGE_NAMES: dict[str, Any] = {
    "an image that is a number": {"image": 3, "conversations": SAID},
    "images that are numbers": {"image": [1], "conversations": SAID},
    "an empty name of an image": {"image": [""], "conversations": SAID},
    "an image too many": {"image": ["0.png", "0.png"], "conversations": SAID},
}
LINES: dict[str, bytes] = {
    "half a letter": json.dumps({"conversations": SAID}).encode().replace(b"square", b"squ\xc3"),
    "lists of 10,000 levels": b'{"id": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "maps of 10,000 levels": b'{"a": ' * 10_000 + b"1" + b"}" * 10_000,
    "10 MB for an image": json.dumps({"image": "a" * 10**7, "conversations": SAID}).encode(),
    "10 MB of numbers for an image": json.dumps({"image": list(range(10**6)), "conversations": SAID}).encode(),
    "10 MB for a role": json.dumps({"conversations": [{"from": "a" * 10**7, "value": "b"}, SAID[1]]}).encode(),
    "10 MB for a kind": json.dumps({"image": "0.png", "kinds": [1] * 10**6, "conversations": SAID}).encode(),
    "a line cut": json.dumps({"image": "0.png", "conversations": SAID}).encode()[:-9],
}
"""Lines that are no records of an image and what is said of it."""
NO_JSON: dict[str, bytes] = {
    "nothing": b"",
    "a word": b"conversations",
    "an open list": b"[" + json.dumps({"id": 1}).encode(),
    "a python dict": b"{'id': 1}",
    "two values": b"[] []",
    "lists without end": b"[" * 200_000,
    "another encoding": b'["\xe9"]',
    "numbers without end": b"[" + b"9" * 10_000 + b"]",
    "a pickle": pickle.dumps(Payload()),
    "zeros": bytes(100),
}
NO_JSON_LINES = {name: data.replace(b"\n", b" ") for name, data in NO_JSON.items() if data}
NO_SHARDS: dict[str, bytes] = {
    "no bytes": b"",
    "zeros": bytes(10240),
    "text": b"text" * 5000,
    "zip": zipped(PNG),
    "a pickle": pickle.dumps(Payload()),
    "an archive of another file": tar({"a": b""}),
    "an archive of a pickle": tar({"a.pkl": b""}),
}
SPECIAL = {
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "device": lambda path: os.symlink("/dev/zero", path),
    "dangling link": lambda path: os.symlink("nowhere", path),
    "link to itself": lambda path: os.symlink(path, path),
}
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
