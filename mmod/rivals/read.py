"""Rivals from plain values, as configs hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from mmod.rivals.base import Rival
from mmod.rivals.channels import Channels
from mmod.rivals.exit import Exit
from mmod.rivals.experts import Experts
from mmod.rivals.merge import Merge
from mmod.rivals.prune import Prune
from mmod.rivals.recursions import Recursions
from mmod.values import one_of, refuse_unknown

KINDS: dict[str, type[Rival]] = {rival.kind: rival for rival in (Prune, Merge, Exit, Experts, Channels, Recursions)}


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
    one_of("rival.kind", own.get("kind"), list(KINDS))
    kind = KINDS[own.pop("kind")]
    refuse_unknown(f"field of rival {kind.kind}", own, [field.name for field in fields(kind)])
    return kind(**own)
