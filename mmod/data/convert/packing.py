"""Pack a user's data into webdataset shards, on worker threads; an interrupted conversion resumes at a shard."""

from __future__ import annotations

import csv
import dataclasses
import io
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, TypeVar

from PIL import Image

from mmod.data.corrupt import CorruptDataError, OnCorrupt, UnusableError
from mmod.data.readers.images import EXTENSIONS, ImageFiles, convert_image, open_image
from mmod.io.files import check_folder, open_shard, read_json_object, write_atomically, write_json
from mmod.io.progress import Bar, progress_bar
from mmod.io.records import record_config
from mmod.names import prefixed

SETTINGS = "conversion.json"
REPORT = "report.json"
DROPPED = "dropped.csv"
Dropped = tuple[int, str, str, str]
"""Number, label, reason and details of a dropped item."""
_STATS = "_stats.json"
# Fields that may change when a conversion resumes.
_FREE = ("threads", "output", "on_corrupt")

# MPO files hold several photographs; the first is a regular JPEG.
_ALIASES = {"MPO": "JPEG"}

Item = TypeVar("Item")


def file_extension(image: Image.Image) -> str:
    """Return the extension in shards for the format of an opened image."""
    name = image.format or ""
    return EXTENSIONS[_ALIASES.get(name, name)][0]


@dataclasses.dataclass(frozen=True)
class PackConfig:
    """Settings that all conversions share.

    Args:
        source: The file to convert.
        output: Folder of the shards and the report.
        images: Folder that image paths are relative to; by default the folder of `source`.
        follow_links: Also read images outside `images` that symbolic links in it point to.
        shard_size: Items of the source per shard.
        threads: Threads that read and encode images.
        on_corrupt: "raise" converts everything, writes the report, and then fails if an item cannot be used. "skip"
            leaves such items out; it reuses what "raise" has converted.
    """

    source: str
    output: str
    images: str | None = None
    follow_links: bool = False
    shard_size: Annotated[int, "[1, inf)"] = 10000
    threads: Annotated[int, "[1, inf)"] = 4
    on_corrupt: OnCorrupt = "raise"

    def files(self) -> ImageFiles:
        """Return the reader of the images by their paths; a FileNotFoundError if their folder is missing or empty."""
        if self.images is not None:
            check_folder(self.images, "images")
        return ImageFiles(self.images or Path(self.source).parent, self.follow_links)


def pack_shards(
    config: PackConfig,
    items: Iterable[Item],
    total: int,
    convert: Callable[[int, Item], dict[str, bytes]],
    label: Callable[[Item], str],
    *,
    shards: bool = True,
    progress: bool = True,
) -> tuple[dict[str, int], list[Dropped]]:
    """Convert items to shards of `config.shard_size` items, from the start or from the first shard that is missing.

    Args:
        config: The settings, which a resumed conversion must share.
        total: Number of items.
        convert: From an item's number and the item to the members of its sample; raises an `UnusableError`.
        label: From an item to its name in the report.
        shards: Write shards, which `publish` shows.

    Returns:
        Samples by shard number (five digits), and the dropped items.
    """
    source = Path(config.source).stat()
    # Size and time of the source: a changed table must not resume into shards of the old one.
    settings = {**dataclasses.asdict(config), "bytes": source.st_size, "modified": source.st_mtime_ns}
    record_config(config.output, settings, file=SETTINGS, kind="a conversion", free_keys=_FREE)
    folder = Path(config.output)
    numbered = enumerate(items)
    with (
        ThreadPoolExecutor(config.threads) as pool,
        progress_bar(desc="convert", total=total, unit="items", shown=progress) as bar,
    ):
        for first in range(0, total, config.shard_size):
            number = f"{first // config.shard_size:05d}"
            # An iterator over the same enumeration, so that a shard that exists is skipped by reading past its items.
            entries = islice(numbered, min(config.shard_size, total - first))
            if (folder / f"{number}{_STATS}").exists():
                bar.update(sum(1 for _ in entries))
                continue
            outcomes = _outcomes(entries, convert, pool, bar, 16 * config.threads)
            samples = 0
            dropped: list[Dropped] = []
            opened = open_shard(folder / f".{number}.tar") if shards else nullcontext()
            with opened as writer:
                for index, item, outcome in outcomes:
                    if isinstance(outcome, UnusableError):
                        dropped.append((index, label(item), outcome.reason, outcome.details))
                        continue
                    samples += 1
                    if writer is not None:
                        writer.write({"__key__": f"{number}{index - first:05d}", **outcome})
            # Written last: the statistics mark the shard as complete.
            write_json(folder / f"{number}{_STATS}", {"samples": samples, "dropped": dropped})
    paths = sorted(folder.glob(f"*{_STATS}"))
    stats = {path.name.removesuffix(_STATS): read_json_object(path) for path in paths}
    counts = {number: shard["samples"] for number, shard in stats.items()}
    return counts, list(chain.from_iterable(shard["dropped"] for shard in stats.values()))


