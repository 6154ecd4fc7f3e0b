"""Blocks of one model on several devices: what a block reads of another comes to its own device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mmod
from mmod.adapters.transformers.layers import CompactRotary
from mmod.blocks import Span, SpannedBlock, StackCalls
from mmod.routing import Kept, Router, Routing, TokenMasks, share_score
from mmod.threads import PerThread

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


def make_span(scored_by_first: bool) -> Span:
    names = ("blocks.0", "blocks.1", "blocks.2")
    return Span(PerThread(StackCalls), names, scored_by_first=scored_by_first, for_loss=False)


def at(span: Span, place: int, router: Router) -> SpannedBlock:
    """Return a block of a span."""
    block = SpannedBlock()
    block.router = router
    execution = SimpleNamespace(scores_norm=False)
    block.mod_state = SimpleNamespace(
        span=span, place=place, begins=place == 0, ends=place == 2, passes_rows=False, execution=execution
    )
    return block


@pytest.mark.parametrize("decided", [False, True], ids=["a score", "a decision"])
def test_importance_comes_to_its_reader(decided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    decides, x = router(), torch.empty(2, 6, 8, device=FAR)
    span = make_span(scored_by_first=False)
    shared = span.begin(torch.empty(2, 6, 8))
    shared.score_BN = torch.rand(2, 6)
    if decided:
        at(span, 1, decides).decide_in_span(torch.rand(2, 6, 8), shared, decides.rule, TokenMasks())
    assert span.enter(x, at(span, 2, decides).mod_state) is shared
    recorded = []

    def choose(score_BN: Tensor) -> Routing:
        recorded.append(score_BN.device)
        return Routing(Kept(torch.zeros(2, 3, dtype=torch.long, device=score_BN.device)), score_BN)

    monkeypatch.setattr(decides, "forward", lambda x, score_BN, tokens: choose(score_BN))
    routing = at(span, 2, decides).decide_in_span(x, shared, decides.rule, TokenMasks())
    assert recorded == [FAR]
    assert routing.kept.index_BK.device == FAR


@pytest.mark.parametrize("capacity", [0.5, 0.25], ids=["the same decision", "a narrower one"])
def test_whom_tokens_joined_comes_to_its_reader(capacity: float) -> None:
    decides = router(router="redundancy", skipped="merge")
    span = make_span(scored_by_first=True)
    near = torch.rand(2, 8, 8)
    shared = span.begin(near)
    at(span, 0, decides).decide_in_span(near, shared, decides.rule, TokenMasks())
    reads = Router(decides.config, dim=8, block=2, capacity=capacity)
    x = torch.empty(2, 8, 8, device=FAR)
    assert span.enter(x, at(span, 1, reads).mod_state) is shared
    routing = at(span, 1, reads).decide_in_span(x, shared, reads.rule, TokenMasks())
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
    rotary_parts = CompactRotary(rotary)(torch.empty(2, 6, 8, device=FAR), kept, 3, 0)
    assert all(part.device == FAR for part in rotary_parts)
