"""Tables of batches: masks come back as they were, and nothing but rows and packed masks is kept."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import mmod
from mmod.audits import run
from mmod.audits.tables import BatchRows
from tests.kit.interrupted_audit import options


def test_an_audit_keeps_rows_and_packed_masks_and_no_numbers_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[BatchRows] = []
    result_of = run.result_of

    def look(batches: Any, *rest: Any) -> Any:
        kept.extend(batches)
        return result_of(batches, *rest)

    monkeypatch.setattr(run, "result_of", look)
    mmod.audit(**options())
    assert [batch.images for batch in kept] == [range(3), range(3, 6), range(6, 8)]
    for batch in kept:
        rows = dataclasses.asdict(batch)
        for decision in rows["decisions"].values():
            # The last sample alone has numbers of tokens, for the first one of the next batch.
            assert {len(leaf) for leaf in decision.pop("last").values()} == {1}
        for leaf in tree_leaves(rows):
            if isinstance(leaf, Tensor):
                assert len(leaf) == len(batch.images)
                assert leaf.ndim == 1 or leaf.dtype == torch.uint8
