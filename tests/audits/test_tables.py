"""Tables of batches: masks come back as they were, and nothing but rows and packed masks is kept."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import mmod
from mmod.audits import run
from mmod.audits.tables import BatchTables, Mask, TokenKinds
from tests.kit.interrupted_audit import options


@pytest.mark.parametrize("tokens", [1, 7, 8, 17, 64])
def test_masks_are_packed_to_bits_and_come_back(tokens: int) -> None:
    mask_BN = torch.rand(5, tokens) < 0.4
    mask = Mask.of(mask_BN)
    assert mask.bits.shape == (5, -(-tokens // 8))
    assert torch.equal(mask.unpacked(), mask_BN)


@pytest.mark.parametrize("count", [3, 300])
def test_kinds_of_tokens_come_back_by_name(count: int) -> None:
    names = np.array([f"kind {number}" for number in range(count)])
    name_BN = np.random.default_rng(0).choice(names, size=(40, 30))
    kinds = TokenKinds.of(name_BN)
    assert kinds.kind_BN.dtype == (torch.uint8 if count <= 256 else torch.int64)
    assert (np.array(kinds.names)[kinds.kind_BN.numpy()] == name_BN).all()


def test_an_audit_keeps_rows_and_packed_masks_and_no_numbers_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[BatchTables] = []
    compare = run.compare

    def look(tables: Any, *rest: Any) -> Any:
        kept.extend(tables)
        return compare(tables, *rest)

    monkeypatch.setattr(run, "compare", look)
    mmod.audit(**options())
    assert [table.images for table in kept] == [range(3), range(3, 6), range(6, 8)]
    for table in kept:
        for leaf in tree_leaves(dataclasses.asdict(table)):
            if isinstance(leaf, Tensor):
                assert len(leaf) == table.samples
                assert leaf.ndim == 1 or leaf.dtype == torch.uint8
