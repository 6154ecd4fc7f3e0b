"""Mixture-of-Recursions on ViTs: against a loop over tokens, and counted."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import mmod
from mmod.analysis import flops
from mmod.lab import Recursions
from mmod.methods import methods_of
from tests.kit.attention_oracle import attention_of
from tests.kit.counting import flop_counter
from tests.kit.own_vits import make_own
from tests.kit.recursions import cycle_by_masks
from tests.kit.zoo import make_model

WAYS = [
    {"choice": choice, "keys": keys, "adds": adds}
    for choice, keys, adds in itertools.product(("topk", "tokens"), ("kept", "first"), ("output", "change"))
]
one_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(way.values()))


def lively(model: Any) -> Any:
    """Let tokens differ in what routers make of them."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if ".routers." in name:
            parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model


def cycle_of(model: Any) -> Any:
    return next(module for module in model.modules() if hasattr(module, "routers"))


def attended(block: Any, x_ND: Tensor, source_ND: Tensor, sees_NN: Tensor) -> Tensor:
    """Return what a plain ViT block makes of tokens that see some of others."""
    z_ND = x_ND + attention_of(block, x_ND, sees_NN.to(x_ND.dtype).log(), source_ND)[0]
    return z_ND + block.ls2(block.mlp(block.norm2(z_ND)))


@one_way
@pytest.mark.parametrize(("name", "recursions"), [("test_vit", 2), ("test_vit", 4), ("vit_medium_patch16_gap_240", 2)])
def test_every_cycle_by_its_definition(name: str, recursions: int, way: dict[str, Any]) -> None:
    model = lively(mmod.apply_(make_model(name).double(), Recursions(recursions=recursions, **way)))
    cycle, prefix = cycle_of(model), model.num_prefix_tokens
    x = torch.randn(3, 13, model.embed_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        actual = cycle(x)
        expected = torch.stack([cycle_by_masks(cycle, methods_of(model)[0], x_ND, attended, prefix) for x_ND in x])
    # Scores of linear routers are those of fp32.
    close = 1e-5 if way["choice"] == "topk" else 1e-9
    torch.testing.assert_close(actual, expected, rtol=close, atol=close)


def test_blocks_that_a_list_names_keep_their_names() -> None:
    model = make_own("norms behind, named blocks")
    keys = list(model.state_dict())
    mmod.apply_(model, Recursions(recursions=3))
    assert list(model.stages._modules) == ["layer_0", "layer_1", "layer_4"]
    mmod.undo_(model)
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("keys", ["kept", "first"])
def test_flops_are_those_that_run(keys: str) -> None:
    dense = flops(make_model("test_vit"), 96)
    model = mmod.apply_(make_model("test_vit"), Recursions(recursions=4, keys=keys))
    report, width = flops(model, 96), 64
    with flop_counter() as counter:
        model(torch.rand(1, 3, 96, 96))
    assert report.routed == pytest.approx(counter.get_total_flops(), rel=0.005)
    saved, hidden = 0, 192
    for kept in (27, 18, 9):
        keys_read = 37 if keys == "first" else kept
        projected = 2 * kept * 2 * width * width if keys == "first" else 2 * kept * 4 * width * width
        saved += dense.blocks[1].dense - projected - 2 * 2 * kept * keys_read * width - 2 * kept * 2 * width * hidden
    scored = 4 * 2 * 37 * width
    assert report.routed == dense.dense - saved + scored
    assert report.parameters < dense.parameters
