"""Tables of decisions as an audit keeps them, from plain masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmod.audits.choices import LEARNED, FreeDecision
from mmod.audits.tables import BatchRows, DecisionRows, Mask, TokenKinds


def decided(
    keeps: Mapping[str, Tensor],
    free_BN: Tensor,
    sizes: Sequence[int],
    kinds: Mapping[str, Any] | None = None,
    moved: Mapping[str, Sequence[Tensor]] | None = None,
    grid: tuple[int, int] | None = None,
) -> list[BatchRows]:
    """Return the rows of batches of these sizes, from masks of all images (I, N) and names of kinds."""
    batches: list[BatchRows] = []
    first = 0
    for size in sizes:
        rows = slice(first, first + size)
        decisions = {}
        for name, keep_BN in keeps.items():
            last = FreeDecision(keep_BN[rows][-1:], keep_BN[rows][-1:].float())
            masks = [Mask.of(moved_BF[rows]) for moved_BF in (moved or {}).get(name, ())]
            keep = Mask.of(keep_BN[rows] & free_BN[rows])
            decisions[name] = DecisionRows(keep, Mask.of(free_BN[rows]), last, masks)
        known = {name: TokenKinds.of(name_BN[rows]) for name, name_BN in (kinds or {}).items()}
        outcomes = {LEARNED: [{"loss": torch.zeros(size), "accuracy": torch.zeros(size)}]}
        batches.append(BatchRows(first, outcomes, decisions, kinds=known, grid=grid))
        first += size
    return batches
