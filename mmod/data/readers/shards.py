"""Images and what is said of them, from webdataset shards by number instead of in stream order.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
from PIL import Image

from mmod.data.corrupt import CorruptReport, Fault
from mmod.data.readers.images import IMAGE_EXTENSIONS, MAX_BYTES, decode_image
from mmod.data.readers.source import UnreadableSampleError
from mmod.io.files import check_regular

DAMAGE = (tarfile.TarError, OSError, EOFError, ValueError, OverflowError, MemoryError, RecursionError)
"""What `tarfile` raises at damaged archives, whose headers may claim anything."""

Member = TypeVar("Member")
_BLOCK = tarfile.BLOCKSIZE
# More do not fit into a tensor of classes.
_DIGITS = 18
_URL = re.compile(r"^(pipe:|[a-z][a-z0-9+.-]*://)", re.IGNORECASE)


class Target(NamedTuple):
    """The member that stands beside the image in a sample.

    Attributes:
        extension: Its extension, in small letters.
        parse: From its bytes to what it says; raises a ValueError where that is nothing.
    """

    extension: str
    parse: Callable[[bytes], Any]


def parse_class(data: bytes) -> int:
    """Read a class number."""
    text = data.decode("ascii", "replace").strip()
    if not text.isdecimal() or len(text) > _DIGITS:
        raise ValueError(f"the .cls member holds {text[:40]!r}, not a class number")
    return int(text)


def parse_caption(data: bytes) -> str:
    """Read a caption: UTF-8 with at least one character that is no space."""
    try:
        text = data.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"the .txt member is not UTF-8: {error}") from error
    if not text:
        raise ValueError("the .txt member holds no text")
    return text


CLASS = Target("cls", parse_class)
CAPTION = Target("txt", parse_caption)


def expand_pattern(pattern: str | Sequence[str]) -> list[str]:
    """List the shards that a pattern names.

    Args:
        pattern: A path or URL with brace ranges (`{000..127}`), glob characters (`*`, `?`, `[...]`; local paths
            only) or both; several can be joined by `::` or given as a list.

    Returns:
        Paths and URLs, sorted within each glob, in the order of the braces.

    Raises:
        ValueError: If some part of the pattern matches no file or something that is none, or a shard is named twice.

    Example:
        >>> expand_pattern("https://example.org/train-{08..10}.tar")[-1]
        'https://example.org/train-10.tar'
    """
    from webdataset.shardlists import expand_urls

    shards: list[str] = []
    for url in (url for part in ([pattern] if isinstance(pattern, str) else pattern) for url in expand_urls(part)):
        if _URL.match(url) and not url.startswith("file://"):
            shards.append(url)
            continue
        path = url.removeprefix("file://")
        matches = [path] if os.path.isfile(path) else sorted(glob.glob(path))
        if not matches:
            raise ValueError(f"no shard matches {path!r} (from the pattern {pattern!r})")
        for match in matches:
            check_regular(match)
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
        target: What stands beside each image: `CLASS` or `CAPTION`.

    Raises:
        ValueError: If the pattern matches nothing, a shard is compressed, a remote shard has no cache folder, or
            no sample is left.
        CorruptDataError: If a shard is damaged or a sample incomplete, unless the report says "skip".

    Example:
        >>> import tempfile
        >>> from mmod.data.synthetic.digits import LEVELS, build_digits
        >>> root = tempfile.mkdtemp()
        >>> _ = build_digits(root, LEVELS["tiny"])
        >>> len(ShardSource(f"{root}/train-*.tar", CorruptReport()))
        256
    """

    def __init__(
        self,
        pattern: str | Sequence[str],
        report: CorruptReport,
        cache: str | Path | None = None,
        progress: bool = False,
        target: Target = CLASS,
    ):
        from tqdm import tqdm

        self.target = target
        self.shards = [_local(url, cache) for url in expand_pattern(pattern)]
        rows: list[tuple[int, int, int, int, int]] = []
        for number, shard in enumerate(tqdm(self.shards, "index", unit="shard", disable=not progress)):
            for entry in _index_shard(shard, target):
                if isinstance(entry, Fault):
                    report.add([entry])
                else:
                    rows.append((number, *entry))
        if not rows:
            raise ValueError(
                f"the shards of {pattern!r} hold no complete sample (an image and a .{target.extension} member)"
            )
        # An array, because worker processes share its memory; a list would be copied to each by reference counts.
        self._rows = np.array(rows, np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int, mode: str) -> tuple[Image.Image, Any]:
        """Read one sample; see `ImageSource.read`."""
        shard, image_at, image_size, target_at, target_size = self._rows[index].tolist()
        path = self.shards[shard]
        try:
            with open(path, "rb") as file:
                image, target = read_at(file, image_at, image_size), read_at(file, target_at, target_size)
            return decode_image(image, mode), self.target.parse(target)
        except (OSError, ValueError) as error:
            raise UnreadableSampleError(Fault(path, _member_name(path, image_at), str(error))) from error


