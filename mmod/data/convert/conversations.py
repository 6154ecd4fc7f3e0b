"""Check conversations in LLaVA's JSON format: every record, and every image to its last byte.

    mmod data conversations data/llava_v1_5_mix665k.json data/checked --images data/images
    mmod data conversations data/mine.jsonl data/checked --on_corrupt skip --shards true

The checked set is OUTPUT/conversations.json in the same format; dropped.csv lists invalid records with the reason. The
same command resumes an interrupted check. Invalid records are left out only with `--on_corrupt skip`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from mmod.data.convert.packing import PackConfig, check_image, file_extension, pack_shards, publish
from mmod.data.corrupt import UnusableError
from mmod.data.readers.images import ImageFiles, read_image
from mmod.data.records import check_record, image_names, read_records
from mmod.io.files import write_atomically
from mmod.values import check_fields

CHECKED = "conversations.json"


@dataclass(frozen=True)
class ConversationsConversion(PackConfig):
    """Settings of a check of conversations.

    Args:
        shard_size: Records that are checked before progress is saved, and records per shard.
        shards: Also write webdataset shards that contain the images.

    Raises:
        ValueError: If a value is out of range.
    """

    shard_size: Annotated[int, "[1, inf)"] = 5000
    shards: bool = False

    def __post_init__(self) -> None:
        if Path(self.source).suffix not in (".json", ".jsonl"):
            raise ValueError(f"source={self.source!r} must end in .json or .jsonl")
        check_fields(self)


def convert_conversations(config: ConversationsConversion, progress: bool = True) -> dict[str, object]:
    """Check every record and image and return the report; an interrupted check resumes.

    Raises:
        FileNotFoundError: If the source does not exist.
        FileExistsError: If the output holds other files, or a check of another source or with other settings.
        ValueError: If the source is no list of records, or an empty one.
        CorruptDataError: If a record is invalid and `on_corrupt` is "raise"; the report is written first.
    """
    records = read_records(Path(config.source))
    files = config.files()
    _, dropped = pack_shards(
        config,
        records,
        len(records),
        lambda number, record: _check(record, files),
        _id_of,
        shards=config.shards,
        progress=progress,
    )
    invalid = {row[0] for row in dropped}
    # By their number, because records need not have an id of their own.
    valid = [record for number, record in enumerate(records) if number not in invalid]
    images = Counter(len(image_names(record)) for record in valid)
    records_by_images = {str(count): images[count] for count in sorted(images)}
    report = publish(config, len(valid), dropped, records_by_images=records_by_images)
    write_atomically(Path(config.output) / CHECKED, json.dumps(valid, ensure_ascii=False) + "\n")
    return report


def _id_of(record: object) -> str:
    """Return the name of a record in the report; empty for what is no record."""
    if not isinstance(record, Mapping):
        return ""
    return str(record.get("id", ""))


def _check(record: Any, files: ImageFiles) -> dict[str, bytes]:
    """Check a record and its images; return the members of its sample."""
    try:
        check_record(record)
    except ValueError as error:
        raise UnusableError("invalid record", str(error)) from error
    members = {"json": json.dumps(record).encode()}
    for number, name in enumerate(image_names(record)):
        data = read_image(files.locate(name))
        image, _ = check_image(data, f"{name}: ")
        # The extension follows the content; file names may lie.
        members[f"{number}.{file_extension(image)}"] = data
    return members


CONVERSION = (ConversationsConversion, convert_conversations)
"""The settings and the function of the command."""
