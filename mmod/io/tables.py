"""Tables for the terminal and for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned table; columns of numbers are set to the right.

    Example:
        >>> print(text_table(["block", "ms"], [["1", "2.0"], ["3", "12.5"]]))
        block    ms
            1   2.0
            3  12.5
    """
    numeric = [all(row[column][:1] in "+-.0123456789" for row in rows) for column in range(len(header))]
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = [
        "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(row, widths, numeric))
        for row in (header, *rows)
    ]
    return "\n".join(line.rstrip() for line in lines)


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    """Return a table for a notebook, with a caption below."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    lines = "".join(line(row, "td") for row in rows)
    return (
        f"<table><caption style='caption-side: bottom; text-align: left'>{escape(caption)}</caption>"
        f"<thead>{line(header, 'th')}</thead><tbody>{lines}</tbody></table>"
    )
