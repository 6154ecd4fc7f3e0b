"""Resumable conversions of a user's own data: a folder that belongs to one, parts that are complete, and a report.

A part is a fixed run of items. Its statistics are written last and mark it as complete, so that a conversion goes on
where it stopped.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image

from mmod.data.readers.image_files import ImageFileError
from mmod.data.readers.images import convert_image, open_image
from mmod.io.claim import claim_folder
from mmod.io.files import open_shard, read_json_object, write_atomically
from mmod.io.progress import progress_bar

SETTINGS, REPORT, DROPPED = "conversion.json", "report.json", "dropped.csv"
_STATS = "_stats.json"

Item = TypeVar("Item")


class DroppedItemError(Exception):
    """Raised for an item that becomes no sample.

    Args:
        reason: Why not, out of a few.
        details: What else there is to say.
    """

    def __init__(self, reason: str, details: str) -> None:
        super().__init__(reason, details)
        self.reason = reason
        self.details = details


def convert_items(
    config: Any,
    items: Iterable[Item],
    count: int,
    convert: Callable[[Item], dict[str, bytes]],
    label: Callable[[int, Item], list[Any]],
    *,
    shards: str | None = "{}.tar",
    free_keys: Sequence[str] = ("threads", "output"),
    unit: str = "row",
    progress: bool = True,
) -> dict[str, dict[str, Any]]:
    """Convert items part by part, from the start or from where an earlier call stopped.

    Args:
        config: What is converted and how, a dataclass with at least `source`, `output`, `shard_size` and `threads`.
        items: All that is converted.
        count: How many they are.
        convert: From an item to the members of its sample; raises a `DroppedItemError` or an `ImageFileError`.
        label: From an item's number and the item to what the report says of one that is dropped, before the reason.
        shards: Name of a part's shard, with `{}` for its number; None for no shards.
        free_keys: Fields of the config that may differ when the conversion goes on.
        unit: What items are called.
        progress: Show a progress bar.

    Returns:
        Number of each part in five digits to its `rows`, `samples` and what was `dropped`.

    Raises:
        FileNotFoundError: If the source is not there.
        FileExistsError: If the output holds other files, or a conversion of another source or with other settings.
    """
    folder = _claim(config, free_keys)
    numbered = enumerate(items)

    def attempt(item: tuple[int, Item]) -> dict[str, bytes] | DroppedItemError | ImageFileError:
        try:
            return convert(item[1])
        except (DroppedItemError, ImageFileError) as error:
            return error

    with (
        ThreadPoolExecutor(config.threads) as pool,
        progress_bar(desc="convert", total=count, unit=unit, shown=progress) as bar,
    ):
        for first in range(0, count, config.shard_size):
            part = islice(numbered, min(config.shard_size, count - first))
            number = f"{first // config.shard_size:05d}"
            if (folder / f"{number}{_STATS}").exists():
                bar.update(sum(1 for _ in part))
                continue
            dropped: list[list[Any]] = []
            samples = read = 0
            with open_shard(folder / shards.format(number)) if shards else nullcontext() as writer:
                for (index, item), outcome in _outcomes(part, attempt, pool, 16 * config.threads):
                    if isinstance(outcome, dict):
                        if writer is not None:
                            writer.write({"__key__": f"{number}{read:05d}", **outcome})
                        samples += 1
                    else:
                        dropped.append([*label(index, item), outcome.reason, outcome.details])
                    read += 1
                    bar.update()
            stats = {"rows": read, "samples": samples, "dropped": dropped}
            write_atomically(folder / f"{number}{_STATS}", json.dumps(stats) + "\n")
    return {path.name.removesuffix(_STATS): read_json_object(path) for path in sorted(folder.glob(f"*{_STATS}"))}


def check_image(data: bytes, min_size: int, prefix: str = "") -> tuple[Image.Image, Image.Image]:
    """Decode an image to its end.

    Args:
        data: The encoded file.
        min_size: Least length of its shorter side, in pixels.
        prefix: What the details of a fault begin with.

    Returns:
        The image as it is stored, and in RGB.

    Raises:
        DroppedItemError: If it cannot be decoded or is too small.
    """
    try:
        opened = open_image(data)
        image = convert_image(opened, "RGB")
    except ValueError as error:
        raise DroppedItemError("image cannot be decoded", f"{prefix}{error}") from error
    if min(opened.size) < min_size:
        raise DroppedItemError("image too small", f"{prefix}{opened.width} x {opened.height}")
    return opened, image


def count_reasons(reasons: Iterable[str]) -> dict[str, int]:
    """Return how often each reason was given, the most frequent first."""
    return dict(Counter(reasons).most_common())


def write_report(folder: Path, report: Any, head: Sequence[str], dropped: Iterable[Sequence[Any]]) -> None:
    """Write the report of a conversion and the table of what was left out."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(dropped)
    write_atomically(folder / DROPPED, text.getvalue())
    write_atomically(folder / REPORT, json.dumps(dataclasses.asdict(report), indent=2) + "\n")


def _claim(config: Any, free_keys: Sequence[str]) -> Path:
    source = Path(config.source).stat()
    settings = {**dataclasses.asdict(config), "bytes": source.st_size, "modified": source.st_mtime_ns}
    for name in free_keys:
        settings.pop(name)
    defaults = {field.name: field.default for field in dataclasses.fields(config) if field.name in settings}
    defaults = {name: value for name, value in defaults.items() if value is not dataclasses.MISSING}
    claim_folder(config.output, settings, file=SETTINGS, kind="a conversion", defaults=defaults)
    return Path(config.output)


def _outcomes(
    items: Iterator[Item], convert: Callable[[Item], Any], pool: ThreadPoolExecutor, ahead: int
) -> Iterator[tuple[Item, Any]]:
    # A window, because a pool's map would read all items into memory ahead of whoever writes them.
    while window := list(islice(items, ahead)):
        yield from zip(window, pool.map(convert, window))
