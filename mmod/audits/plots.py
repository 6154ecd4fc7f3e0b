"""The figures of an audit; functions return matplotlib figures and write nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mmod.analysis.statistics import Estimate
from mmod.analysis.style import FAINT, INK, PALETTE, PAPER, add_hint, new_figure, tidy
from mmod.audits.across import Across
from mmod.audits.result import Audit
from mmod.audits.strata import Stratum

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {"learned": INK, "random": FAINT, "position": PALETTE[1], "other": PALETTE[0]}


def draw_audit(audit: Audit) -> Figure:
    """Draw accuracy with each choice of tokens, and how often a token kept in one block is kept in another."""
    widths = [5.2]
    if len(audit.across.decisions) > 1:
        widths.append(0.5 * len(audit.across.decisions) + 1.8)
    heights = [0.36 * len(audit.conditions) + 1.2, *(side - 0.4 for side in widths[1:])]
    figure = new_figure(sum(widths), max(heights))
    axes = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]
    names = [condition.name for condition in audit.conditions]
    colours = [_COLOURS[condition.family] for condition in audit.conditions]
    _draw_intervals(axes[0], names, [condition.accuracy for condition in audit.conditions], colours)
    axes[0].axvline(audit.conditions[0].accuracy.value, color=FAINT, linewidth=0.8, linestyle=":", zorder=0)
    axes[0].set(xlabel=f"accuracy in %, 95 % interval over {audit.images} images", ylabel="tokens kept")
    tidy(axes[0], "x")
    if len(widths) > 1:
        _draw_matrix(axes[1], audit.across)
    return figure


def draw_gaps(strata: Sequence[Stratum], other: str) -> Figure:
    """Draw how far a model is above what it is compared with in each stratum, with intervals that hold together."""
    groups = list(dict.fromkeys(stratum.group for stratum in strata))
    figure = new_figure(7.6, 0.34 * len(strata) + 0.9)
    axis = figure.subplots()
    colours = [PALETTE[groups.index(stratum.group) % len(PALETTE)] for stratum in strata]
    names = [f"{stratum.group}: {stratum.name}" for stratum in strata]
    _draw_intervals(axis, names, [stratum.gap for stratum in strata], colours)
    axis.axvline(0, color=FAINT, linewidth=0.8, linestyle=":", zorder=0)
    axis.set_xlabel(f"points over {other}")
    tidy(axis, "x")
    return figure


def _draw_intervals(axis: Axes, names: Sequence[str], estimates: Sequence[Estimate], colours: Sequence[str]) -> None:
    for height, (name, estimate, colour) in enumerate(zip(names, estimates, colours)):
        axis.plot([estimate.low, estimate.high], [height, height], color=colour, linewidth=1.6)
        (mark,) = axis.plot(estimate.value, height, marker="o", color=colour)
        add_hint(mark, f"{name}: {estimate:.2f}")
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)


def _draw_matrix(axis: Axes, across: Across) -> None:
    from matplotlib.patches import Rectangle

    names = across.decisions
    for i, row in enumerate(across.again):
        for j, share in enumerate(row):
            # Nothing is shared where nothing was kept.
            if share is not None and math.isfinite(share.value):
                axis.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, color=PALETTE[0], alpha=share.value, linewidth=0))
                colour = PAPER if share.value > 0.6 else INK
                axis.text(j, i, f"{share.value:.2f}", ha="center", va="center", color=colour, fontsize=9)
    axis.set(xlim=(-0.5, len(names) - 0.5), ylim=(len(names) - 0.5, -0.5), aspect="equal")
    by_chance = [f"{name} ({Estimate(across.kept[name].value):.2f})" for name in names]
    axis.set_xticks(range(len(names)), by_chance, rotation=45, ha="right", rotation_mode="anchor")
    axis.set_yticks(range(len(names)), names)
    axis.set(ylabel="tokens kept in", xlabel="kept again in (by chance)")
    tidy(axis)
    axis.grid(False)
