"""Figures share their look: one colour for a name, labels that lie on nothing, SVG that needs no script."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest

from mmod.analysis.style import INK, PALETTE, add_hint, inline_svg, looks, new_figure, place_labels, svg_of


def luminance(colour: str) -> float:
    """Return the relative luminance of a colour, as the WCAG define it."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))


@pytest.mark.parametrize("paper", ["#ffffff", "#16181b"])
def test_colours_are_legible_on_light_and_dark_pages(paper: str) -> None:
    for colour in PALETTE:
        high, low = sorted((luminance(colour), luminance(paper)), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 3, colour


def test_colours_differ_at_a_glance() -> None:
    for one, other in itertools.combinations(PALETTE, 2):
        # A difference of 2.3 is just noticeable; those in lightness and hue add up.
        assert np.linalg.norm(lab(one) - lab(other)) >= 30, (one, other)


def lab(colour: str) -> Any:
    """Return lightness, a and b of a colour in CIELAB, with the white of D65."""
    rgb = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(to_xyz @ linear / to_xyz.sum(1))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_a_series_looks_alike_whatever_is_beside_it() -> None:
    names = ["dense", "a-mod", "mod", "random", "stride", "p-mod", "gradual"]
    together = looks(names)
    assert all(looks([name]) == {name: together[name]} for name in names)
    assert together["dense"]["color"] == INK


def test_no_two_series_of_a_figure_look_alike() -> None:
    styles = looks([f"series {number}" for number in range(40)] + ["random", "random, merged", "random, tuned"])
    assert len({(style["color"], style["marker"]) for style in styles.values()}) == len(styles)
    # While there are colours, no two have one, such as a series without a colour of its own and one with it.
    for other in ["gradual", "merge-late", "a-mod", "pixelprune", "tome", "prune", "smaller-image"], list("abcdefghi"):
        colours = {style["color"] for name, style in looks([*other, "dense", "random"]).items() if name in other}
        assert len(colours) == len(other)


def test_a_label_without_room_is_left_out() -> None:
    from matplotlib.transforms import Bbox

    figure = new_figure(2, 2)
    axis = figure.subplots()
    axis.set(xlim=(0, 1), ylim=(0, 1))
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    texts = [axis.text(0.5, 0.5, f"a long name {number}", fontsize=5) for number in range(90)]
    place_labels(axis, texts, [Bbox.from_extents(*axis.transData.transform((0.5, 0.5)), 120, 120)])
    boxes = [text.get_window_extent() for text in axis.texts if text.get_text()]
    assert 0 < len(boxes) < 90
    assert not any(one.overlaps(two) for one, two in itertools.combinations(boxes, 2))


def test_a_notebook_shows_a_figure_as_a_picture() -> None:
    figure: Any = new_figure(2, 1)
    figure.subplots().plot([1, 2])
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_svg_holds_texts_hints_and_the_colours_of_the_page() -> None:
    figure = new_figure(3, 2)
    axis = figure.subplots()
    (line,) = axis.plot([1, 2], color=INK)
    add_hint(line, 'dense: <93>\n& "more"')
    axis.set_title("a title")
    svg = svg_of(figure)
    assert ">a title</text>" in svg
    assert '<title>dense: &lt;93&gt;\n&amp; "more"</title>' in svg
    inline = [inline_svg(svg, name, "what it shows") for name in ("one/1", "two (2)")]
    assert all(drawing.startswith('<svg role="img" aria-label="what it shows"') for drawing in inline)
    assert all("var(--ink)" in drawing and INK not in drawing and "<script" not in drawing for drawing in inline)
    ids: list[set[Any]] = [set(re.findall(r' id="([^"]*)"', drawing)) for drawing in inline]
    assert not ids[0] & ids[1]
    for drawing, named in zip(inline, ids):
        assert set(re.findall(r'(?:url\(|href=")#([^")]*)', drawing)) <= named
