"""Convert a table of images and captions to webdataset shards.

    mmod data pairs data/captions.csv data/shards --image_column file --resize 384
    mmod data pairs annotations/captions_train2017.json data/coco --images data/train2017

SOURCE is a .csv, .tsv or .parquet table, or COCO's caption annotations in .json. The same command resumes an
interrupted conversion. Rows that cannot be converted are listed in dropped.csv with the reason.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from PIL import Image

from mmod.data.convert.packing import PackConfig, check_image, file_extension, pack_shards, publish
from mmod.data.corrupt import UnusableError
from mmod.data.labels import read_caption
from mmod.data.readers.images import ImageFiles, is_deep, read_image
from mmod.io.files import SIZES, check_file, open_rows, parse_json, write_json
from mmod.lazy import name_missing_extra
from mmod.values import check_fields

SUFFIXES = (".csv", ".tsv", ".parquet", ".json")
# Formats that every reader of shards decodes; other images are re-encoded as JPEG.
_PORTABLE = ("JPEG", "PNG", "WEBP")
_QUALITY = 95


@dataclass(frozen=True)
class PairsConversion(PackConfig):
    """Settings of a conversion of a table.

    Args:
        image_column: Column of image paths; in Parquet also of encoded images (bytes, or a record with `bytes`).
        caption_column: Column of captions.
        resize: Shrink images to this length of the shorter side, in pixels; None keeps files unchanged.

    Raises:
        ValueError: If a value is out of range, or the format of the table is unknown.
    """

    image_column: str = "image"
    caption_column: str = "caption"
    resize: Annotated[int | None, "[1, inf)"] = None

    def __post_init__(self) -> None:
        if self._suffix not in SUFFIXES:
            raise ValueError(f"source={self.source!r} must end in {', '.join(SUFFIXES)}")
        check_fields(self)

    @property
    def _suffix(self) -> str:
        return Path(self.source).suffix.lower()


class TableRow(NamedTuple):
    """One row of a table; its values may have any type.

    Attributes:
        image: Path of an image, an encoded image, or a record of either.
        caption: The caption.
        fault: Why the row cannot be read; empty for a valid row.
    """

    image: object
    caption: object
    fault: str = ""


def convert_pairs(config: PairsConversion, progress: bool = True) -> dict[str, object]:
    """Convert a table to shards and return the report; an interrupted conversion resumes.

    The shards come with `sizes.json` (samples per shard, for open_clip's training program), `dropped.csv` and
    `report.json`.

    Raises:
        FileNotFoundError: If the table does not exist.
        FileExistsError: If the output holds other files, or a conversion of another table or with other settings.
        ValueError: If the table has no rows or lacks a column; the message names its columns.
        ModuleNotFoundError: If the table is Parquet and pyarrow is not installed.
        CorruptDataError: If a row cannot be used and `on_corrupt` is "raise"; the report is written first.
    """
    total = count_rows(config)
    if not total:
        raise ValueError(f"{config.source!r} holds no row")
    files = config.files()
    counts, dropped = pack_shards(
        config,
        read_rows(config),
        total,
        lambda number, row: _convert(number, row, config, files),
        _image_label,
        progress=progress,
    )
    shards = {f"{number}.tar": samples for number, samples in counts.items()}
    report = publish(config, sum(shards.values()), dropped, shards=shards)
    write_json(Path(config.output) / SIZES, shards)
    return report


def _image_label(row: TableRow) -> str:
    """Return the name of a row's image in the report; a table may hold the image itself."""
    if isinstance(row.image, str):
        return row.image
    return "(bytes)"


def _convert(number: int, row: TableRow, config: PairsConversion, files: ImageFiles) -> dict[str, bytes]:
    """Return the members of a row's sample."""
    if row.fault:
        raise UnusableError("invalid row", row.fault)
    caption = read_caption(row.caption)
    extension, data, size, original = _encode(_read_image(row.image, files), config)
    record = {"caption": caption, "row": number, "status": "success", "width": size[0], "height": size[1]}
    record |= {"original_width": original[0], "original_height": original[1]}
    if isinstance(row.image, str):
        record["url"] = row.image
    return {extension: data, "txt": caption.encode(), "json": json.dumps(record).encode()}


def _read_image(image: object, files: ImageFiles) -> bytes:
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, bytes) and image:
        return image
    if not isinstance(image, str) or not image.strip():
        raise UnusableError("no image", repr(image))
    return read_image(files.locate(image))


