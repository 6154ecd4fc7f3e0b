"""The picture of an audit; functions return matplotlib figures and write nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmod.analysis.audit.result import Audit
from mmod.analysis.plots import FAINT, INK, MORE_COLOURS
from mmod.extras import name_missing_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_audit"]

_COLOURS = {"learned": INK, "random": FAINT, "position": MORE_COLOURS[1], "other": MORE_COLOURS[0]}


@name_missing_extra()
def draw_audit(audit: Audit) -> Figure:
    """Draw accuracy with each choice of tokens, and how often a token kept in one block is kept in another.

    Args:
        audit: What an audit found.

    Returns:
        A figure with two panels, the second only where the model decides more than once.
    """
    # A figure of its own rather than pyplot's, which would keep every figure alive and choose a window system.
    from matplotlib.figure import Figure

    panels = 1 + (len(audit.across.decisions) > 1)
    figure = Figure(figsize=(5.6 * panels, 0.5 * len(audit.conditions) + 1.6), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    _draw_conditions(axes[0], audit)
    if panels > 1:
        _draw_matrix(axes[1], audit)
    return figure


def _draw_conditions(axis: Axes, audit: Audit) -> None:
    for place, condition in enumerate(audit.conditions):
        own, colour = condition.accuracy, _COLOURS[condition.family]
        axis.plot([own.low, own.high], [place, place], color=colour, linewidth=1.6)
        axis.plot(own.value, place, marker="o", color=colour)
    axis.axvline(audit.conditions[0].accuracy.value, color=INK, linewidth=0.8, linestyle=":", zorder=0)
    axis.set_yticks(range(len(audit.conditions)), [condition.name for condition in audit.conditions])
    axis.invert_yaxis()
    axis.set_xlabel(f"accuracy in %, mean and 95 % interval over {audit.images} images", color=INK)
    axis.set_ylabel("tokens kept", color=INK)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_matrix(axis: Axes, audit: Audit) -> None:
    names = audit.across.decisions
    share = [[float("nan") if own is None else own.value for own in row] for row in audit.across.again]
    axis.imshow(share, vmin=0, vmax=1, cmap="Blues")
    axis.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axis.set_yticks(range(len(names)), names)
    for i, row in enumerate(audit.across.again):
        for j, own in enumerate(row):
            if own is not None:
                light = own.value > 0.6
                axis.text(j, i, f"{own.value:.2f}", ha="center", va="center", color="white" if light else INK)
    chance = ", ".join(f"{own.value:.2f}" for own in audit.across.kept.values())
    axis.set_title(f"kept again in the block of the column\n(independent: {chance})", fontsize=9, color=INK)
