"""Rivals of routing on the same timm models: pruning, merging and early exit, each undone by one call.

They are here to be compared with: studies train, count and time them as they do routed models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from mmod.rivals.base import Rival, rival_of, undo_
from mmod.rivals.exit import Exit, exit_
from mmod.rivals.merge import Merge, merge_
from mmod.rivals.prune import Prune, prune_
from mmod.values import one_of, refuse_unknown

__all__ = ["Exit", "Merge", "Prune", "Rival", "exit_", "merge_", "prune_", "read_rival", "rival_of", "undo_"]

_KINDS: dict[str, type[Rival]] = {rival.kind: rival for rival in (Prune, Merge, Exit)}


def read_rival(values: Mapping[str, Any]) -> Rival:
    """Return the rival that plain values describe.

    Args:
        values: `kind`, and fields of that rival.

    Raises:
        TypeError: A value of the wrong type.
        ValueError: An unknown kind or field, or a value out of range.

    Example:
        >>> read_rival({"kind": "prune", "keep": 0.5, "blocks": [2], "fuse": False})
        Prune(keep=0.5, blocks=(2,), fuse=False, by='auto')
    """
    own = dict(values)
    one_of("rival.kind", own.get("kind"), list(_KINDS))
    kind = _KINDS[own.pop("kind")]
    refuse_unknown(f"field of rival {kind.kind}", own, [field.name for field in fields(kind)])
    return kind(**own)
