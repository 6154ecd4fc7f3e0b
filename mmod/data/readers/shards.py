"""Webdataset shards with random access: one pass over the headers of an uncompressed tar file indexes its samples.

A sample is a run of members that share the name up to the first dot, such as `000017.jpg`, `000017.cls`.
"""

from __future__ import annotations

import glob
import os
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

import numpy as np
from PIL import Image

from mmod.data.corrupt import CorruptReport, Fault
from mmod.data.labels import read_caption
from mmod.data.readers.images import (
    IMAGE_EXTENSIONS,
    MAX_BYTES,
    Target,
    decode_image,
    open_image,
    patch_classes,
)
from mmod.data.readers.shard_files import Index, ShardFiles, read_at
from mmod.io.files import check_regular, decode_text, near_paths
from mmod.io.remote import RemoteConfig, RemoteError, is_remote

# Errors of `tarfile` on damaged archives, whose headers may hold any value.
_DAMAGE = (tarfile.TarError, OSError, EOFError, ValueError, OverflowError, MemoryError, RecursionError)

Members = dict[str, list[tarfile.TarInfo]]
"""Members of a sample by extension."""
Sample = TypeVar("Sample")
_BLOCK = tarfile.BLOCKSIZE
# Maximum number of decimal digits of a class that fits into int64.
_DIGITS = 18


class LabelMember(NamedTuple):
    """The label member of a sample: its lower-case extension, and a parser that raises a ValueError."""

    extension: str
    parse: Callable[[bytes], Target]


def parse_class(data: bytes) -> int:
    """Parse a class number."""
    text = decode_text(data, "the .cls member").strip()
    # `isdecimal` alone would take digits of other scripts.
    if not (text.isascii() and text.isdecimal()) or len(text) > _DIGITS:
        raise ValueError(f"the .cls member holds {text[:40]!r}, not a class number")
    return int(text)


def parse_caption(data: bytes) -> str:
    """Parse a caption: UTF-8 text that is not blank."""
    return read_caption(decode_text(data, "the .txt member"))


def parse_patches(data: bytes, side: int) -> list[int]:
    """Parse a label map, of mode L or P, into the class of each patch of `side` pixels; see `patch_classes`."""
    image = open_image(data)
    if image.mode not in ("L", "P") or image.width != image.height or image.width % side:
        raise ValueError(
            f"the .seg.png member has {image.width}x{image.height} pixels and mode {image.mode}; it must be square "
            f"with a multiple of {side} pixels, and of mode L or P"
        )
    return patch_classes(np.asarray(image), side)


def label_map(side: int) -> LabelMember:
    """Return the reader of `.seg.png` members: label maps, of which each patch of `side` pixels gets one class."""
    return LabelMember("seg.png", partial(parse_patches, side=side))


CLASS = LabelMember("cls", parse_class)
CAPTION = LabelMember("txt", parse_caption)


def expand_pattern(pattern: str | Sequence[str]) -> list[str]:
    """Return the paths and URLs of a pattern, sorted within each glob, in the order of the braces.

    A pattern is a path or URL with brace ranges (`{000..127}`), glob characters (`*`, `?`, `[...]`; local paths only)
    or both; several can be joined by `::`, or are a list.

    Example:
        >>> expand_pattern("https://example.org/train-{08..10}.tar")[-1]
        'https://example.org/train-10.tar'
    """
    from webdataset.shardlists import expand_urls

    shards: list[str] = []
    patterns = [pattern] if isinstance(pattern, str) else pattern
    for url in chain.from_iterable(map(expand_urls, patterns)):
        if is_remote(url):
            shards.append(url)
            continue
        path = url.removeprefix("file://")
        # A file first: its own name may have the characters of a pattern.
        matches = [path]
        if not os.path.isfile(path):
            matches = sorted(glob.glob(path))
        if not matches:
            raise ValueError(f"no shard matches {path!r} (from the pattern {pattern!r}){near_paths(path)}")
        for match in matches:
            if os.path.isdir(match):
                raise ValueError(f"{match!r} is a folder, and no shard: name those in it, as '{match}/*.tar'")
            check_regular(match)
        shards += matches
    if not shards:
        raise ValueError(f"the pattern {pattern!r} names no shard")
    # A shard that is listed twice would be trained on twice as often.
    repeated = sorted(shard for shard, times in Counter(shards).items() if times > 1)
    if repeated:
        raise ValueError(f"the pattern {pattern!r} names {repeated[0]} twice")
    return shards


