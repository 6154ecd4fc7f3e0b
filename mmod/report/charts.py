"""The figures of a report, with words, numbers and the command behind them, and means over audits of several runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmod.analysis.statistics import Estimate, difference
from mmod.analysis.style import PALETTE, add_hint, add_legend, new_figure, svg_of, tidy
from mmod.audits.plots import draw_audit, draw_gaps
from mmod.audits.strata import Stratum
from mmod.report.sources import AuditRecord, RunRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Titles of figures; see `mmod.training.engine.health`.
_TITLES = {
    "kept": "share of tokens kept",
    "same_positions": "the same positions in all images",
    "gradient": "share of scores with a gradient",
    "spread": "spread of scores",
    "gate": "mean gate",
}
_LINES = {"train": "-", "val": "--", "ema": ":"}
# Most logged steps of a run on a page, so that it stays small.
_STEPS = 400
_RANKS = "rank correlation"
HEADER = ["model", "figure", "runs", "mean over runs"]


@dataclass(frozen=True)
class Chart:
    """A figure as SVG: name of its files, title, a description for those who do not see it, numbers, and command."""

    name: str
    title: str
    text: str
    rows: Sequence[Mapping[str, Any]]
    svg: str
    command: str


def audit_charts(record: AuditRecord) -> list[Chart]:
    """Return the figures of an audit that have numbers, that of accuracy first."""
    charts = [
        _conditions_chart(record),
        _gaps_chart(record, "strata", "random tokens", record.audit.strata),
        _gaps_chart(record, "baselines", "other models", record.audit.baselines),
        _kept_chart(record),
        _flops_chart(record),
    ]
    return [chart for chart in charts if chart is not None]


def _chart(
    record: AuditRecord, name: str, title: str, text: str, rows: Sequence[Mapping[str, object]], figure: Figure
) -> Chart:
    file = f"{record.name.replace('/', '-')}-{name}"
    return Chart(file, f"{record.name}: {title}", text, rows, svg_of(figure), record.command)


def _conditions_chart(record: AuditRecord) -> Chart:
    """Return accuracy with each choice of tokens and, of several blocks, how often tokens are kept again."""
    rows: list[dict[str, Any]] = []
    for choice in record.audit.conditions:
        accuracy = _ends("accuracy", choice.accuracy)
        rows.append({"tokens kept": choice.name, "kind": choice.family, **accuracy, "p": choice.accuracy_p})
    listed = ", ".join(f"{row['tokens kept']} {row['accuracy']:.1f}" for row in rows)
    text = f"Accuracy in percent of {record.name} with as many tokens chosen otherwise: {listed}."
    across = record.audit.across
    shares = []
    pairs: list[dict[str, object]] = []
    for i, row in zip(across.decisions, across.again):
        for j, kept in zip(across.decisions, row):
            if kept is None:
                continue
            pairs.append({"tokens kept": f"in {i}, again in {j}", "kind": "blocks", **_ends("share", kept)})
            # Nothing is kept again where nothing was kept.
            if i != j and not math.isnan(kept.value):
                shares.append(kept.value)
    if shares:
        text += f" Tokens kept in one block are kept in another at a rate of {min(shares):.2f} to {max(shares):.2f}."
        rows += pairs
    title = "accuracy with each choice of tokens"
    return _chart(record, "conditions", title, text, rows, draw_audit(record.audit))


def _gaps_chart(record: AuditRecord, name: str, other: str, strata: Sequence[Stratum]) -> Chart | None:
    """Return how far a model is above what it is compared with in each stratum; None without strata."""
    rows: list[dict[str, Any]] = []
    for one in strata:
        gap = _ends("gap", one.gap)
        rows.append({"by": one.group, "stratum": one.name, **gap, "images": one.images, "p": one.accuracy_p})
    if not rows:
        return None
    listed = ", ".join(f"{row['by']}: {row['stratum']} {row['gap']:+.1f}" for row in rows)
    text = f"Points of accuracy that {record.name} is above {other}: {listed}."
    title = f"points over {other} in subsets, with simultaneous 95 % intervals"
    return _chart(record, name, title, text, rows, draw_gaps(strata, other))


def _kept_chart(record: AuditRecord) -> Chart:
    """Return the share of tokens that each block keeps."""
    across = record.audit.across
    rows: list[dict[str, Any]] = []
    for name, blocks in across.blocks.items():
        rows += [{"block": block, "decided in": name, "kept": across.kept[name].value} for block in blocks]
    listed = ", ".join(f"{row['block']} {Estimate(row['kept']):.2f}" for row in rows)
    text = f"Share of tokens that each block of {record.name} keeps, prefix tokens left out: {listed}."
    return _chart(record, "kept", "share of tokens kept", text, rows, _draw_kept(rows))


def _flops_chart(record: AuditRecord) -> Chart | None:
    """Return the FLOPs of a sample by part, dense and routed; None where they were not counted."""
    if record.flops is None:
        return None
    rows = _flops_by_part(record.flops)
    listed = ", ".join(f"{row['part']} {row['dense']:.2f} and {row['routed']:.2f}" for row in rows)
    text = f"MFLOPs of a sample in {record.name}, dense and routed, by part: {listed}."
    return _chart(record, "flops", "FLOPs by part", text, rows, _draw_flops(rows))


def _ends(name: str, estimate: Estimate) -> dict[str, float]:
    return {name: estimate.value, "low": estimate.low, "high": estimate.high}


def _draw_kept(rows: Sequence[Mapping[str, Any]]) -> Figure:
    figure = new_figure(max(4.0, 0.6 * len(rows) + 1.2), 2.6)
    axis = figure.subplots()
    handles = {}
    decisions = list(dict.fromkeys(row["decided in"] for row in rows))
    # One colour where every block decides for itself.
    is_shared = len(decisions) < len(rows)
    for row in rows:
        number = decisions.index(row["decided in"])
        name = f"decided in {row['decided in']}"
        colour = PALETTE[number % len(PALETTE)] if is_shared else PALETTE[0]
        handles[name] = axis.bar(row["block"], row["kept"], color=colour)
        add_hint(handles[name][0], f"{row['block']}: {row['kept']:.3f}, {name}")
    axis.set(ylabel="share of tokens kept", ylim=(0, 1))
    tidy(axis)
    axis.tick_params(axis="x", rotation=45 if len(rows) > 6 else 0)
    if is_shared:
        add_legend(figure, handles, 2)
    return figure


def _flops_by_part(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the MFLOPs of a sample in each part of a model, dense and routed."""
    blocks = report["blocks"]
    parts = {"everything else": (report["rest"]["dense"], report["rest"]["routed"])}
    for title, is_routed in (("dense blocks", False), ("routed blocks", True)):
        # A block is routed if it computes less, whatever method is on it.
        chosen = [block for block in blocks if (block["kept"] < block["tokens"]) == is_routed]
        computed = sum(block["routed"] - block["router"] - block["importance"] for block in chosen)
        parts[title] = (sum(block["dense"] for block in chosen), computed)
    parts |= {title: (0, sum(block[title] for block in blocks)) for title in ("router", "importance")}
    return [{"part": title, "dense": dense / 1e6, "routed": routed / 1e6} for title, (dense, routed) in parts.items()]


