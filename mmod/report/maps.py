"""The figure of a report in which a slider chooses a block and shows which patches it keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mmod.report.charts import Chart
from mmod.report.sources import AuditRecord

__all__ = ["maps_chart"]

_VEIL, _VEIL_OPACITY = "#99adcc", 0.82
# Pixels of a sample image, and images beside each other: three fit on a phone.
_SIDE, _BESIDE = 96, 3


class _Grid(NamedTuple):
    """How images of so many patches are laid out, in patches; one is left free between images."""

    rows: int
    columns: int
    images: int

    @property
    def corners(self) -> list[tuple[int, int]]:
        """Left and top of each image."""
        places = [divmod(image, _BESIDE) for image in range(self.images)]
        return [(column * (self.columns + 1), row * (self.rows + 1)) for row, column in places]

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of all of them."""
        return _BESIDE * (self.columns + 1), -(-self.images // _BESIDE) * (self.rows + 1)


def maps_chart(records: Sequence[AuditRecord]) -> Chart | None:
    """Return what blocks keep of sample images, with a slider over blocks and a switch between models.

    Args:
        records: Audits. Those with other images than the first that has any are left out.

    Returns:
        The figure, or None where no audit has maps.
    """
    drawn = {record.name: record.maps for record in records if record.maps is not None}
    first = next(iter(drawn.values()), None)
    if first is None:
        return None
    same = {name: maps["blocks"] for name, maps in drawn.items() if maps["images"] == first["images"]}
    rows, columns = first["grid"]
    grid = _Grid(rows, columns, len(first["images"]))
    most = max(len(blocks) for blocks in same.values())
    labels, veils = _labels(same, grid, most), _veils(same, grid)
    text = (
        f"{grid.images} sample images; patches that the chosen routed block does not keep lie under a veil. A slider "
        f"chooses among up to {most} routed blocks, a list among {len(same)} models."
    )
    cell, (wide, high) = _SIDE / grid.columns, grid.size
    slider = {"input": "range", "min": 1, "max": most, "step": 1, "name": "routed block "}
    switch = {"input": "select", "options": list(same), "name": "model "}
    spec = {
        "description": text,
        "width": wide * cell,
        "height": (high + 1) * cell,
        # Whole pixels, so that no lines show between patches.
        "autosize": "pad",
        "params": [
            {"name": "model", "value": next(iter(same)), "bind": switch},
            {"name": "block", "value": 1, "bind": slider},
        ],
        "layer": _layers(first["images"], veils, labels, grid),
        "view": {"stroke": None},
    }
    commands = "\n".join(record.command for record in records if record.name in same)
    return Chart("maps", "Which patches each routed block keeps", text, labels, spec, commands)


def _labels(models: Mapping[str, Mapping[str, Any]], grid: _Grid, most: int) -> list[dict[str, Any]]:
    """Return what is said above the images for each model and number of a block."""
    found = []
    for model, blocks in models.items():
        patches = grid.rows * grid.columns * grid.images
        texts = [f"{name}: {sum(map(len, kept)) / patches:.0%} of the patches kept" for name, kept in blocks.items()]
        texts += ["no further routed block"] * (most - len(texts))
        found += [{"model": model, "block": number, "label": label} for number, label in enumerate(texts, 1)]
    return found


def _veils(models: Mapping[str, Mapping[str, Any]], grid: _Grid) -> list[dict[str, Any]]:
    """Return the numbers of the patches that each block leaves out of each image."""
    everything = range(grid.rows * grid.columns)
    return [
        {
            "model": model,
            "block": number,
            "x": x,
            "y": y,
            "skipped": [patch for patch in everything if patch not in own],
        }
        for model, blocks in models.items()
        for number, kept in enumerate(blocks.values(), 1)
        for (x, y), own in zip(grid.corners, kept)
    ]


def _layers(
    images: Sequence[str], veils: Sequence[Mapping[str, Any]], labels: Sequence[Mapping[str, Any]], grid: _Grid
) -> list[dict[str, Any]]:
    """Return images, veils over them, and what is said above."""
    cell, (wide, high) = _SIDE / grid.columns, grid.size
    axis = {"type": "quantitative", "axis": None}
    x, y = ({**axis, "scale": {"domain": [0, wide]}}, {**axis, "scale": {"domain": [high, -1]}})
    chosen = {"filter": "datum.model == model && datum.block == block"}
    pictures = [
        {"x": left + grid.columns / 2, "y": top + grid.rows / 2, "url": url}
        for (left, top), url in zip(grid.corners, images)
    ]
    edges = {
        "left": f"datum.x + datum.skipped % {grid.columns}",
        "top": f"datum.y + floor(datum.skipped / {grid.columns})",
        "right": "datum.left + 1",
        "bottom": "datum.top + 1",
    }
    return [
        {
            "data": {"values": pictures},
            "mark": {"type": "image", "width": _SIDE, "height": grid.rows * cell, "smooth": False},
            "encoding": {"x": {"field": "x", **x}, "y": {"field": "y", **y}, "url": {"field": "url"}},
        },
        {
            "data": {"values": veils},
            "transform": [
                chosen,
                {"flatten": ["skipped"]},
                *({"calculate": value, "as": name} for name, value in edges.items()),
            ],
            "mark": {"type": "rect", "color": _VEIL, "opacity": _VEIL_OPACITY},
            "encoding": {
                "x": {"field": "left", **x},
                "x2": {"field": "right"},
                "y": {"field": "top", **y},
                "y2": {"field": "bottom"},
            },
        },
        {
            "data": {"values": labels},
            "transform": [chosen],
            "mark": {"type": "text", "align": "left", "baseline": "bottom", "x": 0, "y": max(8.0, cell - 4)},
            "encoding": {"text": {"field": "label"}},
        },
    ]
