"""The figure of a report that shows the routers of training runs over their steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmod.report.charts import COLOURS, Chart, described
from mmod.report.sources import RunRecord

__all__ = ["health_chart"]

# What a figure is called on the page; see `mmod.training.engine.health`.
_TITLES = {
    "kept": "share of tokens kept",
    "same_places": "the same places in all images",
    "gradient": "share of scores with a gradient",
    "spread": "spread of scores",
    "gate": "mean gate",
}
# Rows that a page holds, so that it stays small whatever the number of runs.
_ROWS = 4000


def health_chart(runs: Sequence[RunRecord]) -> Chart | None:
    """Return what routers did at logged steps, with a list of runs and a list of figures.

    Args:
        runs: Training runs; None of them were routed where nothing is returned.
    """
    every = -(-sum(len(run.rows) for run in runs) // _ROWS)
    rows = [{"run": run.name, **row} for run in runs for row in _thinned(run, every)]
    if not rows:
        return None
    blocks = list(dict.fromkeys(row["block"] for row in rows))
    switches = [
        {"name": name, "value": options[0], "bind": {"input": "select", "options": options, "name": f"{name} "}}
        for name, options in (("run", list(dict.fromkeys(row["run"] for row in rows))), ("figure", [*_TITLES.values()]))
    ]
    values = " : ".join(f"figure == '{title}' ? datum.{name}" for name, title in _TITLES.items())
    scale: dict[str, Any] = {"range": COLOURS} if len(blocks) <= len(COLOURS) else {"scheme": "category20"}
    shown = [{"field": name, "format": ".3g"} for name in _TITLES]
    spec = {
        "height": 260,
        "params": switches,
        "transform": [
            {"filter": "datum.run == run"},
            {"calculate": f"{values} : null", "as": "value"},
            {"filter": "isValid(datum.value)"},
        ],
        "mark": {"type": "line", "point": True, "strokeWidth": 1.5},
        "encoding": {
            "x": {"field": "step", "type": "quantitative", "title": "optimiser steps"},
            "y": {"field": "value", "type": "quantitative", "title": None},
            "color": {"field": "block", "sort": None, "scale": scale, "legend": {"orient": "bottom", "columns": 3}},
            "strokeDash": {
                "field": "data",
                "scale": {"domain": ["train", "val", "ema"]},
                "legend": {"orient": "bottom", "symbolType": "stroke"},
            },
            "tooltip": [{"field": "block"}, {"field": "data"}, {"field": "step"}, *shown],
        },
    }
    kept = [row["kept"] for row in rows]
    text = (
        f"Routers of {len(runs)} training runs over their steps, {len(blocks)} blocks by name; lists choose the run "
        f"and one of {', '.join(_TITLES.values())}. They keep {min(kept):.2f} to {max(kept):.2f} of the tokens."
    )
    title = "Routers while training" + (f", one logged step in {every}" if every > 1 else "")
    command = "mmod train image|pairs|chat|text CONFIG  # the config.yaml of the run"
    return Chart("routers", title, text, rows, described(spec, text, rows), command)


def _thinned(run: RunRecord, every: int) -> list[Mapping[str, Any]]:
    """Return every so manyth logged step of a run, and the last."""
    steps = sorted({row["step"] for row in run.rows})
    taken = {*steps[::every], *steps[-1:]}
    return [row for row in run.rows if row["step"] in taken]