def _local(url: str, cache: str | Path | None) -> str:
    if not _URL.match(url):
        return url
    if cache is None:
        raise ValueError(f"the remote shard {url!r} needs a folder to be copied to (root)")
    return fetch_shard(url, cache)


def group_members(members: Iterable[tuple[str, Member]]) -> Iterator[tuple[str, dict[str, list[Member]]]]:
    """Gather the members of each sample: neighbours whose names agree up to the first dot.

    Args:
        members: Names and what belongs to them, in the order of the shard.

    Yields:
        Key of a sample, and its members by extension in small letters.
    """
    from webdataset.tariterators import base_plus_ext

    key = ""
    found: dict[str, list[Member]] = {}
    for name, member in members:
        prefix, extension = base_plus_ext(name)
        if prefix is None:
            continue
        if prefix != key and found:
            yield key, found
            found = {}
        key = prefix
        found.setdefault(extension.lower(), []).append(member)
    if found:
        yield key, found


def choose_members(
    path: str, key: str, members: dict[str, list[Member]], target: Target
) -> tuple[Member, Member] | Fault:
    """Return the image and the target among the members of a sample, or what keeps them from being chosen."""
    images = [member for extension in IMAGE_EXTENSIONS for member in members.get(extension, [])]
    targets = members.get(target.extension, [])
    if len(images) != 1 or len(targets) != 1:
        found = ", ".join(f".{extension} x {len(same)}" for extension, same in members.items())
        return Fault(path, key, f"needs one image and one .{target.extension} member, has {found}")
    return images[0], targets[0]


def _index_shard(path: str, target: Target) -> Iterator[tuple[int, int, int, int] | Fault]:
    """Yield (image offset, image size, target offset, target size) of each sample, and each fault met."""
    ends: list[Fault] = []

    def named() -> Iterator[tuple[str, tarfile.TarInfo]]:
        for member in shard_members(path):
            if isinstance(member, Fault):
                ends.append(member)
            else:
                yield member.name, member

    empty = True
    for key, members in group_members(named()):
        empty = False
        chosen = choose_members(path, key, members, target)
        if not isinstance(chosen, Fault):
            image, beside = chosen
            yield image.offset_data, image.size, beside.offset_data, beside.size
        elif not ends:
            # A last sample cut short by the shard's end is no second fault.
            yield chosen
    if empty and not ends:
        ends.append(Fault(path, "", "holds no sample"))
    yield from ends


def plain_members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members of an archive that are files of at most `MAX_BYTES`, stored as they are.

    Args:
        tar: The archive.

    Raises:
        tarfile.ReadError: At a negative size, which would lead back to where the archive has been read already.
    """
    for member in tar:
        if member.size < 0:
            raise tarfile.ReadError(f"the size of {member.name!r} is {member.size}")
        # A few bytes of a sparse member can stand for any number of zeros.
        if member.isreg() and not member.issparse() and member.size <= MAX_BYTES:
            yield member


def shard_members(path: str) -> Iterator[tarfile.TarInfo | Fault]:
    """Yield the complete members of a tar file, then what ended it early if something did.

    `tarfile` ends quietly at a header that it cannot parse, so the end-of-archive mark is looked for here.

    Args:
        path: The shard, not compressed.

    Raises:
        ValueError: If the shard is compressed.
    """
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if file.read(6).startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")):
            raise ValueError(f"{path} is compressed; decompress it (images are), so that it can be read by number")
        file.seek(0)
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                for member in plain_members(tar):
                    if member.offset_data + member.size > size:
                        yield Fault(path, member.name, f"the shard ends at byte {size}, within this member")
                        return
                    yield member
                end = tar.offset
        except DAMAGE as error:
            yield Fault(path, "", f"damaged tar file: {error}; what follows is lost")
            return
        file.seek(end)
        if file.read(_BLOCK) != bytes(_BLOCK):
            yield Fault(path, "", f"damaged tar file: no valid header at byte {end} of {size}; what follows is lost")


def read_at(file: BinaryIO, offset: int, size: int) -> bytes:
    """Read bytes of a file from an offset, in bytes; a ValueError says when there are fewer."""
    file.seek(offset)
    data = file.read(size)
    if len(data) != size:
        raise ValueError(f"the shard changed since it was indexed: it ends before byte {offset + size}")
    return data


def _member_name(path: str, offset: int) -> str:
    """Name of the member whose data starts at an offset; its header is the block before."""
    try:
        with open(path, "rb") as file:
            header = read_at(file, offset - _BLOCK, _BLOCK)
        return tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape").name
    except (OSError, ValueError, tarfile.TarError):
        return f"member at byte {offset}"
