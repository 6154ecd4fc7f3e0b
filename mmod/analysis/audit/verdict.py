"""The verdict of an audit: what a router uses, what its choice is worth, and what the data would do without it."""

from __future__ import annotations

from typing import Literal

from mmod.analysis.audit.influence import Influence
from mmod.analysis.statistics import Estimate

Kind = Literal["content", "position", "both", "no better than random", "cannot be told"]
# Shares of position, of what content and position decide, between which a router uses both.
_BOTH = (0.25, 0.75)
# A choice of which content and position each decide less than that, and surely less than twice that, uses neither.
_NONE = 0.05
# Intervals of fewer images are too short.
_FEW = 10
# A router of which a fixed position reaches less than that share cannot use position alone.
_HALF = 0.5


def judge(
    gap: Estimate, explained: Estimate | None, best: str | None, margin: float, influence: Influence | None, *,
    is_clear: bool,
) -> tuple[Kind, str]:  # fmt: skip
    """Return what a router uses, and sentences that say so, what it is worth, and what a fixed position would do."""
    is_none = not is_clear and gap.high < margin
    if influence is None:
        kind, why = _without_moves(explained, is_none=is_none)
    else:
        kind, why = _of(influence, is_clear=is_clear), str(influence)
    leads = {
        "content": "The router uses content",
        "position": "The router uses position",
        "both": "The router uses content and position",
        "no better than random": "No better than random",
        "cannot be told": "Cannot be told whether the router uses content or position",
    }
    worth = f"{gap:+.1f} points of accuracy over random tokens (95 % interval)"
    if is_clear:
        worth = f"Its choice is worth {worth}."
    elif is_none:
        worth = f"Its choice is no better than random: {worth}."
    else:
        worth = f"These images are too few to say whether its choice is better than random: {worth}."
    return kind, f"{leads[kind]}: {why}. {worth}{_of_data(explained, best, is_clear=is_clear)}"


def _of(influence: Influence, *, is_clear: bool) -> Kind:
    """Return what a router uses by what decides where content is moved."""
    content, position, share = influence.content, influence.position, influence.position_share
    if influence.images < _FEW:
        return "cannot be told"
    if max(content.low, position.low) <= 0 or max(content.value, position.value) < _NONE:
        is_neither = max(content.high, position.high) < 2 * _NONE and not is_clear
        return "no better than random" if is_neither else "cannot be told"
    if share.value < _BOTH[0] and share.high < _HALF:
        return "content"
    if share.value > _BOTH[1] and share.low > _HALF:
        return "position"
    return "both" if min(content.low, position.low) > 0 else "cannot be told"


def _without_moves(explained: Estimate | None, *, is_none: bool) -> tuple[Kind, str]:
    """Return what a router uses where no content was moved, and why."""
    if is_none:
        return "no better than random", "other tokens would do as well"
    if explained is not None and explained.high < _HALF:
        return "content", "no fixed position reaches half of what its choice is worth"
    return "cannot be told", "its content was not moved, which needs batches of images on a known grid of patches"


def _of_data(explained: Estimate | None, best: str | None, *, is_clear: bool) -> str:
    """Return the sentence that says what a fixed position would reach on the data."""
    if explained is None:
        return " No fixed position was tried." if is_clear else ""
    share = 100 * explained
    if explained.high < 1:
        return f" On this data the best fixed position, {best!r}, reaches {share:.0f} % of that."
    return f" On this data a fixed position would do as well: {best!r} reaches {share:.0f} % of that."