def _encode(data: bytes, config: PairsConversion) -> tuple[str, bytes, tuple[int, int], tuple[int, int]]:
    """Check an image and re-encode it where needed; return extension, file, and its size after and before."""
    opened, image = check_image(data)
    original = opened.size
    short = min(opened.size)
    target = min(short, config.resize or short)
    if opened.format in _PORTABLE and not is_deep(opened) and target == short:
        return file_extension(opened), data, original, original
    if target < short:
        # The longer side in proportion, but never below the target, to which rounding may bring it.
        width, height = (max(target, round(side * target / short)) for side in original)
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, format="JPEG", quality=_QUALITY)
    return "jpg", file.getvalue(), image.size, original


def count_rows(config: PairsConversion) -> int:
    """Return the number of rows, after checking that the table can be read to its end."""
    check_file(config.source)
    if config._suffix == ".parquet":
        return int(_open_parquet(config).metadata.num_rows)
    # Counted by reading: a caption may hold line ends.
    return sum(1 for _ in read_rows(config))


def read_rows(config: PairsConversion) -> Iterator[TableRow]:
    """Yield the rows of a table in order."""
    return {".parquet": _read_parquet, ".json": _read_coco}.get(config._suffix, _read_csv)(config)


def _read_csv(config: PairsConversion) -> Iterator[TableRow]:
    delimiter = "\t" if config._suffix == ".tsv" else ","
    with open_rows(config.source, newline="") as file:
        reader = csv.DictReader(file, delimiter=delimiter)
        try:
            _check_columns(config, list(reader.fieldnames or ()))
            for row in reader:
                # Usually the text after a comma in an unquoted caption.
                extra = [text for text in row.get(None) or [] if text]
                fault = ""
                if extra:
                    fault = f"{extra!r} beyond the last column"
                image, caption = row[config.image_column], row[config.caption_column]
                if delimiter == "\t" and "\t" in f"{image}{caption}":
                    fault = "a quotation mark that is not closed joins it with the next lines"
                yield TableRow(image, caption, fault)
        except csv.Error as error:
            raise ValueError(f"{config.source!r}, line {reader.line_num}: {error}") from error


def _read_parquet(config: PairsConversion) -> Iterator[TableRow]:
    columns = [config.image_column, config.caption_column]
    for batch in _open_parquet(config).iter_batches(batch_size=256, columns=columns):
        # A batch is a list of columns; mapping over them gives rows.
        yield from map(TableRow, *(batch.column(name).to_pylist() for name in columns))


def _open_parquet(config: PairsConversion) -> Any:
    with name_missing_extra():
        from pyarrow.parquet import ParquetFile
    try:
        file = ParquetFile(config.source)
    except ValueError as error:
        raise ValueError(f"{config.source!r} is no Parquet table: {error}") from error
    _check_columns(config, file.schema_arrow.names)
    return file


def _read_coco(config: PairsConversion) -> Iterator[TableRow]:
    content = parse_json(Path(config.source).read_bytes(), repr(config.source))
    if not isinstance(content, dict):
        content = {}
    images = content.get("images")
    annotations = content.get("annotations")
    if not isinstance(images, list) or not isinstance(annotations, list):
        raise ValueError(f"{config.source!r} is no COCO annotation file: it needs lists `images` and `annotations`")
    names: dict[object, object] = {}
    for index, image in enumerate(images):
        if not _has_id(image, "id") or "file_name" not in image:
            raise ValueError(f"{config.source!r}: image {index} is not of the form {{id, file_name}}")
        # The same image may be listed twice; two files under one id are a mistake.
        if names.setdefault(image["id"], image["file_name"]) != image["file_name"]:
            raise ValueError(f"{config.source!r}: two images have the id {image['id']!r}")
    for index, annotation in enumerate(annotations):
        if not _has_id(annotation, "image_id"):
            yield TableRow(None, None, f"annotation {index} is not of the form {{image_id, caption}}")
        else:
            # An image that is not listed becomes None, and is refused as a row without an image.
            yield TableRow(names.get(annotation["image_id"]), annotation.get("caption"))


def _has_id(entry: object, key: str) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get(key), (int, str))


def _check_columns(config: PairsConversion, columns: list[str]) -> None:
    for field in ("image_column", "caption_column"):
        name = getattr(config, field)
        if columns.count(name) == 1:
            continue
        number = "more than one" if name in columns else "no"
        raise ValueError(f"{config.source!r} has {number} column {name!r} ({field}); it has {', '.join(columns)}")


CONVERSION = (PairsConversion, convert_pairs)
"""The settings and the function of the command."""
