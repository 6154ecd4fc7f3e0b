"""The figures of a report, with words, numbers and the command behind them, and means over audits of several runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from mmod.analysis.flop_report import FlopReport
from mmod.analysis.statistics import Estimate, difference
from mmod.analysis.style import PALETTE, Line, Style, add_hint, add_legend, new_figure, svg_of, tidy
from mmod.audits.across import Across
from mmod.audits.plots import draw_audit, draw_gaps
from mmod.report.sources import AuditRecord, RouterFigures, RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from typing_extensions import Unpack

# Titles of figures; see `mmod.training.engine.health`.
_TITLES = {
    "kept": "share of tokens kept",
    "same_positions": "the same positions in all images",
    "gradient": "share of scores with a gradient",
    "spread": "spread of scores",
    "gate": "mean gate",
}
_LINES: Mapping[str, Line] = {"train": "-", "val": "--", "ema": ":"}
# Most logged steps of a run on a page, so that it stays small.
_STEPS = 400
_RANKS = "rank correlation"
HEADER = ["model", "figure", "runs", "mean over runs"]


class Chart(NamedTuple):
    """A figure as SVG: its id, title, a description for those who do not see it, and the command behind it."""

    name: str
    title: str
    text: str
    svg: str
    command: str


def audit_charts(record: AuditRecord) -> list[Chart]:
    """Return the figures of an audit that have numbers, that of accuracy first."""
    audit = record.audit
    by_choice = [(choice.name, choice.accuracy.value) for choice in audit.conditions]
    text = f"Accuracy in percent of {record.name} with as many tokens chosen otherwise: {_listed(by_choice, '.1f')}."
    charts = [_chart(record, "conditions", "accuracy with each choice of tokens", text, draw_audit(audit))]
    for name, other, strata in (
        ("strata", "random tokens", audit.strata),
        ("baselines", "other models", audit.baselines),
    ):
        if strata:
            by_stratum = [(f"{one.group}: {one.name}", one.gap.value) for one in strata]
            text = f"Points of accuracy that {record.name} is above {other}: {_listed(by_stratum, '+.1f')}."
            title = f"points over {other} in subsets, with simultaneous 95 % intervals"
            charts.append(_chart(record, name, title, text, draw_gaps(strata, other)))
    kept = [(name, share.value) for name, share in audit.across.kept.items()]
    text = f"Share of tokens that each decision of {record.name} keeps, prefix tokens left out: {_listed(kept, '.2f')}."
    charts.append(_chart(record, "kept", "share of tokens kept", text, _draw_kept(audit.across)))
    if record.flops is not None:
        parts = _flops_by_part(record.flops)
        listed = [f"{part} {dense:.2f} and {routed:.2f}" for part, (dense, routed) in parts.items()]
        text = f"MFLOPs of a sample in {record.name}, dense and routed, by part: {', '.join(listed)}."
        charts.append(_chart(record, "flops", "FLOPs by part", text, _draw_flops(parts)))
    return charts


def _listed(values: Sequence[tuple[str, float]], form: str) -> str:
    return ", ".join(f"{name} {Estimate(value):{form}}" for name, value in values)


def _chart(record: AuditRecord, name: str, title: str, text: str, figure: Figure) -> Chart:
    # A name in HTML: that of a run may have folders.
    prefix = record.name.replace("/", "-")
    return Chart(f"{prefix}-{name}", f"{record.name}: {title}", text, svg_of(figure), record.command)


def _draw_kept(across: Across) -> Figure:
    """Draw the share of tokens that each block keeps, in one colour for the blocks of a decision."""
    blocks = sum(map(len, across.blocks.values()))
    figure = new_figure(max(4.0, 0.6 * blocks + 1.2), 2.6)
    axis = figure.subplots()
    handles = {}
    # One colour where every block decides for itself.
    is_shared = len(across.blocks) < blocks
    for number, (decision, followers) in enumerate(across.blocks.items()):
        name = f"decided in {decision}"
        share = across.kept[decision].value
        colour = PALETTE[number % len(PALETTE)] if is_shared else PALETTE[0]
        handles[name] = axis.bar(followers, share, color=colour)
        for bar, block in zip(handles[name], followers):
            add_hint(bar, f"{block}: {share:.3f}, {name}")
    axis.set(ylabel="share of tokens kept", ylim=(0, 1))
    tidy(axis)
    rotation = 45 if blocks > 6 else 0
    axis.tick_params(axis="x", rotation=rotation)
    if is_shared:
        add_legend(figure, handles, 2)
    return figure


def _flops_by_part(report: FlopReport) -> dict[str, tuple[float, float]]:
    """Return the MFLOPs of a sample in each part of a model, dense and routed."""
    blocks = report.blocks
    parts = {"everything else": (report.rest.dense, report.rest.routed)}
    for title, is_routed in (("dense blocks", False), ("routed blocks", True)):
        # A block is routed if it computes less, whatever method is on it.
        chosen = [block for block in blocks if (block.kept < block.tokens) == is_routed]
        computed = sum(block.routed - block.router - block.importance for block in chosen)
        parts[title] = (sum(block.dense for block in chosen), computed)
    parts["router"] = (0, sum(block.router for block in blocks))
    parts["importance"] = (0, report.importance)
    return {title: (dense / 1e6, routed / 1e6) for title, (dense, routed) in parts.items()}


def _draw_flops(parts: Mapping[str, tuple[float, float]]) -> Figure:
    figure = new_figure(7.6, 2.3)
    axis = figure.subplots()
    handles = {}
    models = ["dense", "routed"]
    left = [0.0, 0.0]
    for colour, (part, widths) in zip(PALETTE, parts.items()):
        handles[part] = axis.barh(models, widths, left=left, color=colour)
        for model, bar, width in zip(models, handles[part], widths):
            add_hint(bar, f"{model}, {part}: {width:.3f} MFLOPs")
        left = [start + width for start, width in zip(left, widths)]
    axis.invert_yaxis()
    axis.set_xlabel("MFLOPs per sample")
    tidy(axis, "x")
    add_legend(figure, handles, 5)
    return figure


def thinned(run: RunRecord) -> tuple[list[RouterFigures], int]:
    """Return the rows of every n-th logged step of a run, and n."""
    steps = sorted({row.step for row in run.rows})
    # Every n-th logged step, rounded up, and the last one.
    every = -(-len(steps) // _STEPS)
    chosen = {*steps[:: max(1, every)], *steps[-1:]}
    return [row for row in run.rows if row.step in chosen], every


def health_chart(run: RunRecord) -> Chart | None:
    """Return the figures of a run's routers at logged steps; None where nothing was logged."""
    if not run.rows:
        return None
    rows, every = thinned(run)
    kept = [row.kept for row in rows]
    text = (
        f"The routers of {run.name} keep {min(kept):.2f} to {max(kept):.2f} of the tokens over the logged steps; "
        f"shown are {', '.join(_TITLES.values())}."
    )
    title = f"{run.name}: routers while training"
    if every > 1:
        title += f", one logged step in {every}"
    command = "mmod train image|pairs|chat|text CONFIG  # the config.yaml of the run"
    prefix = run.name.replace("/", "-")
    return Chart(f"{prefix}-routers", title, text, svg_of(draw_health(rows)), command)


