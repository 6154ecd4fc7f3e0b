"""Conversations in LLaVA's JSON format and their images become a checked set: every image opened, every role counted.

The set is a JSON file in the same format beside `dropped.csv`, which names every record that was left out, and with
`shards` also webdataset shards. Records are checked in fixed runs whose outcome is kept, so that a conversion goes on
where it stopped.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mmod.data.convert.resumable import (
    DROPPED,
    DroppedItemError,
    check_image,
    convert_items,
    count_reasons,
    write_report,
)
from mmod.data.corrupt import CorruptDataError
from mmod.data.readers.image_files import ImageFiles
from mmod.data.readers.images import file_extension
from mmod.data.records import check_record, image_names, read_records
from mmod.io.files import write_atomically
from mmod.values import check_fields

CHECKED = "conversations.json"


@dataclass(frozen=True)
class ConvertConversationsConfig:
    """Config of a check of conversations.

    Args:
        source: The records: a `.json` list or a `.jsonl` file in LLaVA's format.
        output: Folder of the checked set.
        images: Folder that image paths are relative to; by default the one the source lies in.
        follow_links: Also take images outside of that folder to which symbolic links in it lead.
        on_fault: "raise" checks everything, writes the report, and then stops if a record has a fault, without a
            checked set. "drop" leaves such records out; it takes over what "raise" has checked.
        shards: Also write webdataset shards with the images inside.
        shard_size: Records that are checked, and make up a shard, at a time.
        min_size: Shortest side of an image, in pixels.
        threads: Threads that read and decode images.

    Raises:
        ValueError: If a value is out of range.
    """

    source: str
    output: str
    images: str | None = None
    follow_links: bool = False
    on_fault: Literal["raise", "drop"] = "raise"
    shards: bool = False
    shard_size: int = 5000
    min_size: int = 1
    threads: int = 4

    def __post_init__(self) -> None:
        if Path(self.source).suffix not in (".json", ".jsonl"):
            raise ValueError(f"source={self.source!r} must end in .json or .jsonl")
        check_fields(self, **dict.fromkeys(("shard_size", "min_size", "threads"), "[1, inf)"))


@dataclass(frozen=True)
class ConversationsReport:
    """Outcome of a check of conversations.

    Args:
        records: Records of the source.
        kept: Records of the checked set.
        images: Number of images a record of it has, to the number of such records.
        dropped: Reason to the number of records it kept out.
        output: Folder of the checked set.
    """

    records: int
    kept: int
    images: dict[str, int]
    dropped: dict[str, int]
    output: str

    def __str__(self) -> str:
        lines = [f"{self.kept} of {self.records} conversations are sound, in {self.output}/{CHECKED}"]
        lines += [f"with {count} images: {number}" for count, number in self.images.items()]
        lines += [f"left out {count}: {reason}" for reason, count in self.dropped.items()]
        return "\n".join(lines)


def convert_conversations(config: ConvertConversationsConfig, progress: bool = True) -> ConversationsReport:
    """Check every record and image, from the start or from where an earlier call stopped.

    Args:
        config: What is converted and how.
        progress: Show a progress bar.

    Returns:
        What became of the records.

    Raises:
        FileNotFoundError: If the source is not there.
        FileExistsError: If the output holds other files, or a conversion of another source or with other settings.
        ValueError: If the source is no list of records.
        CorruptDataError: If records have faults and `on_fault` is "raise"; the report is written first.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> said = [{"from": "human", "value": "<image>\\nWhat is it?"}, {"from": "gpt", "value": "A square."}]
        >>> _ = (folder / "all.json").write_text(json.dumps([{"id": "1", "image": "1.png", "conversations": said}]))
        >>> config = ConvertConversationsConfig(f"{folder}/all.json", f"{folder}/checked", on_fault="drop")
        >>> convert_conversations(config, progress=False).dropped
        {'image not found': 1}
    """
    records = read_records(Path(config.source))
    if not records:
        raise ValueError(f"{config.source!r} holds no record")
    files = ImageFiles(config.images or Path(config.source).parent, config.follow_links)
    parts = convert_items(
        config,
        records,
        len(records),
        lambda record: _check(record, config, files),
        lambda number, record: [number],
        # Hidden until the set is known to be sound.
        shards=".{}.tar" if config.shards else None,
        free_keys=("threads", "output", "on_fault"),
        unit="record",
        progress=progress,
    )
    report = _gather(Path(config.output), records, parts, config)
    if report.dropped and config.on_fault == "raise":
        raise CorruptDataError(f"{report}\n{Path(config.output) / DROPPED} names them; on_fault='drop' goes on without")
    return report


def _check(record: Any, config: ConvertConversationsConfig, files: ImageFiles) -> dict[str, bytes]:
    """Check a record and open its images, which are named by what they are and not by what their files are called."""
    try:
        check_record(record)
    except ValueError as error:
        raise DroppedItemError("unsound record", str(error)) from error
    members = {"json": json.dumps(record).encode()}
    for place, name in enumerate(image_names(record)):
        data = files.read(name)
        image, _ = check_image(data, config.min_size, f"{name}: ")
        members[f"{place}.{file_extension(image)}"] = data
    return members


def _gather(
    folder: Path, records: Sequence[Any], parts: Mapping[str, Mapping[str, Any]], config: ConvertConversationsConfig
) -> ConversationsReport:
    """Gather the parts' statistics into the report, and the sound records into one file if they may be all there is."""
    rows = [row for stats in parts.values() for row in stats["dropped"]]
    out = {row[0] for row in rows}
    sound = [record for place, record in enumerate(records) if place not in out]
    counts = Counter(len(image_names(record)) for record in sound)
    report = ConversationsReport(
        records=len(records),
        kept=len(sound),
        images={str(number): counts[number] for number in sorted(counts)},
        dropped=count_reasons(reason for _, reason, _ in rows),
        output=config.output,
    )
    write_report(folder, report, ["record", "reason", "details"], rows)
    if not rows or config.on_fault == "drop":
        for path in folder.glob(".*.tar"):
            os.replace(path, folder / path.name.removeprefix("."))
        write_atomically(folder / CHECKED, json.dumps(sound, ensure_ascii=False) + "\n")
    return report
