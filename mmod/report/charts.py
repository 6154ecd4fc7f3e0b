"""The figures of a report: what studies and audits draw, with words, numbers and the command behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmod.analysis.audit.plots import draw_audit, draw_flops, draw_gaps, draw_kept, flops_by_part
from mmod.analysis.plots import draw_tradeoff
from mmod.analysis.statistics import Estimate
from mmod.report.sources import AuditRecord, StudyRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Chart", "audit_charts", "tradeoff_chart"]


@dataclass(frozen=True)
class Chart:
    """A figure.

    Args:
        name: Name of its files.
        title: What it shows.
        text: The same for those who do not see it, with the figures that matter.
        rows: The numbers behind it.
        figure: The figure.
        command: The command that made the numbers.
    """

    name: str
    title: str
    text: str
    rows: Sequence[Mapping[str, Any]]
    figure: Figure
    command: str


def tradeoff_chart(study: StudyRecord, command: str) -> Chart:
    """Return the scores of a study's models against each cost that was measured.

    Args:
        study: The study.
        command: The command that made it.
    """
    rows: list[dict[str, Any]] = [{**row, "note": _note(study, row)} for row in study.rows]
    figure = draw_tradeoff(rows, study.score, study.measure, study.costs)
    dense = next((row for row in rows if row["series"] == "dense"), rows[0])
    best = max((row for row in rows if row is not dense), key=lambda row: row[study.score], default=dense)
    cost, title = next(iter(study.costs.items()))
    text = (
        f"{len(rows)} models of the study {study.name}: {dense['name']} has {dense[study.score]:.1f} % {study.measure} "
        f"at {dense[cost]:.3g} {title}; of the others {best['name']} has most, {best[study.score]:.1f} % at "
        f"{best[cost]:.3g}."
    )
    name = f"{study.measure[:1].upper()}{study.measure[1:]}"
    return Chart(
        f"{study.name}-tradeoff", f"{name} against {', '.join(study.costs.values())}", text, rows, figure, command
    )


def _note(study: StudyRecord, row: Mapping[str, Any]) -> str:
    """Return differences and config of a model, which a browser shows where one points at it."""
    notes = []
    for name, title in (("to_dense", "to dense"), ("to_control", "to control")):
        mean, low, high = (row.get(f"{name}/{part}") for part in ("mean", "low", "high"))
        if mean is not None:
            notes.append(f"{title}: {mean:+.1f}" + ("" if low is None else f" [{low:+.1f}, {high:+.1f}]"))
    series, capacity = row["series"], row.get("capacity")
    budget = "" if capacity is None else f"{capacity:g}"
    rival = study.config.get("rivals", {}).get(series, {}).get(budget)
    config = rival or study.config.get("routers", {}).get(series)
    if config is not None:
        shown = {**config, **({} if rival or not budget else {"capacity": budget})}
        notes.append(", ".join(f"{name}: {value}" for name, value in shown.items()))
    return "\n".join(notes)


def audit_charts(record: AuditRecord) -> list[Chart]:
    """Return the figures of an audit, that of accuracy first; those without numbers are left out.

    Args:
        record: The audit.
    """
    audit, across = record.audit, record.audit.across

    def chart(name: str, title: str, text: str, rows: Sequence[Mapping[str, Any]], figure: Figure) -> Chart:
        file = f"{record.name.replace('/', '-')}-{name}"
        return Chart(file, f"{record.name}: {title}", text, rows, figure, record.command)

    rows: list[dict[str, Any]] = [
        {"tokens kept": own.name, "kind": own.family, **_ends("accuracy", own.accuracy), "p": own.accuracy_p}
        for own in audit.conditions
    ]
    listed = ", ".join(f"{row['tokens kept']} {row['accuracy']:.1f}" for row in rows)
    text = f"Accuracy in percent of {record.name} with as many tokens chosen otherwise: {listed}."
    apart = [own.value for i, row in enumerate(across.again) for j, own in enumerate(row) if own is not None and i != j]
    if apart:
        text += f" Tokens kept in one block are kept in another at a rate of {min(apart):.2f} to {max(apart):.2f}."
        rows += [
            {"tokens kept": f"in {i}, again in {j}", "kind": "blocks", **_ends("share", own)}
            for i, row in zip(across.decisions, across.again)
            for j, own in zip(across.decisions, row)
            if own is not None
        ]
    charts = [chart("conditions", "accuracy with each choice of tokens", text, rows, draw_audit(audit))]
    for name, other, strata in (("strata", "random tokens", audit.strata), ("beside", "other models", audit.beside)):
        rows = [
            {"by": own.group, "stratum": own.name, **_ends("gap", own.gap), "images": own.images, "p": own.accuracy_p}
            for own in strata
        ]
        if rows:
            listed = ", ".join(f"{row['by']}: {row['stratum']} {row['gap']:+.1f}" for row in rows)
            text = f"Points of accuracy that {record.name} is above {other}: {listed}."
            title = f"points over {other} in parts of the set, with intervals that hold together in 95 %"
            charts.append(chart(name, title, text, rows, draw_gaps(strata, other)))
    rows = [
        {"block": block, "decided in": name, "kept": across.kept[name].value}
        for name, blocks in across.blocks.items()
        for block in blocks
    ]
    listed = ", ".join(f"{row['block']} {row['kept']:.2f}" for row in rows)
    text = f"Share of tokens that each block of {record.name} keeps, prefix tokens left out: {listed}."
    charts.append(chart("kept", "share of tokens kept", text, rows, draw_kept(across)))
    if record.flops is not None:
        parts = flops_by_part(record.flops)
        rows = [{"part": part, "dense": dense / 1e6, "routed": routed / 1e6} for part, (dense, routed) in parts.items()]
        listed = ", ".join(f"{row['part']} {row['dense']:.2f} and {row['routed']:.2f}" for row in rows)
        text = f"MFLOPs of a sample in {record.name}, dense and routed, by part: {listed}."
        charts.append(chart("flops", "FLOPs by part", text, rows, draw_flops(record.flops)))
    if record.maps is not None:
        rows = [{"block": block, "kept": kept.float().mean().item()} for block, kept in record.maps.kept.items()]
        text = (
            f"{len(record.maps.images)} sample images; patches that a routed block of {record.name} drops are veiled."
        )
        charts.append(chart("maps", "patches that each routed block keeps", text, rows, record.maps.draw()))
    return charts


def _ends(name: str, own: Estimate) -> dict[str, float]:
    return {name: own.value, "low": own.low, "high": own.high}
