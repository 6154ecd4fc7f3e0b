"""Cells of the grid: how unlike their tokens are, and which tokens join which."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

import mmod
from mmod.ops import held_slots
from mmod.routing import Router
from mmod.routing.score.cells import CellScore
from tests.kit.zoo import make_images, make_model


def test_a_naive_loop_scores_alike() -> None:
    generator = random.Random(0)
    for _ in range(20):
        rows, width, side, prefix = (generator.randint(low, high) for low, high in ((1, 7), (1, 7), (2, 4), (0, 2)))
        x = torch.randn(2, prefix + rows * width, 3, dtype=torch.float64)
        score = CellScore(prefix, side, width)
        actual, first = score(x), score.first(x.shape[1], x.device)
        corners = set(range(prefix))
        for row, column in itertools.product(range(rows), range(width)):
            top, left = row - row % side, column - column % side
            cell = [
                prefix + r * width + c
                for r, c in itertools.product(range(top, min(top + side, rows)), range(left, min(left + side, width)))
            ]
            token = prefix + row * width + column
            corners.add(cell[0])
            assert first[token] == cell[0]
            variance = x[:, cell].var(dim=1, correction=0).mean(dim=-1).float()
            expected = variance / (1 + variance) if token != cell[0] else torch.full((2,), 2.0)
            torch.testing.assert_close(actual[:, token], expected)
        assert score.groups(x.shape[1]) == len(corners)
        assert (actual[:, :prefix] == 2).all()


def test_tokens_join_the_first_of_their_cell() -> None:
    config = mmod.RoutingConfig(router=mmod.score("cells", side=3), skipped="merge")
    for capacity, prefix in itertools.product((0.25, 0.5, 0.9), (0, 2)):
        x = torch.randn(3, 49 + prefix, 5)
        router = Router(config, dim=5, block=1, capacity=capacity, prefix=prefix)
        routing = router(x)
        first = router.score.first(49 + prefix, x.device)
        kept = routing.keep_BN
        assert kept[:, first].all()
        itself = torch.arange(49 + prefix).expand_as(kept)
        joined = routing.kept.index_BK.gather(1, routing.joined.slot_BN)
        assert torch.equal(joined, torch.where(kept, itself, first.expand_as(kept)))
        assert torch.equal(routing.joined.size_BK.sum(dim=1), torch.full((3,), 49.0 + prefix))


def test_even_cells_are_the_first_to_merge() -> None:
    x = torch.randn(1, 6, 6, 4)
    x[:, 2:4, 4:6] = 1.0
    x[:, 0:2, 0:2] = -3.0
    routing = Router(mmod.RoutingConfig(router="cells", skipped="merge"), dim=4, block=0, capacity=30 / 36)(
        x.flatten(1, 2)
    )
    gone = (~routing.keep_BN[0]).nonzero().flatten().tolist()
    assert gone == [1, 6, 7, 17, 22, 23]


def test_slots_that_are_empty_stand_for_nothing() -> None:
    kept, valid = torch.tensor([[0, 2, 3], [0, 2, 0]]), torch.tensor([[True, True, True], [True, True, False]])
    assert held_slots(kept, 4, valid).tolist() == [[0, -1, 1, 2], [0, -1, 1, -1]]


def test_a_merged_cell_stays_merged_in_later_blocks() -> None:
    model = make_model("vit_tiny_patch16_224")
    mmod.route_(
        model, mmod.RoutingConfig(router="cells", skipped="merge", blocks=(0, 1, 2, 3), capacity=(0.8, 0.8, 0.6, 0.4))
    )
    with mmod.trace(model) as decisions, torch.no_grad():
        model(make_images("vit_tiny_patch16_224", 2))
    kept = [routing.keep_BN for routing in decisions.values()]
    assert torch.equal(kept[0], kept[1])
    assert all((later <= earlier).all() for earlier, later in itertools.pairwise(kept))
    assert [int(kept_BN[0].sum()) for kept_BN in kept] == [13, 13, 10, 6]


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        (13, {}, r"needs all 12 patches in rows and columns, and the grid is \(3, 3\)"),
        (13, {"width": 5}, r"needs all 12 patches in rows and columns at router\.width=5, and the grid is \(2, 5\)"),
        (17, {"side": 2}, r"keeps a token of each of 5 groups; capacity 0\.2 keeps 3 of 17"),
    ],
)
def test_what_is_no_grid_and_what_keeps_too_little_are_refused(
    tokens: int, options: dict[str, int], message: str
) -> None:
    config = mmod.RoutingConfig(router=mmod.score("cells", **options), skipped="merge")
    router = Router(config, dim=3, block=1, capacity=0.2, prefix=1)
    with pytest.raises(ValueError, match=message):
        router(torch.randn(1, tokens, 3))
