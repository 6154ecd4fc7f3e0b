"""The figures of studies in a report, as Vega-Lite specifications: plain values that a browser draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmod.report.sources import StudyRecord

__all__ = ["COLOURS", "TICKS", "Chart", "described", "tradeoff_charts"]

# Okabe and Ito's palette, which stays apart for all common kinds of colour vision, on white and on black.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8a8f98"]
_UNITS = {"gflops": "GFLOPs per image", "ms": "ms per image"}
_SCORES = {"top1": "top-1 accuracy", "mean_iou": "mean IoU", "objects": "accuracy of patches of objects"}
TICKS = {"tickCount": {"expr": "ceil(width / 80)"}}
"""The axis of a quantity, with room for its numbers."""


@dataclass(frozen=True)
class Chart:
    """A figure.

    Args:
        name: Name of its files.
        title: What it shows.
        text: The same for those who do not see it, with the figures that matter.
        rows: The numbers behind it.
        spec: The Vega-Lite specification.
        command: The command that made the numbers.
    """

    name: str
    title: str
    text: str
    rows: Sequence[Mapping[str, Any]]
    spec: Mapping[str, Any]
    command: str


def tradeoff_charts(study: StudyRecord, command: str) -> list[Chart]:
    """Return a figure of score against each cost that was measured."""
    return [_tradeoff(study, cost, command) for cost in study.costs()]


def _tradeoff(study: StudyRecord, cost: str, command: str) -> Chart:
    measure = _SCORES.get(study.score, study.score)
    rows = [_point(study, row, cost) for row in study.rows]
    columns = list(dict.fromkeys(name for row in rows for name in row if name not in ("low", "high", "x", "y")))
    y = {"type": "quantitative", "scale": {"zero": False}, "title": f"{measure} in %"}
    # One legend of colours and shapes, for their domains are alike.
    series, legend = list(dict.fromkeys(row["series"] for row in rows)), {"orient": "bottom", "columns": 2}
    points = {
        "y": {"field": "y", **y},
        "shape": {"field": "series", "scale": {"domain": series}, "legend": legend},
        "tooltip": [{"field": name} for name in columns],
    }
    spec = {
        "height": 320,
        "encoding": {
            "x": {
                "field": "x", "type": "quantitative", "title": _title(cost), "scale": {"zero": False, "padding": 16},
                "axis": TICKS,
            },
            "color": {"field": "series", "scale": {"domain": series, "range": COLOURS}, "legend": legend},
            "opacity": {"condition": {"param": "chosen", "value": 1}, "value": 0.12},
        },
        "layer": [
            {"mark": {"type": "line", "strokeWidth": 1.5}, "encoding": {"y": {"field": "y", **y}}},
            {"mark": "rule", "encoding": {"y": {"field": "low", **y}, "y2": {"field": "high"}}},
            {
                "params": [{"name": "chosen", "select": {"type": "point", "fields": ["series"]}, "bind": "legend"}],
                "mark": {"type": "point", "filled": True, "size": 90},
                "encoding": points,
            },
        ],
    }  # fmt: skip
    dense = next((row for row in rows if row["series"] == "dense"), rows[0])
    best = max((row for row in rows if row is not dense), key=lambda row: float(row["y"]), default=dense)
    text = (
        f"{len(rows)} models of the study {study.name}: {measure} in percent against {_title(cost)}. {dense['model']} "
        f"has {dense['y']:.1f} at {dense['x']:.3g}; of the others {best['model']} has most, {best['y']:.1f} at "
        f"{best['x']:.3g}."
    )
    bars = "; bars are the standard deviation over seeds" if any(row["low"] != row["high"] for row in rows) else ""
    title = f"{measure[:1].upper()}{measure[1:]} against {_title(cost)}{bars}"
    return Chart(f"{study.name}-{cost}", title, text, rows, described(spec, text, rows), command)


def _point(study: StudyRecord, row: Mapping[str, Any], cost: str) -> dict[str, Any]:
    value, std = float(row[study.score]), row.get(f"{study.score}_std") or 0.0
    series = row.get("series") or row["name"]
    point = {
        "model": row["name"],
        "series": series,
        "x": row[cost],
        "y": value,
        "low": value - std,
        "high": value + std,
    }
    point |= {study.score: f"{value:.2f} ± {std:.2f}", cost: f"{row[cost]:.4g}"}
    for name, title in (("to_dense", "to dense"), ("to_control", "to control")):
        mean, low, high = (row.get(f"{name}/{part}") for part in ("mean", "low", "high"))
        if mean is not None:
            point[title] = f"{mean:+.1f}" + ("" if low is None else f" [{low:+.1f}, {high:+.1f}]")
    capacity = row.get("capacity")
    budget = "" if capacity is None else f"{capacity:g}"
    rival = study.config.get("rivals", {}).get(series, {}).get(budget)
    config = rival or study.config.get("routers", {}).get(series)
    if config is not None:
        shown = ", ".join(f"{name}: {value}" for name, value in config.items())
        point["config"] = f"{shown}, capacity: {budget}" if budget and not rival else shown
    return point


def described(spec: Mapping[str, Any], text: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a specification with its numbers and its description, as wide as the page.

    Args:
        spec: The specification.
        text: What it shows, for those who do not see it.
        rows: The numbers.
    """
    return {"description": text, "data": {"values": list(rows)}, "width": "container", **spec}


def _title(cost: str) -> str:
    """Return the title of a cost, such as "ms per image, batches of 8" of `latency_ms_b8`."""
    name, _, batch = cost.partition("_b")
    part, _, unit = f"_{name}".rpartition("_")
    details = [part.strip("_") if part != "_latency" else "", f"batches of {batch}" if batch else ""]
    return ", ".join([_UNITS[unit], *filter(None, details)])
