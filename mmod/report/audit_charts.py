"""The figures of audits in a report, as Vega-Lite specifications."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmod.analysis.statistics import Estimate
from mmod.report.charts import COLOURS, TICKS, Chart, described
from mmod.report.sources import AuditRecord

__all__ = ["conditions_chart", "flops_chart", "gaps_chart", "kept_chart", "matrix_chart"]


def conditions_chart(record: AuditRecord) -> Chart:
    """Return the accuracy of a model with each choice of tokens.

    Args:
        record: The audit.
    """
    rows = [
        {"tokens kept": own.name, "kind": own.family, **_ends("accuracy", own.accuracy), "p": own.accuracy_p}
        for own in record.audit.conditions
    ]
    spec = _intervals(rows, "accuracy in %, 95 % interval", {"orient": "bottom"}, {"zero": False}, {})
    figures = ", ".join(f"{row['tokens kept']} {row['accuracy']:.1f}" for row in rows)
    text = f"Accuracy in percent of {record.name} with as many tokens chosen otherwise: {figures}."
    return _chart(record, "conditions", "accuracy with each choice of tokens", text, rows, spec)


def gaps_chart(record: AuditRecord, part: str) -> Chart | None:
    """Return how far a model is above what it is compared with in each stratum; None where none was asked for.

    Args:
        record: The audit.
        part: "strata", where the random choice of tokens is compared, or "beside", where other models are.
    """
    rows = [
        {
            "stratum": f"{own.group}: {own.name}",
            "by": own.group,
            **_ends("gap", own.gap),
            "images": own.images,
            "accuracy": own.accuracy.value,
            "p": own.accuracy_p,
        }
        for own in (record.audit.strata if part == "strata" else record.audit.beside)
    ]
    if not rows:
        return None
    other = "random tokens" if part == "strata" else "other models"
    # The two parts of a name below each other, so that both can be read on a phone.
    lines = {"labelExpr": "split(datum.label, ': ')"}
    spec = {**_intervals(rows, f"points over {other}", None, {}, lines), "height": {"step": 30}}
    figures = ", ".join(f"{row['stratum']} {row['gap']:+.1f}" for row in rows)
    text = f"Points of accuracy that {record.name} is above {other}: {figures}."
    return _chart(
        record,
        part,
        f"points over {other} in parts of the set, with intervals that hold together in 95 %",
        text,
        rows,
        spec,
    )


def _intervals(
    rows: Sequence[Mapping[str, Any]],
    title: str,
    legend: Mapping[str, Any] | None,
    scale: Mapping[str, Any],
    lines: Mapping[str, Any],
) -> dict[str, Any]:
    """Return intervals below each other; rows have a name, what colours it, a figure, `low`, `high` and more."""
    name, colour, figure, *_ = rows[0]
    x = {"type": "quantitative", "title": title, "scale": scale, "axis": TICKS}
    rule = {"x": {"field": "low", **x}, "x2": {"field": "high"}}
    return {
        "encoding": {
            "y": {"field": name, "type": "nominal", "sort": None, "title": None, "axis": lines},
            "color": {"field": colour, "scale": {"range": COLOURS}, "legend": legend},
            "tooltip": _tooltip(*rows[0]),
        },
        "layer": [
            {"mark": {"type": "rule", "strokeWidth": 2}, "encoding": rule},
            {"mark": {"type": "point", "filled": True, "size": 90}, "encoding": {"x": {"field": figure, **x}}},
        ],
    }


def matrix_chart(record: AuditRecord) -> Chart | None:
    """Return how often a token kept in one block is kept in another; None where the model decides once.

    Args:
        record: The audit.
    """
    across = record.audit.across
    names = across.decisions
    if len(names) < 2:
        return None
    rows = [
        {"kept in": i, "again in": j, **_ends("share", own), "by chance": across.kept[j].value}
        for i, row in zip(names, across.again)
        for j, own in zip(names, row)
        if own is not None
    ]
    shares = {"field": "share", "type": "quantitative", "scale": {"domain": [0, 1], "scheme": "blues"}}
    legible = {"condition": {"test": "datum.share > 0.6", "value": "white"}, "value": "black"}
    spec = {
        "height": {"step": 32},
        "encoding": {
            "y": {"field": "kept in", "type": "nominal", "sort": None},
            "x": {"field": "again in", "type": "nominal", "sort": None},
            "tooltip": _tooltip("kept in", "again in", "share", "low", "high", "by chance"),
        },
        "layer": [
            {"mark": "rect", "encoding": {"color": shares}},
            {"mark": "text", "encoding": {"text": {"field": "share", "format": ".2f"}, "color": legible}},
        ],
    }
    apart = [own.value for i, row in enumerate(across.again) for j, own in enumerate(row) if own is not None and i != j]
    spread = f": from {min(apart):.2f} to {max(apart):.2f} off the diagonal" if apart else ""
    text = f"Share of the tokens kept in one block of {record.name} that another keeps again{spread}."
    return _chart(record, "blocks", "P(kept in the column's block | kept in the row's)", text, rows, spec)


def kept_chart(record: AuditRecord) -> Chart:
    """Return the share of tokens that each block keeps.

    Args:
        record: The audit.
    """
    across = record.audit.across
    rows = [
        {
            "block": block,
            "decided in": name,
            "kept": across.kept[name].value,
        }
        for name, blocks in across.blocks.items()
        for block in blocks
    ]
    shares = {"field": "kept", "type": "quantitative", "scale": {"domain": [0, 1]}, "title": "share of tokens kept"}
    spec = {
        "height": 160,
        "mark": "bar",
        "encoding": {
            "x": {"field": "block", "type": "nominal", "sort": None},
            "y": shares,
            "color": {"field": "decided in", "scale": {"range": COLOURS}, "legend": {"orient": "bottom"}},
            "tooltip": _tooltip("block", "decided in", "kept"),
        },
    }
    listed = ", ".join(f"{row['block']} {row['kept']:.2f}" for row in rows)
    text = f"Share of tokens that each block of {record.name} keeps, prefix tokens left out: {listed}."
    return _chart(record, "kept", "share of tokens kept", text, rows, spec)


def flops_chart(record: AuditRecord) -> Chart | None:
    """Return the FLOPs of an image by part, dense and routed; None where they were not counted.

    Args:
        record: The audit.
    """
    report = record.flops
    if report is None:
        return None
    kinds: dict[str, list[dict[str, Any]]] = {"dense blocks": [], "routed blocks": []}
    for block in report["blocks"]:
        kinds["routed blocks" if block["kept"] < block["tokens"] else "dense blocks"].append(block)
    parts = {"everything else": (report["rest"]["dense"], report["rest"]["routed"])}
    for title, own in kinds.items():
        computed = sum(block["routed"] - block["router"] - block["importance"] for block in own)
        parts[title] = (sum(block["dense"] for block in own), computed)
    for title in ("router", "importance"):
        parts[title] = (0, sum(block[title] for block in report["blocks"]))
    rows = [
        {"model": model, "part": part, "MFLOPs": both[place] / 1e6}
        for place, model in enumerate(("dense", "routed"))
        for part, both in parts.items()
    ]
    legend = {"orient": "bottom", "columns": 2}
    spec = {
        "height": {"step": 36},
        "mark": "bar",
        "encoding": {
            "y": {"field": "model", "type": "nominal", "title": None},
            "x": {
                "field": "MFLOPs", "type": "quantitative", "stack": "zero", "title": "MFLOPs per image", "axis": TICKS
            },
            "color": {"field": "part", "sort": None, "scale": {"range": COLOURS}, "legend": legend},
            "order": {"field": "part"},
            "tooltip": _tooltip("model", "part", "MFLOPs"),
        },
    }  # fmt: skip
    text = (
        f"MFLOPs of an image in {record.name}: {report['dense'] / 1e6:.2f} dense, {report['routed'] / 1e6:.2f} routed, "
        f"of which {parts['router'][1] / 1e6:.2f} in routers and {parts['importance'][1] / 1e6:.2f} in importance."
    )
    return _chart(record, "flops", "FLOPs by part", text, rows, spec)


def _chart(
    record: AuditRecord, name: str, title: str, text: str, rows: Sequence[Mapping[str, Any]], spec: Mapping[str, Any]
) -> Chart:
    file = f"{record.name.replace('/', '-')}-{name}"
    return Chart(file, f"{record.name}: {title}", text, rows, described(spec, text, rows), record.command)


def _ends(name: str, own: Estimate) -> dict[str, float]:
    return {name: own.value, "low": own.low, "high": own.high}


def _tooltip(*names: str) -> list[dict[str, str]]:
    """Return what is shown of a mark: texts as they are, numbers with three decimals."""
    texts = ("tokens kept", "kind", "kept in", "again in", "block", "decided in", "model", "part", "stratum", "by")
    return [{"field": name} if name in texts else {"field": name, "format": ".3f"} for name in names]
