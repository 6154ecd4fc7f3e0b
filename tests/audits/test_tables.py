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
from mmod.audits.tables import BatchRows, Mask, TokenKinds
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
