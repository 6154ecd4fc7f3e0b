"""Tables in Markdown, plain text and HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


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


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows in aligned columns, the first one left-aligned.

    Example:
        >>> print(text_table([["block", "kept"], ["blocks.1", "5"]]))
        block     kept
        blocks.1     5
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in rows
    )


def html_table(rows: Sequence[Sequence[str]], above: Sequence[str] = ()) -> str:
    """Return lines and a table as HTML, for notebooks; the first row is the header.

    Example:
        >>> html_table([["block"], ["blocks.1"]], ["1 block"])
        '<p>1 block</p><table><tr><th>block</th></tr><tr><td>blocks.1</td></tr></table>'
    """
    lines = [
        "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) for tag, row in zip(["th", *["td"] * len(rows)], rows)
    ]
    text = f"<p>{'<br>'.join(map(escape, above))}</p>" if above else ""
    return f"{text}<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
