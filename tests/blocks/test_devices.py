"""Blocks of one model on several devices: what a block reads of another comes to its own device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mmod
from mmod.adapters.transformers.layers import CompactRotary
from mmod.blocks import PassTracker, RoutedState, SharedScore
from mmod.routing import Evidence, Kept, Router, Routing, TokenMarks, share_score

FAR = torch.device("meta")


class Elsewhere(nn.Module):
    """A module that computes on the device it lies on, wherever its input comes from, as accelerate's hooks make it."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result

    def forward(self, *args: Any) -> Any:
        return self.result


def router(**changes: Any) -> Router:
    config = mmod.RoutingConfig(**{"router": "attention", **changes})
    return Router(config, dim=8, block=1, capacity=0.5)


@pytest.mark.parametrize("decided", [False, True], ids=["a score", "a decision"])
def test_importance_comes_to_its_reader(decided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    decides, tracker, x = router(), PassTracker(), torch.empty(2, 6, 8, device=FAR)
    shared = SharedScore(torch.rand(2, 6))
    if decided:
        shared.remember(decides, TokenMarks(), decides(torch.rand(2, 6, 8), shared.score_BN))
    tracker.begin().scores[1] = shared
    state, seen = RoutedState(None, tracker, 1, way=None), []  # type: ignore[arg-type,var-annotated]

    def choose(score_BN: Tensor) -> Routing:
        seen.append(score_BN.device)
        return Routing(Kept(torch.zeros(2, 3, dtype=torch.long, device=score_BN.device)), Evidence(score_BN))

    monkeypatch.setattr(decides, "forward", lambda x, score_BN, tokens: choose(score_BN))
    routing = state.decide(decides, x, TokenMarks(), state.enter(x, training=False), training=False)
    assert seen == [FAR]
    assert routing.kept.index_BK.device == FAR


@pytest.mark.parametrize("capacity", [0.5, 0.25], ids=["the same decision", "a narrower one"])
def test_whom_tokens_joined_comes_to_its_reader(capacity: float) -> None:
    decides, tracker = router(router="redundancy", skipped="merge"), PassTracker()
    near, shared = torch.rand(2, 8, 8), SharedScore(torch.rand(2, 8))
    decided = decides(near)
    shared.remember(decides, TokenMarks(), decided)
    tracker.begin().scores[1] = shared
    state, reads = RoutedState(None, tracker, 1, way=None), Router(decides.config, dim=8, block=2, capacity=capacity)  # type: ignore[arg-type]
    x = torch.empty(2, 8, 8, device=FAR)
    routing = state.decide(reads, x, TokenMarks(), state.enter(x, training=False), training=False)
    assert routing.kept.index_BK.shape == (2, int(8 * capacity))
    assert routing.joined.slot_BN is not None
    assert {routing.kept.index_BK.device, routing.joined.slot_BN.device} == {FAR}


def test_a_shared_score_comes_to_its_reader() -> None:
    owner, reader = nn.Module(), router(router="linear")
    share_score(owner, [reader])
    owner.shared_router = Elsewhere(torch.rand(2, 6))
    assert reader.score is not None
    assert reader.score(torch.empty(2, 6, 8, device=FAR)).device == FAR


@pytest.mark.parametrize("kept", [0, torch.zeros(2, 1, dtype=torch.long, device=FAR)], ids=["all", "by sample"])
@pytest.mark.parametrize("kind", ["default", "dynamic"])
def test_compact_positions_come_to_their_layer(kind: str, kept: Any) -> None:
    rotary = Elsewhere((torch.rand(1, 2048, 4), torch.rand(1, 2048, 4)))
    rotary.rope_type = kind
    found = CompactRotary(rotary)(torch.empty(2, 6, 8, device=FAR), kept, 3, 0)
    assert all(each.device == FAR for each in found)
