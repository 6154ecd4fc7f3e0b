"""Tables of figures in the docs from the JSON files beside them, which `python -m scripts.pages` writes.

`docs/results/PAGE.json` holds the tables of `docs/PAGE.md` by name, and `docs/notebook/results` those of the notebook's
pages: the `commands` that measure the figures, or `how` they were measured where no command does, the titles of the
`columns`, and the `rows`. A cell is a number, several numbers (a mean and its deviation, a difference and the ends of
its interval), text, null, or a ratio of figures in another table (see `ratio`). `formats` say how the numbers of each
column are written, `row_formats` those of each row. In the page a table stands between `<!-- table NAME -->` and
`<!-- end -->`.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
PLACE = re.compile(r"(?<=^<!-- table )(\S+) -->\n.*?(?=^<!-- end -->$)", re.MULTILINE | re.DOTALL)


def markdown(table: dict[str, Any]) -> str:
    """Return a table in Markdown.

    Example:
        >>> print(markdown({"columns": ["", "top-1"], "formats": ["", "{:.1f} ± {:.1f}"], "rows": [["a", [92, 0.8]]]}))
        | | top-1 |
        |---|---|
        | a | 92.0 ± 0.8 |
    """
    columns = table["columns"]
    lines = [columns, ["---"] * len(columns)]
    for number, row in enumerate(table["rows"]):
        forms = table["formats"] if "formats" in table else [table["row_formats"][number]] * len(columns)
        lines.append([_cell(value, form) for value, form in zip(row, forms, strict=True)])
    text = ["".join(f" {cell} |" if cell else " |" for cell in line) for line in lines]
    text[1] = text[1].replace(" ", "")
    return "\n".join(f"|{line}" for line in text)


def _cell(value: Any, form: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    values = value if isinstance(value, list) else [value]
    return form.format(*(ratio(**item) if isinstance(item, dict) else item for item in values))


def ratio(of: str, rows: Sequence[int], columns: Sequence[str], times: float) -> float:
    """Return the sum of some columns in one row of a table over that in another row.

    Args:
        of: The table, as `FILE#NAME`, the file relative to `docs`.
        rows: Numbers of the row above the line and of that below it.
        columns: Titles of the columns.
        times: A factor, 100 for percent.
    """
    file, _, name = of.partition("#")
    table = json.loads((DOCS / file).read_text())[name]
    places = [table["columns"].index(title) for title in columns]
    above, below = (sum(_first(table["rows"][number][place]) for place in places) for number in rows)
    return times * above / below


def _first(value: Any) -> float:
    return float(value[0] if isinstance(value, list) else value)


def written(page: str, tables: dict[str, Any]) -> str:
    """Return the text of a page with its tables written anew.

    Raises:
        ValueError: A table has no place in the page, or a place no table.
    """
    places = [place[1] for place in PLACE.finditer(page)]
    if sorted(places) != sorted(tables):
        raise ValueError(f"tables without a place or places without a table: {sorted(set(places) ^ set(tables))}")
    return PLACE.sub(lambda place: f"{place[1]} -->\n\n{markdown(tables[place[1]])}\n\n", page)


def pages() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the path of every page with tables of figures, and the tables."""
    for path in sorted(DOCS.rglob("results/*.json")):
        yield path.parents[1] / f"{path.stem}.md", json.loads(path.read_text())


def rewritten() -> Iterator[tuple[Path, str]]:
    """Yield every page with tables of figures, and its text with all of them written anew."""
    for path, tables in pages():
        yield path, written(path.read_text(), tables)
