"""Mixture-of-Recursions on ViTs: against a loop over tokens, and counted."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mmod
from mmod.analysis import flops
from mmod.lab import Recursions
from mmod.methods import methods_of
from tests.kit.counting import flop_counter
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


def attended(block: Any, z_BKD: Tensor, source_BND: Tensor, sees_BKN: Tensor) -> Tensor:
    """Return what a plain ViT block makes of tokens that see some of others."""
    attn = block.attn
    batch, slots, dim = z_BKD.shape
    heads = (batch, -1, attn.num_heads, dim // attn.num_heads)
    weight = attn.qkv.weight.chunk(3)
    bias = [None] * 3 if attn.qkv.bias is None else attn.qkv.bias.chunk(3)
    q = F.linear(block.norm1(z_BKD), weight[0], bias[0]).view(heads).transpose(1, 2)
    k, v = (F.linear(block.norm1(source_BND), weight[part], bias[part]).view(heads).transpose(1, 2) for part in (1, 2))
    logits = (q @ k.transpose(2, 3) * attn.scale).masked_fill(~sees_BKN[:, None], -torch.inf)
    z = z_BKD + block.ls1(attn.proj((logits.softmax(-1) @ v).transpose(1, 2).reshape(batch, slots, dim)))
    return z + block.ls2(block.mlp(block.norm2(z)))


def defined(cycle: Any, config: Recursions, x_BND: Tensor, prefix: int) -> Tensor:
    """Return what a cycle makes of its tokens: all of them run, and masks say who sees and keeps what."""
    count, tokens = config.recursions, x_BND.shape[1]
    x, first = x_BND, x_BND
    runs = torch.ones(x_BND.shape[:2], dtype=torch.bool)
    sources: list[Tensor] = []
    if config.choice == "tokens":
        prob = (x_BND @ cycle.routers[0].weight.T).softmax(-1)
        last = prob.argmax(-1)
        last[:, :prefix] = count - 1
    for recursion in range(count):
        if config.choice == "tokens":
            gate, runs = prob[..., recursion], last >= recursion
        else:
            score = x @ cycle.routers[recursion].weight[0]
            gate = 0.1 * torch.sigmoid(score)
            kept = torch.zeros_like(runs)
            for image in range(len(x)):
                patches = [n for n in range(prefix, tokens) if runs[image, n]]
                patches.sort(key=lambda n: -float(score[image, n]))
                room = max(1, prefix, tokens * (count - recursion) // count) - prefix
                kept[image, [*range(prefix), *patches[:room]]] = True
            runs = kept
        y = x
        for number, block in enumerate(cycle.shared):
            if config.keys == "first" and not recursion:
                sources.append(y)
            source, visible = (sources[number], torch.ones_like(runs)) if config.keys == "first" else (y, runs)
            # Somebody must be seen by those whose result is thrown away.
            sees = visible[:, None] | ~runs[:, :, None]
            y = attended(block, y, source, sees)
        gate = gate[..., None]
        if config.adds == "change":
            new = x + gate * (y - x)
        elif config.choice == "topk":
            new = x + gate * y
        else:
            new = gate * y + torch.where((last == recursion)[..., None], first, 0.0)
        x = torch.where(runs[..., None], new, x)
    return x


@one_way
@pytest.mark.parametrize(("name", "recursions"), [("test_vit", 2), ("test_vit", 4), ("vit_medium_patch16_gap_240", 2)])
def test_every_cycle_by_its_definition(name: str, recursions: int, way: dict[str, Any]) -> None:
    model = lively(mmod.apply_(make_model(name).double(), Recursions(recursions=recursions, **way)))
    cycle, prefix = cycle_of(model), model.num_prefix_tokens
    x = torch.randn(3, 13, model.embed_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        actual, expected = cycle(x), defined(cycle, methods_of(model)[0], x, prefix)
    # Scores of linear routers are those of fp32.
    close = 1e-5 if way["choice"] == "topk" else 1e-9
    torch.testing.assert_close(actual, expected, rtol=close, atol=close)


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
