from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from mmod import RoutingConfig, Threshold
from mmod.ops import alike, nearest_rows
from mmod.ops.rows import take_rows
from mmod.routing import Router, Routing, TokenMasks
from mmod.routing import joiner as joiner_module


def decide(x: Tensor, valid: Tensor | None, levels: list[tuple[float, int]], **fields: Any) -> list[Routing]:
    """Return the decisions of routers in a row, each among what the one before kept."""
    decided: list[Routing] = []
    rows, earlier = x, None
    for block, (threshold, fewest) in enumerate(levels):
        config = RoutingConfig(select=Threshold(threshold, min_tokens=fewest), **fields)
        router = Router(config, dim=x.shape[2], block=block, capacity=0.5, prefix=1)
        with torch.no_grad():
            earlier = router(rows, None, TokenMasks(valid), earlier)
        rows = take_rows(x, earlier.kept.index_BK)
        decided.append(earlier)
    return decided


def leaders_of(routing: Routing) -> Tensor:
    """Return the kept token that each token joins (B, N), -1 for padding."""
    slot = routing.joined.slot_BN
    assert slot is not None
    return routing.kept.index_BK.gather(1, slot.clamp(min=0)).masked_fill(slot < 0, -1)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("skipped", ["follow", "merge"])
@pytest.mark.parametrize("router", ["redundancy", "norm", "random"])
def test_every_token_joins_one_that_is_kept_and_the_order_of_a_sort_changes_nothing(
    router: str, skipped: str, ties: bool, seed: int
) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(8, 20) for _ in range(3)]
    # Images keep uneven numbers at first; where none reaches a threshold, all keep the fewest and fill every slot.
    fewest = sorted((draw.randint(2, 6) for _ in range(3)), reverse=True)
    levels = list(zip((draw.choice([0.2, 0.4, 0.6]), draw.choice([0.7, 3.0]), 3.0), fewest))
    tokens = max(lengths)
    x = torch.randn(len(lengths), tokens, 4, generator=torch.Generator().manual_seed(seed))
    if ties:
        # Norms and products of signs are exact in every batch.
        x = x.sign()
    valid = torch.arange(tokens) < torch.tensor(lengths).unsqueeze(1)
    fields = {"router": router, "skipped": skipped}
    together = decide(x, valid, levels, **fields)

    def all_pairs(*args: Any) -> Tensor:
        return nearest_rows(*args[:5])

    with patch.object(joiner_module, "nearest_rows", all_pairs), patch.object(alike, "nearest_rows", all_pairs):
        expected = decide(x, valid, levels, **fields)
    for routing, other in zip(together, expected, strict=True):
        leader, kept = leaders_of(routing), routing.keep_BN
        assert torch.equal(leader >= 0, valid)
        assert kept.gather(1, leader.clamp(min=0))[valid].all()
        assert torch.equal(leader[kept], torch.arange(tokens).expand_as(leader)[kept])
        assert torch.equal(routing.joined.slot_BN, other.joined.slot_BN)
        if skipped == "merge":
            assert torch.equal(routing.joined.size_BK, other.joined.size_BK)
    for image, length in enumerate(lengths):
        alone = decide(x[image : image + 1, :length], None, levels, **fields)
        for routing, single in zip(together, alone, strict=True):
            assert torch.equal(leaders_of(routing)[image, :length], leaders_of(single)[0])
