"""Blocks of one model on several devices: what a block reads of another comes to its own device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mmod
from mmod.adapters.transformers.layers import CompactRotary
from mmod.routing import Router, share_score
from tests.kit.zoo import make_model

FAR = torch.device("meta")


class Elsewhere(nn.Module):
    """A module that computes on the device it lies on, wherever its input comes from, as accelerate's hooks make it."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result

    def forward(self, *args: Any) -> Any:
        return self.result


SPAN: dict[str, Any] = {"blocks": (1, 2, 3), "capacity": 0.5}
NARROWER = (0.5, 0.25, 0.25)
CONFIGS = {
    "importance": mmod.RoutingConfig(router="attention", **SPAN),
    "a learned score": mmod.RoutingConfig(router=mmod.score("linear", shared=True), **SPAN),
    "a narrower decision": mmod.RoutingConfig(router="attention", **{**SPAN, "capacity": NARROWER}),
    "whom tokens joined": mmod.RoutingConfig(router="redundancy", skipped="merge", **SPAN),
    "a narrower join": mmod.RoutingConfig(router="redundancy", skipped="merge", **{**SPAN, "capacity": NARROWER}),
}


@pytest.mark.parametrize("read", CONFIGS)
@torch.no_grad()
def test_what_a_span_decided_comes_to_its_later_blocks(read: str) -> None:
    model: Any = mmod.route_(make_model("vit_tiny_patch16_224"), CONFIGS[read])
    x = torch.randn(2, 17, 64)
    near, far = list(model.blocks)[:2], list(model.blocks)[2:]
    with mmod.trace(model) as decisions:
        for block in near:
            x = block(x)
        x = x.to(FAR)
        for block in far:
            x = block.to(FAR)(x)
    assert x.device == FAR
    first, *others = decisions.values()
    assert first.kept.index_BK.device.type == "cpu"
    for routing in others:
        tensors = (routing.score_BN, routing.kept.index_BK, routing.joined.slot_BN)
        assert {tensor.device for tensor in tensors if tensor is not None} == {FAR}


def test_a_shared_score_comes_to_its_reader() -> None:
    owner, reader = nn.Module(), Router(mmod.RoutingConfig(router="linear"), dim=8, block=1, capacity=0.5)
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
