"""Tables of decisions as an audit keeps them, from plain masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mmod.audits.tables import BatchTables, Mask, TokenKinds


def decided(
    keeps: Mapping[str, Tensor], free_BN: Tensor, sizes: Sequence[int], kinds: Mapping[str, Any] | None = None
) -> list[BatchTables]:
    """Return the tables of batches of these sizes, from masks of all images (I, N) and names of kinds."""
    tables: list[BatchTables] = []
    first = 0
    for size in sizes:
        rows = slice(first, first + size)
        keep = {name: Mask.of(keep_BN[rows] & free_BN[rows]) for name, keep_BN in keeps.items()}
        free = dict.fromkeys(keeps, Mask.of(free_BN[rows]))
        known = {name: TokenKinds.of(name_BN[rows]) for name, name_BN in (kinds or {}).items()}
        tables.append(BatchTables(first, size, keep, free, kinds=known))
        first += size
    return tables
