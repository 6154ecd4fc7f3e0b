"""Tables for the terminal, for notebooks, and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def _is_numeric(rows: Sequence[Sequence[str]], column: int) -> bool:
    return all(row[column][:1] in "+-.0123456789" for row in rows)


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned table; columns of numbers are set to the right.

    Example:
        >>> print(text_table(["block", "ms"], [["1", "2.0"], ["3", "12.5"]]))
        block    ms
            1   2.0
            3  12.5
    """
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    numeric = [_is_numeric(rows, column) for column in range(len(header))]
    lines = [
        "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(row, widths, numeric))
        for row in (header, *rows)
    ]
    return "\n".join(line.rstrip() for line in lines)


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]], above: Sequence[str]) -> str:
    """Return lines and a table as HTML, for notebooks; columns of numbers are set to the right.

    Example:
        >>> html_table(["block"], [["blocks.1"]], ["1 block"])
        '<p>1 block</p><table><tr><th>block</th></tr><tr><td>blocks.1</td></tr></table>'
    """
    sides = [" style='text-align: right'" if _is_numeric(rows, column) else "" for column in range(len(header))]
    lines = [
        "".join(f"<{tag}{side}>{escape(cell)}</{tag}>" for cell, side in zip(row, sides))
        for tag, row in zip(["th", *["td"] * len(rows)], [header, *rows] if rows else [])
    ]
    table = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<p>{'<br>'.join(map(escape, above))}</p><table>{table}</table>"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned Markdown table; numbers are right-aligned.

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
