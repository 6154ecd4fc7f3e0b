"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned Markdown table; numbers are set to the right.

    Args:
        header: Titles of the columns.
        rows: Cells, as many in each row as there are titles.

    Example:
        >>> print(markdown_table(["name", "ms"], [["dense", "2.0"]]))
        | name  |  ms |
        | :---- | --: |
        | dense | 2.0 |
    """
    widths = [max(3, *(len(row[column]) for row in (header, *rows))) for column in range(len(header))]
    numeric = [all(not row[column] or row[column][:1].isdigit() for row in rows) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (c.rjust(w) if n else c.ljust(w) for c, w, n in zip(cells, widths, numeric))
        return f"| {' | '.join(padded)} |"

    rule = ["-" * (w - 1) + ":" if n else ":" + "-" * (w - 1) for w, n in zip(widths, numeric)]
    return "\n".join([line(header), line(rule), *map(line, rows)])