def _draw_flops(rows: Sequence[Mapping[str, Any]]) -> Figure:
    figure = new_figure(7.6, 2.3)
    axis = figure.subplots()
    handles = {}
    models = ["dense", "routed"]
    left = [0.0, 0.0]
    for colour, row in zip(PALETTE, rows):
        widths = [row[model] for model in models]
        handles[row["part"]] = axis.barh(models, widths, left=left, color=colour)
        for model, bar in zip(models, handles[row["part"]]):
            add_hint(bar, f"{model}, {row['part']}: {row[model]:.3f} MFLOPs")
        left = [start + width for start, width in zip(left, widths)]
    axis.invert_yaxis()
    axis.set_xlabel("MFLOPs per sample")
    tidy(axis, "x")
    add_legend(figure, handles, 5)
    return figure


def health_chart(run: RunRecord) -> Chart | None:
    """Return the figures of a run's routers at logged steps; None where nothing was logged."""
    steps = sorted({row["step"] for row in run.rows})
    # Every n-th logged step, rounded up, and the last one.
    every = -(-len(steps) // _STEPS)
    chosen = {*steps[:: max(1, every)], *steps[-1:]}
    rows = [row for row in run.rows if row["step"] in chosen]
    if not rows:
        return None
    kept = [row["kept"] for row in rows]
    text = (
        f"The routers of {run.name} keep {min(kept):.2f} to {max(kept):.2f} of the tokens over {len(steps)} logged "
        f"steps; shown are {', '.join(_TITLES.values())}."
    )
    title = f"{run.name}: routers while training"
    if every > 1:
        title += f", one logged step in {every}"
    command = "mmod train image|pairs|chat|text CONFIG  # the config.yaml of the run"
    return Chart(f"{run.name.replace('/', '-')}-routers", title, text, rows, svg_of(draw_health(rows)), command)


def draw_health(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw every figure that some row has over steps, with a line for each block."""
    panels = {name: title for name, title in _TITLES.items() if any(row.get(name) is not None for row in rows)}
    blocks = list(dict.fromkeys(row["block"] for row in rows))
    handles: dict[str, object] = {}
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure = new_figure(4.8 * columns, 2.4 * lines + 0.25 * -(-len(blocks) // (3 * columns)) + 0.2)
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for axis in axes[len(panels) :]:
        axis.remove()
    for axis, (name, title) in zip(axes, panels.items()):
        for number, block in enumerate(blocks):
            for data, line in _LINES.items():
                logged = [row for row in rows if (row["block"], row["data"]) == (block, data)]
                points = [(row["step"], row[name]) for row in logged if row.get(name) is not None]
                if not points:
                    continue
                look = {"color": PALETTE[number % len(PALETTE)], "linestyle": line, "linewidth": 1.3}
                mark = {"marker": "o", "markersize": 3} if len(points) < 30 else {}
                (drawn,) = axis.plot(*zip(*points), **look, **mark)
                add_hint(drawn, f"{block}, {data}")
                label = block if data == "train" else f"{block}, {data}"
                handles.setdefault(label, drawn)
        axis.set(title=title, xlabel="optimiser steps")
        tidy(axis)
    add_legend(figure, handles, 3 * columns)
    return figure


def rows_over_runs(audits: Sequence[AuditRecord]) -> list[list[str]]:
    """Return a row for each figure and name that several runs have, with 95 % intervals over the runs."""
    groups: dict[str, list[dict[str, float]]] = {}
    for record in audits:
        groups.setdefault(record.name.rpartition("/")[2], []).append(_figures(record))
    rows = []
    for name, runs in groups.items():
        if len(runs) < 2:
            continue
        for figure in runs[0]:
            if all(figure in figures for figures in runs):
                rows.append([name, figure, str(len(runs)), _mean(figure, [figures[figure] for figures in runs])])
    return rows


def _figures(record: AuditRecord) -> dict[str, float]:
    """Return the figures of an audit that can be averaged over runs."""
    audit = record.audit
    generation = record.generation
    learned, *others = audit.conditions
    figures = {f"points above {choice.name}": learned.accuracy.value - choice.accuracy.value for choice in others}
    figures |= {f"points above random, {one.group}: {one.name}": one.gap.value for one in audit.strata}
    figures |= {f"points above {one.group}, {one.name}": one.gap.value for one in audit.baselines}
    for block, facts in audit.across.information.items():
        for known, information in facts.items():
            figures[f"% of the decision in {block} explained by {known}"] = 100 * information.share.value
    if generation is not None:
        for stretch in generation.stretches:
            where = f"of {stretch.text} tokens {stretch.first} to {stretch.last}"
            figures[f"% {where} decided as the top-k by the {generation.by}"] = 100 * stretch.agreement.value
            figures[f"% {where} decided so, above chance"] = 100 * stretch.above_chance.value
            figures[f"% {where} kept"] = 100 * stretch.kept.value
    if audit.leave_one_out is not None:
        correlations = {"score": audit.leave_one_out.agreement, "token norm": audit.leave_one_out.norm}
        for what, blocks in correlations.items():
            for block, correlation in blocks.items():
                figures[f"{_RANKS} of {what} and worth in {block}"] = correlation.value
    # A figure of no samples has no mean over runs.
    return {name: value for name, value in figures.items() if not math.isnan(value)}


def _mean(figure: str, values: Sequence[float]) -> str:
    # Against zero: the interval of a mean over runs is that of differences to it.
    over = difference(dict(enumerate(values)), dict.fromkeys(range(len(values)), 0.0))
    return format(over, "+.2f" if figure.startswith(_RANKS) else "+.1f")