class ShardSource:
    """The samples of a list of shards.

    Args:
        pattern: See `expand_pattern`.
        cache: Folder for copies of remote shards and for indices; None writes each index next to its shard.
        target: The label member: `CLASS`, `CAPTION` or a `label_map`.
    """

    def __init__(
        self,
        pattern: str | Sequence[str],
        report: CorruptReport,
        cache: str | Path | None = None,
        progress: bool = False,
        target: LabelMember = CLASS,
        remote: RemoteConfig | None = None,
    ):
        self.target = target
        self._files = ShardFiles(expand_pattern(pattern), cache, report, remote)
        tables = []
        for number, (rows, faults) in self._files.indices(target.extension, self._make_index, progress):
            report.add(faults)
            shard_N = np.full(len(rows), number)
            tables.append(np.column_stack([shard_N, rows]))
        # An array: worker processes share its memory, while reference counting would copy a list to each.
        self._rows = np.empty((0, 5), np.int64)
        if tables:
            self._rows = np.concatenate(tables)
        if not len(self._rows):
            raise ValueError(
                f"the shards of {pattern!r} hold no complete sample (an image and a .{target.extension} member)"
            )

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int, mode: str) -> tuple[Image.Image, Target]:
        """Read one sample; see `ImageSource.read`."""
        shard, image_at, image_size, target_at, target_size = self._rows[index].tolist()
        image, target = self._files.read(shard, [(image_at, image_size), (target_at, target_size)])
        return decode_image(image, mode), self.target.parse(target)

    def place(self, index: int) -> tuple[str, str]:
        """Return where a sample is, by the name of its image; see `ImageSource.place`."""
        shard, image_at, *_ = self._rows[index].tolist()
        return self._files.urls[shard], self._member_name(shard, image_at)

    def labels(self) -> list[int]:
        """Return the class of each sample without decoding images; -1 for several classes or an unreadable one."""
        classes = []
        # Rows of a shard are neighbours, so that each shard is opened once.
        for shard, rows in groupby(self._rows.tolist(), key=itemgetter(0)):
            with self._files.open(shard) as file:
                classes += [self._label(file, offset, size) for *_, offset, size in rows]
        return classes

    def _label(self, file: BinaryIO, offset: int, size: int) -> int:
        try:
            label = self.target.parse(read_at(file, offset, size))
        except (OSError, ValueError):
            # The fault is counted when the sample is read.
            return -1
        # A map of patches is no number.
        if not isinstance(label, int):
            return -1
        return label

    def _member_name(self, shard: int, offset: int) -> str:
        """Return the name of the member whose data starts at an offset; the header is the block before."""
        try:
            (header,) = self._files.read(shard, [(offset - _BLOCK, _BLOCK)])
            return tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape").name
        except (OSError, ValueError, tarfile.TarError):
            return f"member at byte {offset}"

    def _make_index(self, file: BinaryIO, path: str) -> Index:
        entries = list(read_samples(file, path, self._choose))
        rows = [entry for entry in entries if not isinstance(entry, Fault)]
        faults = [entry for entry in entries if isinstance(entry, Fault)]
        return np.array(rows, np.int64).reshape(-1, 4), faults

    def _choose(self, key: str, members: Members) -> tuple[int, int, int, int]:
        """Return offset and size of the image, and of the target."""
        images = list(chain.from_iterable(members.get(extension, []) for extension in IMAGE_EXTENSIONS))
        targets = members.get(self.target.extension, [])
        if len(images) != 1 or len(targets) != 1:
            counts = [f".{extension} x {len(same)}" for extension, same in members.items()]
            raise ValueError(f"needs one image and one .{self.target.extension} member, has {', '.join(counts)}")
        image = images[0]
        target = targets[0]
        return image.offset_data, image.size, target.offset_data, target.size


def read_samples(file: BinaryIO, path: str, choose: Callable[[str, Members], Sample]) -> Iterator[Sample | Fault]:
    """Yield an entry for each sample of a shard; faults replace incomplete ones, and end damaged or empty shards.

    `choose` makes the entry from a sample's key and members, and raises a ValueError for an incomplete sample.
    """
    ends: list[Fault] = []
    keys: set[str] = set()
    for key, members in _group(file, path, ends):
        if key in keys:
            yield Fault(path, key, "an earlier sample of the shard has the same key")
            continue
        keys.add(key)
        try:
            chosen = choose(key, members)
        except ValueError as error:
            # A truncated shard is one fault; its incomplete last sample is not counted again.
            if not ends:
                yield Fault(path, key, str(error))
        else:
            yield chosen
    yield from ends
    if not keys and not ends:
        yield Fault(path, "", "holds no sample")


def _group(file: BinaryIO, path: str, ends: list[Fault]) -> Iterator[tuple[str, Members]]:
    """Yield key and members of each sample; append the fault that ended the shard early, if any, to `ends`."""
    from webdataset.tariterators import base_plus_ext

    key = ""
    members: Members = {}
    for member in _read_members(file, path):
        if isinstance(member, Fault):
            ends.append(member)
            continue
        prefix, extension = base_plus_ext(member.name)
        if prefix is None:
            continue
        # Members of a sample are neighbours in a webdataset shard.
        if prefix != key and members:
            yield key, members
            members = {}
        key = prefix
        members.setdefault(extension.lower(), []).append(member)
    if members:
        yield key, members


def _read_members(file: BinaryIO, path: str) -> Iterator[tarfile.TarInfo | Fault]:
    """Yield the complete regular members of a tar file, then the fault that ended it early, if any."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    # The first bytes of gzip, bzip2, xz and zstandard.
    if file.read(6).startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")):
        raise ValueError(f"{path} is compressed and cannot be read in random order: decompress it")
    file.seek(0)
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if member.size < 0:
                    # A negative size would send the reader back, in an endless loop.
                    raise tarfile.ReadError(f"the size of {member.name!r} is {member.size}")
                # A sparse member of a few bytes can expand to any number of zeros.
                if not member.isreg() or member.issparse() or member.size > MAX_BYTES:
                    continue
                # Checked against the file's size: `tarfile` would return what is there as if it were whole.
                last = member.offset_data + member.size
                if last > size:
                    yield Fault(path, member.name, f"the shard ends at byte {size}, within this member")
                    return
                yield member
            end = tar.offset
    except RemoteError:
        raise
    except _DAMAGE as error:
        yield Fault(path, "", f"damaged tar file: {error}; later samples are lost")
        return
    # `tarfile` stops silently at an invalid header, so the end-of-archive mark is checked here.
    file.seek(end)
    if file.read(_BLOCK) != bytes(_BLOCK):
        yield Fault(path, "", f"damaged tar file: no valid header at byte {end} of {size}; later samples are lost")
