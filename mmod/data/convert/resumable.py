"""What conversions of a user's own data share: a folder of their own, parts that are whole or not there, a report.

A part is a fixed run of what is converted. Its statistics are written last and say that it is whole, so that a
conversion goes on where it stopped.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from mmod.io.files import parse_json, write_atomically

SETTINGS, REPORT, DROPPED = "conversion.json", "report.json", "dropped.csv"
_STATS = "_stats.json"

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


def claim(config: Any, free: Sequence[str] = ("threads", "output")) -> Path:
    """Mark a folder as that of a conversion.

    Args:
        config: What is converted and how, a dataclass with at least `source` and `output`.
        free: Its fields that may differ when the conversion goes on.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: If the source is not there.
        FileExistsError: If the folder holds other files, or a conversion of another source or with other settings.
    """
    folder, source = Path(config.output), Path(config.source).stat()
    settings = {**dataclasses.asdict(config), "bytes": source.st_size, "modified": source.st_mtime_ns}
    for name in free:
        settings.pop(name)
    kept = folder / SETTINGS
    if kept.exists():
        # A conversion that was begun before a field existed has its default.
        defaults = {field.name: field.default for field in dataclasses.fields(config) if field.name in settings}
        old = {**defaults, **_read_json(kept)}
        differing = sorted(key for key in {*old, *settings} if old.get(key) != settings.get(key))
        if differing:
            changes = "; ".join(f"{key}: {old.get(key)!r} there, {settings.get(key)!r} now" for key in differing)
            raise FileExistsError(f"{config.output!r} holds another conversion ({changes}); choose another folder")
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{config.output!r} is not empty and holds no conversion; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(kept, json.dumps(settings, indent=2) + "\n")
    return folder


def unfinished(
    folder: Path, items: Iterable[Item], count: int, size: int, bar: Any
) -> Iterator[tuple[int, Iterator[Item]]]:
    """Yield the parts that are still to be done, each of which must be read to its end.

    Args:
        folder: Folder of the conversion.
        items: All that is converted.
        count: How many they are.
        size: How many make up a part.
        bar: A progress bar, moved on by the parts that are done.

    Yields:
        A part's number and its items.
    """
    items = iter(items)
    for number, first in enumerate(range(0, count, size)):
        part = islice(items, min(size, count - first))
        if (folder / f"{number:05d}{_STATS}").exists():
            bar.update(sum(1 for _ in part))
        else:
            yield number, part


def converted(
    items: Iterator[Item], convert: Callable[[Item], Outcome], pool: Executor, ahead: int
) -> Iterator[tuple[Item, Outcome]]:
    """Yield items with what becomes of them, in their order.

    Args:
        items: The items.
        convert: From an item to what becomes of it.
        pool: Where it is called.
        ahead: How many items are converted at a time.
    """
    # A window, because a pool's map would read all items into memory ahead of whoever writes them.
    while window := list(islice(items, ahead)):
        yield from zip(window, pool.map(convert, window))


def finish_part(folder: Path, number: int, stats: dict[str, Any]) -> None:
    """Write a part's statistics; they are what says that it is whole.

    Args:
        folder: Folder of the conversion.
        number: Number of the part.
        stats: JSON values; under `dropped` a row of the report for each item that was left out.
    """
    write_atomically(folder / f"{number:05d}{_STATS}", json.dumps(stats) + "\n")


def finished(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the statistics of all parts, by the parts' numbers in five digits.

    Args:
        folder: Folder of the conversion.
    """
    return {path.name.removesuffix(_STATS): _read_json(path) for path in sorted(folder.glob(f"*{_STATS}"))}


def _read_json(path: Path) -> dict[str, Any]:
    content = parse_json(path.read_bytes(), str(path))
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    return content


def count_reasons(reasons: Iterable[str]) -> dict[str, int]:
    """Return how often each reason was given, the most frequent first."""
    return dict(Counter(reasons).most_common())


def write_report(folder: Path, report: Any, head: Sequence[str], dropped: Iterable[Sequence[Any]]) -> None:
    """Write the report of a conversion and the table of what was left out.

    Args:
        folder: Folder of the conversion.
        report: A dataclass of JSON values.
        head: Columns of the table.
        dropped: Its rows.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(dropped)
    write_atomically(folder / DROPPED, text.getvalue())
    write_atomically(folder / REPORT, json.dumps(dataclasses.asdict(report), indent=2) + "\n")