def draw_health(rows: Sequence[RouterFigures]) -> Figure:
    """Draw every figure that some row has over steps, with a line for each block."""
    panels = {}
    for name, title in _TITLES.items():
        if any(row.figures.get(name) is not None for row in rows):
            panels[name] = title
    # The same block has one colour in all panels.
    blocks = list(dict.fromkeys(row.block for row in rows))
    colours = {block: PALETTE[number % len(PALETTE)] for number, block in enumerate(blocks)}
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    legend_lines = -(-len(blocks) // (3 * columns))
    figure = new_figure(4.8 * columns, 2.4 * lines + 0.25 * legend_lines + 0.2)
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for axis in axes[len(panels) :]:
        axis.remove()
    handles: dict[str, Line2D] = {}
    for axis, (name, title) in zip(axes, panels.items()):
        for block, data in product(blocks, _LINES):
            logged = [row for row in rows if (row.block, row.data) == (block, data)]
            values = [(row.step, row.figures.get(name)) for row in logged]
            points = [(step, value) for step, value in values if value is not None]
            if not points:
                continue
            drawn = _draw_points(axis, points, color=colours[block], linestyle=_LINES[data])
            add_hint(drawn, f"{block}, {data}")
            label = block if data == "train" else f"{block}, {data}"
            handles.setdefault(label, drawn)
        axis.set(title=title, xlabel="optimiser steps")
        tidy(axis)
    add_legend(figure, handles, 3 * columns)
    return figure


def _draw_points(axis: Axes, points: Sequence[tuple[float, float]], **style: Unpack[Style]) -> Line2D:
    """Draw a line through some points, with a mark at each where they are few."""
    if len(points) < 30:
        style |= {"marker": "o", "markersize": 3}
    (drawn,) = axis.plot(*zip(*points), linewidth=1.3, **style)
    return drawn


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
            if not all(figure in figures for figures in runs):
                continue
            values = [figures[figure] for figures in runs]
            rows.append([name, figure, str(len(runs)), _mean(figure, values)])
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
    form = "+.1f"
    if figure.startswith(_RANKS):
        form = "+.2f"
    return format(over, form)