def _outcomes(
    entries: Iterator[tuple[int, Item]],
    convert: Callable[[int, Item], dict[str, bytes]],
    pool: ThreadPoolExecutor,
    bar: Bar,
    window_size: int,
) -> Iterator[tuple[int, Item, dict[str, bytes] | UnusableError]]:
    """Yield number and item of each entry, in order, and the members of its sample, or why it cannot be used."""

    def attempt(entry: tuple[int, Item]) -> dict[str, bytes] | UnusableError:
        try:
            return convert(*entry)
        except UnusableError as error:
            # Returned: raised in the pool, it would end the conversion of all others.
            return error

    # In windows, because `pool.map` would read all items into memory before the first is written.
    while window := list(islice(entries, window_size)):
        # `map` keeps the order, whichever thread is done first.
        for (index, item), outcome in zip(window, pool.map(attempt, window)):
            yield index, item, outcome
        bar.update(len(window))


def check_image(data: bytes, prefix: str = "") -> tuple[Image.Image, Image.Image]:
    """Decode an image, and return it as stored and in RGB; raise an `UnusableError` if it is damaged."""
    try:
        opened = open_image(data)
        return opened, convert_image(opened, "RGB")
    except ValueError as error:
        raise UnusableError("image cannot be decoded", f"{prefix}{error}") from error


def publish(config: PackConfig, samples: int, dropped: Sequence[Dropped], **details: object) -> dict[str, object]:
    """Write `report.json` with the counts, the first dropped item and these details, and `dropped.csv` with them all.

    Then show the shards.

    Raises:
        CorruptDataError: If an item was dropped and `config.on_corrupt` is "raise"; the report is written first.
    """
    reasons = dict(Counter(reason for _, _, reason, _ in dropped).most_common())
    report = {"items": samples + len(dropped), "samples": samples, "dropped": reasons, **details}
    first = ""
    if dropped:
        number, name, *why = dropped[0]
        # Records need not have an id.
        first = ", ".join(filter(None, [f"item {number}", name and repr(name), ": ".join(filter(None, why))]))
        report["first_dropped"] = first
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([("item", "name", "reason", "details"), *dropped])
    folder = Path(config.output)
    write_atomically(folder / DROPPED, text.getvalue())
    write_json(folder / REPORT, report)
    if dropped and config.on_corrupt == "raise":
        counted = ", ".join(f"{text} ({count})" for text, count in reasons.items())
        hint = config.files().hint([row[2] for row in dropped], samples + len(dropped))
        advice = f"--on_corrupt skip, in Python on_corrupt='skip', leaves them out{prefixed('; ', hint)}"
        raise CorruptDataError(
            f"{len(dropped)} of {report['items']} items cannot be used: {counted}; the first, counted from 0, is "
            f"{first}. {folder / DROPPED} lists them; {advice}"
        )
    # Hidden until here: an incomplete set must not look like a set.
    for path in folder.glob(".*.tar"):
        os.replace(path, folder / path.name.removeprefix("."))
    return report
