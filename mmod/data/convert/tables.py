"""Tables of images and captions: CSV, TSV, Parquet, and COCO's caption annotations."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mmod.io.files import check_regular, parse_json

SUFFIXES = (".csv", ".tsv", ".parquet", ".json")


class Row(NamedTuple):
    """One row, whose values may be of any kind.

    Attributes:
        number: Its number, from 0.
        image: Path of an image, an encoded image, or a record of either.
        caption: What is said of it.
        fault: What keeps the row from being read; empty where nothing does.
    """

    number: int
    image: Any
    caption: Any
    fault: str = ""


@dataclass(frozen=True)
class Table:
    """A table on disk.

    Args:
        source: The file; its suffix, one of `SUFFIXES`, says of what kind it is.
        image_column: Column of images.
        caption_column: Column of captions.
    """

    source: str
    image_column: str
    caption_column: str

    def count(self) -> int:
        """Return the number of rows.

        Raises:
            OSError: If the table cannot be read.
            ValueError: If it is no regular file, none of its kind, or lacks a column; the columns there are named.
            ModuleNotFoundError: If it is Parquet and pyarrow is not installed.
        """
        check_regular(self.source)
        if self._suffix == ".parquet":
            return int(self._open_parquet().metadata.num_rows)
        return sum(1 for _ in self.rows())

    def rows(self) -> Iterator[Row]:
        """Yield the rows in order; raises as `count` does."""
        read = {".parquet": self._read_parquet, ".json": self._read_coco}.get(self._suffix, self._read_csv)
        for number, values in enumerate(read()):
            yield Row(number, *values)

    @property
    def _suffix(self) -> str:
        return Path(self.source).suffix.lower()

    def _read_csv(self) -> Iterator[tuple[Any, Any, str]]:
        # Bytes that are no UTF-8 spoil their own row, not the whole table.
        with open(self.source, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            reader = csv.DictReader(file, delimiter="\t" if self._suffix == ".tsv" else ",")
            try:
                self._check_columns(list(reader.fieldnames or ()))
                for row in reader:
                    # Mostly what follows a comma in a caption without quotes.
                    beyond = [text for text in row.get(None) or [] if text]
                    fault = f"{beyond!r} beyond the last column" if beyond else ""
                    yield row[self.image_column], row[self.caption_column], fault
            except csv.Error as error:
                raise ValueError(f"{self.source!r}, line {reader.line_num}: {error}") from error

    def _read_parquet(self) -> Iterator[tuple[Any, Any]]:
        columns = [self.image_column, self.caption_column]
        for batch in self._open_parquet().iter_batches(batch_size=256, columns=columns):
            yield from zip(batch.column(columns[0]).to_pylist(), batch.column(columns[1]).to_pylist())

    def _open_parquet(self) -> Any:
        try:
            from pyarrow.parquet import ParquetFile
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("a .parquet table needs the package pyarrow: pip install pyarrow") from error
        try:
            file = ParquetFile(self.source)
        except ValueError as error:
            raise ValueError(f"{self.source!r} is no Parquet table: {error}") from error
        self._check_columns(file.schema_arrow.names)
        return file

    def _read_coco(self) -> Iterator[tuple[Any, Any, str]]:
        content = parse_json(Path(self.source).read_bytes(), repr(self.source))
        content = content if isinstance(content, dict) else {}
        images, annotations = content.get("images"), content.get("annotations")
        if not isinstance(images, list) or not isinstance(annotations, list):
            raise ValueError(f"{self.source!r} is no COCO annotation file: it needs lists `images` and `annotations`")
        names: dict[Any, Any] = {}
        for place, image in enumerate(images):
            if not isinstance(image, dict) or not isinstance(image.get("id"), (int, str)) or "file_name" not in image:
                raise ValueError(f"{self.source!r}: image {place} is not of the form {{id, file_name}}")
            if names.setdefault(image["id"], image["file_name"]) != image["file_name"]:
                raise ValueError(f"{self.source!r}: two images have the id {image['id']!r}")
        for place, annotation in enumerate(annotations):
            if not isinstance(annotation, dict) or not isinstance(annotation.get("image_id"), (int, str)):
                yield None, None, f"annotation {place} is not of the form {{image_id, caption}}"
            else:
                yield names.get(annotation["image_id"]), annotation.get("caption"), ""

    def _check_columns(self, found: list[str]) -> None:
        for field in ("image_column", "caption_column"):
            name = getattr(self, field)
            if found.count(name) != 1:
                raise ValueError(
                    f"{self.source!r} has {'no' if name not in found else 'more than one'} column {name!r} ({field}); "
                    f"it has {', '.join(found)}"
                )
