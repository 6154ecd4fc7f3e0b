"""The figures of a report that show the routers of a training run over its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mmod.analysis.style import PALETTE, add_hint, add_legend, new_figure, tidy
from mmod.report.charts import Chart
from mmod.report.sources import RunRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["health_chart"]

# What a figure is called on the page; see `mmod.training.engine.health`.
_TITLES = {
    "kept": "share of tokens kept",
    "same_places": "the same places in all images",
    "gradient": "share of scores with a gradient",
    "spread": "spread of scores",
    "gate": "mean gate",
}
_LINES = {"train": "-", "val": "--", "ema": ":"}
# Logged steps of a run that a page holds, so that it stays small.
_STEPS = 400


def health_chart(run: RunRecord) -> Chart | None:
    """Return what the routers of a run did at logged steps; None where nothing was logged.

    Args:
        run: The training run.
    """
    steps = sorted({row["step"] for row in run.rows})
    every = -(-len(steps) // _STEPS)
    taken = {*steps[:: max(1, every)], *steps[-1:]}
    rows = [row for row in run.rows if row["step"] in taken]
    if not rows:
        return None
    kept = [row["kept"] for row in rows]
    text = (
        f"The routers of {run.name} keep {min(kept):.2f} to {max(kept):.2f} of the tokens over {len(steps)} logged "
        f"steps; shown are {', '.join(_TITLES.values())}."
    )
    title = f"{run.name}: routers while training" + (f", one logged step in {every}" if every > 1 else "")
    command = "mmod train image|pairs|chat|text CONFIG  # the config.yaml of the run"
    return Chart(f"{run.name.replace('/', '-')}-routers", title, text, rows, _draw(rows), command)


def _draw(rows: list[Mapping[str, Any]]) -> Figure:
    """Draw each figure that some row has over steps, a line for each block."""
    panels = {name: title for name, title in _TITLES.items() if any(row.get(name) is not None for row in rows)}
    blocks = list(dict.fromkeys(row["block"] for row in rows))
    handles: dict[str, Any] = {}
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure = new_figure(4.8 * columns, 2.4 * lines + 0.25 * -(-len(blocks) // (3 * columns)) + 0.2)
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for axis in axes[len(panels) :]:
        axis.remove()
    for axis, (name, title) in zip(axes, panels.items()):
        for number, block in enumerate(blocks):
            for data, line in _LINES.items():
                points = [
                    (row["step"], row[name])
                    for row in rows
                    if (row["block"], row["data"]) == (block, data) and row.get(name) is not None
                ]
                if points:
                    look = {"color": PALETTE[number % len(PALETTE)], "linestyle": line, "linewidth": 1.3}
                    mark = {"marker": "o", "markersize": 3} if len(points) < 30 else {}
                    (drawn,) = axis.plot(*zip(*points), **look, **mark)
                    add_hint(drawn, f"{block}, {data}")
                    handles.setdefault(block if data == "train" else f"{block}, {data}", drawn)
        axis.set(title=title, xlabel="optimiser steps")
        tidy(axis)
    add_legend(figure, handles, 3 * columns)
    return figure
