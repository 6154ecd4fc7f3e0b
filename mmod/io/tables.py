"""Tables in Markdown, for files, terminals and notebooks, and in CSV."""

from __future__ import annotations

import csv
import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mmod.io.files import write_atomically
from mmod.plain import without_nan

Column = tuple[str, str]
"""Title and format of a column. Before the format, `±` adds the value named `NAME_std` and `[` a spread's quartiles."""


_WIDTH = 120


class MarkdownTable(NamedTuple):
    """Rows of cells, the header first, with a caption; `print` shows Markdown."""

    rows: Sequence[Sequence[str]]
    caption: str = ""

    def __str__(self) -> str:
        header, *rows = self.rows
        table = markdown_table(header, rows)
        if not self.caption:
            return table
        return f"{table}\n\n{self.caption}"


def table_of(columns: Mapping[str, Column], rows: Sequence[Mapping[str, object]], caption: str = "") -> MarkdownTable:
    """Return values by column name as a table without empty rows and columns.

    Example:
        >>> rows = [{"name": "dense", "top1": 95.82, "top1_std": 0.11}, {"name": "shallow", "top1": 95.0}]
        >>> print(table_of({"name": ("model", ""), "top1": ("top-1 %", "±.1f"), "kept": ("kept", ".3f")}, rows))
        | model   |    top-1 % |
        | :------ | ---------: |
        | dense   | 95.8 ± 0.1 |
        | shallow |       95.0 |
    """
    cells = {}
    for name, (_, form) in columns.items():
        cells[name] = [_cell(row, name, form) for row in rows]
    used = [name for name, column in cells.items() if any(column)]
    # Rows and columns without a value are left out here, so that callers may offer more than was measured.
    lines = [line for line in zip(*(cells[name] for name in used)) if any(line)]
    return MarkdownTable([[columns[name][0] for name in used], *lines], caption)


def fitted(part: str | MarkdownTable) -> str:
    """Return a sentence in lines, or a table in several with the same first column, for terminals of 120 columns.

    Example:
        >>> wide = MarkdownTable([["block", *(f"kept again in block {number}" for number in range(5))], ["0"] * 6])
        >>> print(fitted(wide))
        | block | kept again in block 0 | kept again in block 1 | kept again in block 2 | kept again in block 3 |
        | ----: | --------------------: | --------------------: | --------------------: | --------------------: |
        |     0 |                     0 |                     0 |                     0 |                     0 |
        <BLANKLINE>
        | block | kept again in block 4 |
        | ----: | --------------------: |
        |     0 |                     0 |
    """
    if isinstance(part, str):
        return textwrap.fill(part, _WIDTH, break_long_words=False, break_on_hyphens=False)
    first, *columns = zip(*part.rows)
    texts = []
    while columns:
        count = len(columns)
        # One column is shown, however wide.
        while count > 1 and len(_aligned([first, *columns[:count]]).partition("\n")[0]) > _WIDTH:
            count -= 1
        texts.append(_aligned([first, *columns[:count]]))
        columns = columns[count:]
    if part.caption:
        texts.append(fitted(part.caption))
    return "\n\n".join(texts)


def _aligned(columns: Sequence[Sequence[str]]) -> str:
    header, *rows = zip(*columns)
    return markdown_table(header, rows)


def _cell(row: Mapping[str, object], name: str, form: str) -> str:
    value = row.get(name)
    if value is None:
        return ""
    if isinstance(value, float) and math.isnan(value):
        return "no samples"
    number = form.lstrip("±")
    if isinstance(value, float):
        # A plain number has no quartiles.
        number = form.lstrip("±[")
    text = format(value, number)
    if not form.startswith("±"):
        return text
    std = row.get(f"{name}_std")
    if std is None:
        return text
    return f"{text} ± {std:{number}}"


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows, which may lack columns, atomically; cells of numbers that are not finite are empty."""
    columns: dict[str, None] = {}
    for row in rows:
        columns.update(dict.fromkeys(row))
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(without_nan(rows))
    write_atomically(path, text.getvalue())


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned Markdown table; numbers are right-aligned."""
    widths = []
    numeric = []
    for title, *cells in zip(header, *rows):
        widths.append(max(3, len(title), *map(len, cells)))
        numeric.append(all(cell[:1] in "+-.0123456789" for cell in cells))

    def line(cells: Sequence[str]) -> str:
        padded = []
        for cell, width, is_number in zip(cells, widths, numeric):
            if is_number:
                cell = cell.rjust(width)
            padded.append(cell.ljust(width))
        return f"| {' | '.join(padded)} |"

    rule = []
    # A colon at the right end of a rule aligns its column to the right.
    for width, is_number in zip(widths, numeric):
        dashes = "-" * (width - 1)
        if is_number:
            rule.append(f"{dashes}:")
        else:
            rule.append(f":{dashes}")
    return "\n".join([line(header), line(rule), *map(line, rows)])
