"""Draw one small picture for each method: `python scripts/method_pictures.py [FOLDER]`.

Columns are blocks from left to right, rows are tokens (images for early exit, channels for a ResNet). A filled box is
computed; a box over several rows is a group that runs as one token; a line passes by; what is missing is gone.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline

from mmod.analysis.style import FAINT, INK, LINE, PALETTE, new_figure, svg_of

IMAGES = Path(__file__).parents[1] / "docs" / "images"
ROWS = 8
GAP = 0.14


class Box(NamedTuple):
    """A box in one column.

    Args:
        first: Its first row.
        rows: Number of rows that it spans.
        colour: Number of its colour in the palette; None passes by.
    """

    first: int
    rows: int = 1
    colour: int | None = 0


Column = list[Box]


def column(text: str) -> Column:
    """Return the boxes of a column from one sign a row.

    `#` is computed, `-` passes by, `.` is gone, `|` belongs to the group of the row above, and a digit is computed by
    the expert of this number.

    Example:
        >>> column("#|-.1")
        [Box(first=0, rows=2, colour=0), Box(first=2, rows=1, colour=None), Box(first=4, rows=1, colour=1)]
    """
    boxes: Column = []
    for row, sign in enumerate(text):
        if sign == "|":
            boxes[-1] = boxes[-1]._replace(rows=boxes[-1].rows + 1)
        elif sign != ".":
            boxes.append(Box(row, colour=None if sign == "-" else int(sign.replace("#", "0"))))
    return boxes


DENSE = "########"
PICTURES = {
    "mod": [DENSE, "#--#-##-", DENSE, "-##--#-#", DENSE, "##---#-#"],
    "a-mod": [DENSE, DENSE, "#-##-#-#", "##-#-#-#", "#--#-###", "##-#---#"],
    "mindskip": [DENSE, DENSE, DENSE, "--------", DENSE, "--------"],
    "pixelprune": ["#||#|##|"] * 6,
    "gradual": [DENSE, "#|##|###", "#|#||##|", "#||#||#|", "#||#|||#", DENSE],
    "late": [DENSE, DENSE, "#|##||#|", "##|#|##|", "#||#|##|", "#|#||##|"],
    "prune": [DENSE, DENSE, "#.##.#.#", "#.##.#.#", "#..#...#", "#..#...#"],
    "tome": [DENSE, "#|######", "#|##|###", "#|##|##|", "#||#|##|", "#||#||#|"],
    "resize": ["#|#|#|#|"] * 6,
    "exit": [DENSE, DENSE, "#.##.#.#", "#.##.#.#", "#..#....", "#..#...."],
    "experts": [DENSE, "01221020", DENSE, "10-2201-", DENSE, "2-01120-"],
    "recursions": [DENSE, "33333333", "3-33-3-3", "3--3---3", DENSE],
    "channels": [DENSE, "-#------", DENSE, "-----#--", DENSE, "#-------"],
}


def draw(axis: Axes, columns: list[str]) -> None:
    """Draw the columns, one shape for all boxes of a colour."""
    shapes: dict[str, list[Outline]] = {}
    for place, text in enumerate(columns):
        for box in column(text):
            colour = FAINT if box.colour is None else PALETTE[box.colour]
            top = ROWS - box.first
            height = box.rows - GAP
            if box.colour is None:
                height = 0.12
                top -= 0.38
            corners = [(place + GAP, top - height), (place + 1 - GAP, top - height), (place + 1 - GAP, top)]
            outline = Outline([*corners, (place + GAP, top), corners[0]], closed=True)
            shapes.setdefault(colour, []).append(outline)
    for colour, outlines in shapes.items():
        axis.add_patch(PathPatch(Outline.make_compound_path(*outlines), facecolor=colour, linewidth=0))
    axis.set(xlim=(-0.1, len(columns) + 0.1), ylim=(-0.9, ROWS + 0.2))
    axis.set_axis_off()
    axis.annotate("", (len(columns), -0.35), (0, -0.35), arrowprops={"arrowstyle": "->", "color": LINE})
    axis.text(len(columns) / 2, -0.85, "blocks", ha="center", va="center", fontsize=8, color=INK)


def main() -> None:
    """Write the pictures into a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=IMAGES, help="where to write; that of the docs")
    folder = parser.parse_args().folder
    for name, columns in PICTURES.items():
        figure = new_figure(2.4, 1.8)
        draw(figure.subplots(), columns)
        (folder / f"method_{name}.svg").write_text(svg_of(figure))


if __name__ == "__main__":
    main()
