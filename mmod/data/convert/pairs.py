"""Tables of images and captions become webdataset shards, as open_clip and LAION-style tools write them.

Every row of the table is checked and either becomes a sample or is reported with what kept it out. Shards are made one
after the other from fixed runs of rows, and one that is there is whole, so that a conversion goes on where it stopped.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from mmod.data.convert.resumable import DroppedItemError, check_image, convert_items, count_reasons, write_report
from mmod.data.convert.tables import SUFFIXES, Row, Table
from mmod.data.readers.image_files import ImageFiles
from mmod.data.readers.images import file_extension, is_deep
from mmod.data.synthetic.build import SIZES
from mmod.io.files import write_atomically
from mmod.values import check_fields

# Formats that every reader of shards knows.
_KEPT = ("JPEG", "PNG", "WEBP")


@dataclass(frozen=True)
class ConvertConfig:
    """Config of a conversion of a table.

    Args:
        source: The table: `.csv`, `.tsv` or `.parquet` with a header, or COCO's caption annotations in `.json` (a pair
            for each annotation).
        output: Folder of the shards.
        images: Folder that image paths are relative to; by default the one the table lies in.
        follow_links: Also take images outside of that folder to which symbolic links in it lead.
        image_column: Column of image paths, or in Parquet of encoded images (bytes, or a record that holds `bytes`).
        caption_column: Column of captions.
        shard_size: Rows that make up one shard.
        resize: Reduce images whose shorter side is longer than this to it, in pixels; None leaves files as they are.
        min_size: Images whose shorter side is below this are dropped, in pixels.
        max_aspect: Images whose longer side is more than this many times the shorter are dropped.
        quality: JPEG quality of images that are reduced, have more than 8 bits of grey, or are of a format other than
            JPEG, PNG and WebP.
        threads: Threads that read and encode images.

    Raises:
        ValueError: If a value is out of range, or the table is of no known kind.
    """

    source: str
    output: str
    images: str | None = None
    follow_links: bool = False
    image_column: str = "image"
    caption_column: str = "caption"
    shard_size: int = 10000
    resize: int | None = None
    min_size: int = 1
    max_aspect: float = 20.0
    quality: int = 95
    threads: int = 4

    def __post_init__(self) -> None:
        if Path(self.source).suffix.lower() not in SUFFIXES:
            raise ValueError(f"source={self.source!r} must end in {', '.join(SUFFIXES)}")
        least = dict.fromkeys(("shard_size", "min_size", "threads", "max_aspect", "resize"), "[1, inf)")
        check_fields(self, quality="[1, 100]", **least)


@dataclass(frozen=True)
class ConvertReport:
    """Outcome of a conversion of a table.

    Args:
        rows: Rows of the table.
        samples: Rows that became samples.
        dropped: Reason to the number of rows it kept out.
        shards: Name of each shard to its number of samples.
        output: Folder of the shards; `dropped.csv` in it names every row that was dropped.
    """

    rows: int
    samples: int
    dropped: dict[str, int]
    shards: dict[str, int]
    output: str

    def __str__(self) -> str:
        lines = [f"{self.samples} of {self.rows} rows became samples in {len(self.shards)} shards in {self.output}"]
        lines += [f"dropped {count}: {reason}" for reason, count in self.dropped.items()]
        return "\n".join(lines)


def convert_pairs(config: ConvertConfig, progress: bool = True) -> ConvertReport:
    """Convert a table to shards, from the start or from where an earlier call stopped.

    Beside the shards stand `sizes.json` (samples of each, for open_clip's program), `dropped.csv`, `report.json`, and
    for each shard `NNNNN_stats.json` with its numbers.

    Args:
        config: What is converted and how.
        progress: Show a progress bar.

    Returns:
        What became of the rows.

    Raises:
        FileNotFoundError: If the table is not there.
        FileExistsError: If the output holds other files, or a conversion of another table or with other settings.
        ValueError: If the table has no row or lacks a column; the columns there are named.
        ModuleNotFoundError: If the table is Parquet and pyarrow is not installed.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> Image.new("RGB", (8, 8)).save(folder / "a.png")
        >>> _ = (folder / "table.csv").write_text("image,caption\\na.png,a black square\\nb.png,nothing\\n")
        >>> print(convert_pairs(ConvertConfig(f"{folder}/table.csv", f"{folder}/shards"), progress=False).dropped)
        {'image not found': 1}
    """
    table = Table(config.source, config.image_column, config.caption_column)
    count = table.count()
    if not count:
        raise ValueError(f"{config.source!r} holds no row")
    files = ImageFiles(config.images or Path(config.source).parent, config.follow_links)
    parts = convert_items(
        config, table.rows(), count, lambda row: _convert(row, config, files), _label, progress=progress
    )
    folder = Path(config.output)
    shards = {f"{number}.tar": stats["samples"] for number, stats in parts.items()}
    dropped = [row for stats in parts.values() for row in stats["dropped"]]
    reasons = count_reasons(reason for _, _, reason, _ in dropped)
    report = ConvertReport(count, sum(shards.values()), reasons, shards, config.output)
    write_report(folder, report, ["row", "image", "reason", "details"], dropped)
    write_atomically(folder / SIZES, json.dumps(shards, indent=2) + "\n")
    return report


def _label(number: int, row: Row) -> list[Any]:
    return [number, row.image if isinstance(row.image, str) else "(bytes)"]


def _convert(row: Row, config: ConvertConfig, files: ImageFiles) -> dict[str, bytes]:
    """Make the members of a row's sample."""
    if row.fault:
        raise DroppedItemError("unsound row", row.fault)
    caption = _check_caption(row.caption)
    extension, data, size, original = _check_size(_read_image(row.image, files), config)
    record = {"caption": caption, "row": row.number, "status": "success", "width": size[0], "height": size[1]}
    record |= {"original_width": original[0], "original_height": original[1]}
    if isinstance(row.image, str):
        record["url"] = row.image
    return {extension: data, "txt": caption.encode(), "json": json.dumps(record).encode()}


def _check_caption(caption: Any) -> str:
    if not isinstance(caption, str) or not caption.strip():
        raise DroppedItemError("no caption", repr(caption))
    try:
        caption.encode()
    except UnicodeEncodeError as error:
        raise DroppedItemError("caption is not UTF-8", ascii(caption)) from error
    return caption.strip()


def _read_image(image: Any, files: ImageFiles) -> bytes:
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, bytes) and image:
        return image
    if not isinstance(image, str) or not image.strip():
        raise DroppedItemError("no image", repr(image))
    return files.read(image)


def _check_size(data: bytes, config: ConvertConfig) -> tuple[str, bytes, tuple[int, int], tuple[int, int]]:
    """Decode an image to its end; return extension, file, and its size now and before."""
    opened, image = check_image(data, config.min_size)
    original = opened.size
    short, long = min(original), max(original)
    if long > config.max_aspect * short:
        raise DroppedItemError("image too long", f"{original[0]} x {original[1]}")
    plain = opened.format in _KEPT and not is_deep(opened)
    if plain and (config.resize is None or short <= config.resize):
        return file_extension(opened), data, original, original
    if config.resize is not None and short > config.resize:
        scale = config.resize / short
        size = max(config.resize, round(original[0] * scale)), max(config.resize, round(original[1] * scale))
        image = image.resize(size, Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, format="JPEG", quality=config.quality)
    return "jpg", file.getvalue(), image.size, original
