"""Images and class labels from webdataset shards, by number instead of in stream order.

A shard is a plain tar file of samples, each a run of members that share the name up to the first dot, as
`000017.jpg`, `000017.cls`. Tar files are seekable, so one pass over their headers gives every sample's
place; after that shuffling is global, an epoch is exact, any number of workers can read any number of shards, and a
stream resumes anywhere without decoding what it skips. Remote shards are copied to a local folder first.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image

from mmod.data.corrupt import CorruptReport, Fault
from mmod.data.sources import UnreadableSampleError, decode_image

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "bmp", "ppm", "pgm", "tif", "tiff", "gif")
LABEL_EXTENSION = "cls"
_BLOCK = tarfile.BLOCKSIZE
_URL = re.compile(r"^(pipe:|[a-z][a-z0-9+.-]*://)", re.IGNORECASE)


def expand_pattern(pattern: str) -> list[str]:
    """List the shards that a pattern names.

    Args:
        pattern: A path or URL with brace ranges (`{000..127}`), glob characters (`*`, `?`, `[...]`; local paths
            only) or both; several can be joined by `::`.

    Returns:
        Paths and URLs, sorted within each glob, in the order of the braces.

    Raises:
        ValueError: If some part of the pattern matches no file, or a shard is named twice.

    Example:
        >>> expand_pattern("https://example.org/train-{08..10}.tar")[-1]
        'https://example.org/train-10.tar'
    """
    from webdataset.shardlists import expand_urls

    shards: list[str] = []
    for url in expand_urls(pattern):
        if _URL.match(url) and not url.startswith("file://"):
            shards.append(url)
            continue
        path = url.removeprefix("file://")
        matches = [path] if os.path.isfile(path) else sorted(glob.glob(path))
        if not matches:
            raise ValueError(f"no shard matches {path!r} (from the pattern {pattern!r})")
        shards += matches
    repeated = sorted({shard for shard in shards if shards.count(shard) > 1})
    if not shards or repeated:
        raise ValueError(f"the pattern {pattern!r} names {repeated[0] + ' twice' if repeated else 'no shard'}")
    return shards


def fetch_shard(url: str, folder: str | Path) -> str:
    """Copy a remote shard to a folder, unless it is there.

    Args:
        url: What `webdataset.gopen` can open: `pipe:`, `https://`, `s3://`, `gs://` and others.
        folder: Where the copy is kept.

    Returns:
        Path of the local copy.

    Raises:
        OSError: If the shard cannot be read to its end.
    """
    from webdataset.gopen import gopen

    stem = re.sub(r"[^A-Za-z0-9._-]", "_", url.split("/")[-1])[-80:].removesuffix(".tar")
    path = Path(folder) / f"{stem}-{hashlib.sha256(url.encode()).hexdigest()[:12]}.tar"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".partial-{os.getpid()}")
        try:
            # Closing the pipe checks the exit status of the command behind it.
            with gopen(url) as stream, open(partial, "wb") as file:
                shutil.copyfileobj(stream, file)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    return str(path)


class ShardSource:
    """The samples of a list of shards.

    Args:
        pattern: See `expand_pattern`.
        report: Where damaged shards and incomplete samples are counted.
        cache: Folder for copies of remote shards.
        progress: Show a progress bar while the shards are indexed.

    Raises:
        ValueError: If the pattern matches nothing, a shard is compressed, a remote shard has no cache folder, or
            no sample is left.
        CorruptDataError: If a shard is damaged or a sample incomplete, unless the report says "skip".

    Example:
        >>> import tempfile
        >>> from mmod.data.digits import LEVELS, build_digits
        >>> root = tempfile.mkdtemp()
        >>> _ = build_digits(root, LEVELS["tiny"])
        >>> len(ShardSource(f"{root}/train-*.tar", CorruptReport()))
        256
    """

    def __init__(self, pattern: str, report: CorruptReport, cache: str | Path | None = None, progress: bool = False):
        from tqdm import tqdm

        self.shards = [_local(url, cache) for url in expand_pattern(pattern)]
        rows: list[tuple[int, int, int, int, int]] = []
        for number, shard in enumerate(tqdm(self.shards, "index", unit="shard", disable=not progress)):
            for entry in _index_shard(shard):
                if isinstance(entry, Fault):
                    report.add([entry])
                else:
                    rows.append((number, *entry))
        if not rows:
            raise ValueError(f"the shards of {pattern!r} hold no complete sample (an image and a .cls member)")
        # An array, because worker processes share its memory; a list would be copied to each by reference counts.
        self._rows = np.array(rows, np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int, mode: str) -> tuple[Image.Image, int]:
        """Read one sample; see `ImageSource.read`."""
        shard, image_at, image_size, label_at, label_size = self._rows[index].tolist()
        path = self.shards[shard]
        try:
            with open(path, "rb") as file:
                image, label = _read_at(file, image_at, image_size), _read_at(file, label_at, label_size)
            return decode_image(image, mode), _parse_label(label)
        except (OSError, ValueError) as error:
            raise UnreadableSampleError(Fault(path, _member_name(path, image_at), str(error))) from error


def _local(url: str, cache: str | Path | None) -> str:
    if not _URL.match(url):
        return url
    if cache is None:
        raise ValueError(f"the remote shard {url!r} needs a folder to be copied to (root)")
    return fetch_shard(url, cache)


def _index_shard(path: str) -> Iterator[tuple[int, int, int, int] | Fault]:
    """Yield (image offset, image size, label offset, label size) of each sample, and each fault met."""
    from webdataset.tariterators import base_plus_ext

    key = ""
    members: dict[str, list[tarfile.TarInfo]] = {}
    end: Fault | None = Fault(path, "", "holds no sample")
    for member in _members(path):
        if isinstance(member, Fault):
            end = member
            break
        prefix, extension = base_plus_ext(member.name)
        if prefix is None:
            continue
        end = None
        if prefix != key and members:
            yield _locate(path, key, members)
            members = {}
        key = prefix
        members.setdefault(extension.lower(), []).append(member)
    if members:
        last = _locate(path, key, members)
        # A last sample cut short by the shard's end is no second fault.
        if end is None or not isinstance(last, Fault):
            yield last
    if end is not None:
        yield end


def _members(path: str) -> Iterator[tarfile.TarInfo | Fault]:
    """Yield the complete members of a tar file, then what ended it early if something did.

    `tarfile` ends quietly at a header that it cannot parse, so the end-of-archive mark is looked for here.
    """
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if file.read(6).startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")):
            raise ValueError(f"{path} is compressed; decompress it (images are), so that it can be read by number")
        file.seek(0)
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                for member in tar:
                    if member.offset_data + member.size > size:
                        yield Fault(path, member.name, f"the shard ends at byte {size}, within this member")
                        return
                    if member.isreg():
                        yield member
                end = tar.offset
        except tarfile.TarError as error:
            yield Fault(path, "", f"damaged tar file: {error}; what follows is lost")
            return
        file.seek(end)
        if file.read(_BLOCK) != bytes(_BLOCK):
            yield Fault(path, "", f"damaged tar file: no valid header at byte {end} of {size}; what follows is lost")


def _locate(path: str, key: str, members: dict[str, list[tarfile.TarInfo]]) -> tuple[int, int, int, int] | Fault:
    images = [member for extension in IMAGE_EXTENSIONS for member in members.get(extension, [])]
    labels = members.get(LABEL_EXTENSION, [])
    if len(images) != 1 or len(labels) != 1:
        found = ", ".join(f".{extension} x {len(same)}" for extension, same in members.items())
        return Fault(path, key, f"needs one image and one .{LABEL_EXTENSION} member, has {found}")
    return images[0].offset_data, images[0].size, labels[0].offset_data, labels[0].size


def _read_at(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    data = file.read(size)
    if len(data) != size:
        raise ValueError(f"the shard changed since it was indexed: it ends before byte {offset + size}")
    return data


def _parse_label(data: bytes) -> int:
    text = data.decode("ascii", "replace").strip()
    if not text.isdecimal():
        raise ValueError(f"the .{LABEL_EXTENSION} member holds {text[:40]!r}, not a class number")
    return int(text)


def _member_name(path: str, offset: int) -> str:
    """Name of the member whose data starts at an offset; its header is the block before."""
    try:
        with open(path, "rb") as file:
            header = _read_at(file, offset - _BLOCK, _BLOCK)
        return tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape").name
    except (OSError, ValueError, tarfile.TarError):
        return f"member at byte {offset}"
