"""Kept queries over all keys: exact for any split of any projection, and nothing computed in vain."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import mmod
from mmod.ops import Projection, attend_to_captured, keys_and_values
from tests.kit import clip_zoo
from tests.kit.counting import flop_counter
from tests.kit.cover import in_turn
from tests.kit.quantized import quantize_linear_
from tests.kit.vlm_zoo import LANGUAGE, make_language, random_words
from tests.kit.zoo import make_images, make_model


class Gated(nn.Module):
    """Attention with everything that can stand in front of it: one projection or three, a gate, norms, a bias."""

    def __init__(self, dim: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.heads = heads
        self.gate = nn.Linear(dim, dim)
        self.qkv = nn.Linear(dim, 3 * dim) if fused else None
        self.q, self.k, self.v = (None,) * 3 if fused else (nn.Linear(dim, dim) for _ in range(3))
        self.norm = nn.LayerNorm(dim // heads)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, dim=-1) if self.qkv is not None else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        out = F.scaled_dot_product_attention(self.norm(q), self.norm(k), v)
        return out.transpose(1, 2).flatten(2) * self.gate(x).sigmoid()

    def projections(self) -> list[Projection]:
        dim = self.gate.out_features
        if self.qkv is not None:
            return [Projection(self.gate.weight, dim), Projection(self.qkv.weight, dim)]
        return [
            Projection(self.gate.weight, dim),
            Projection(self.q.weight, dim),
            *(Projection(linear.weight, 0) for linear in (self.k, self.v)),
        ]


@given(batch=st.integers(1, 3), tokens=st.integers(1, 12), heads=st.integers(1, 3), fused=st.booleans(), data=st.data())
def test_kept_rows_are_those_of_the_whole(
    batch: int, tokens: int, heads: int, fused: bool, data: st.DataObject
) -> None:
    block = Gated(4 * heads, heads, fused).double()
    x = torch.randn(batch, tokens, 4 * heads, dtype=torch.float64, requires_grad=True)
    kept = sorted(data.draw(st.sets(st.integers(0, tokens - 1), min_size=1)))
    projections = block.projections()
    with attend_to_captured(projections, keys_and_values(lambda: block(x), projections)):
        actual = block(x[:, kept])
    expected = block(x)[:, kept]
    torch.testing.assert_close(actual, expected)
    parameters = [x, *block.parameters()]
    expected_gradients = torch.autograd.grad(expected.square().sum(), parameters)
    for a, b in zip(torch.autograd.grad(actual.square().sum(), parameters), expected_gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_no_part_of_a_projection_is_computed_in_vain() -> None:
    dim, tokens, kept = 16, 10, 4
    for fused in (True, False):
        block, x = Gated(dim, 2, fused), torch.randn(1, tokens, dim)
        projections = block.projections()
        with torch.no_grad(), flop_counter() as counter:
            taken = keys_and_values(partial(block, x), projections)
            with attend_to_captured(projections, taken):
                block(x[:, :kept])
        query_and_gate, key_and_value = 2 * kept * dim * 2 * dim, 2 * tokens * dim * 2 * dim
        assert counter.get_total_flops() == query_and_gate + key_and_value + 4 * kept * tokens * dim


def test_a_block_without_fused_attention_is_an_error() -> None:
    linear, x = nn.Linear(4, 4), torch.randn(1, 3, 4)
    with pytest.raises(RuntimeError, match=r"it does not call scaled_dot_product_attention, so context='all'"):
        keys_and_values(lambda: linear(x), [Projection(linear.weight, 0)])


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224", "vit_dlittle_patch16_reg1_gap_256"])
@torch.no_grad()
def test_autocast_changes_nothing_but_bits(name: str) -> None:
    model, images = mmod.route_(make_model(name), mmod.RoutingConfig(capacity=0.3, context="all")), make_images(name, 2)
    exact = model(images)
    with torch.autocast("cpu", torch.bfloat16):
        rough = model(images)
    assert (rough.float() - exact).norm() < 0.2 * exact.norm()


BEFORE_ATTENTION = ("qkv", "qkv_proj", "q_proj", "k_proj", "v_proj", "in_proj")


class LowRank(nn.Linear):
    """Two factors of a linear layer, the first of which has the name of the whole."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(1, 1)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        left, values, right = torch.linalg.svd(linear.weight.detach(), full_matrices=False)
        self.weight, self.left = nn.Parameter(right), nn.Parameter(left * values)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.weight), self.left, self.bias)


class Mixed(nn.Linear):
    """A linear layer whose features are mixed behind it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None)
        self.load_state_dict(linear.state_dict())
        self.mix = nn.Parameter(torch.eye(linear.out_features).roll(1, 0) + 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(super().forward(x), self.mix)


def two_factors(linear: nn.Linear) -> nn.Module:
    left, values, right = torch.linalg.svd(linear.weight.detach(), full_matrices=False)
    first = nn.Linear(linear.in_features, len(values), bias=False)
    second = nn.Linear(len(values), linear.out_features, bias=linear.bias is not None)
    first.weight.data, second.weight.data = right, left * values
    if linear.bias is not None:
        second.bias.data = linear.bias.detach()
    return nn.Sequential(first, second)


def exchange_each(change: Callable[[nn.Linear], nn.Module], model: nn.Module) -> nn.Module:
    """Change each linear layer that stands before an attention."""
    for module in list(model.modules()):
        for child, linear in list(module.named_children()):
            if child in BEFORE_ATTENTION:
                setattr(module, child, change(linear))
    return model


def add_lora(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    names = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in BEFORE_ATTENTION or isinstance(module, nn.MultiheadAttention):
            names.append(name)
    torch.manual_seed(3)
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False), model)
    return model.eval()


def in_8_bits(model: nn.Module) -> nn.Module:
    quantize_linear_(model)
    return model


EXCHANGES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "two factors": partial(exchange_each, two_factors),
    "a factor with the name of the whole": partial(exchange_each, LowRank),
    "features that are mixed behind it": partial(exchange_each, Mixed),
    "weight norm": partial(exchange_each, torch.nn.utils.parametrizations.weight_norm),
    "LoRA": add_lora,
    "weights in 8 bits": in_8_bits,
    "torch's quantized layers": partial(torch.ao.quantization.quantize_dynamic, qconfig_spec={nn.Linear}),
}
HOSTS = ("vit_tiny_patch16_224", "vit_base_patch16_xp_224", "vit_dlittle_patch16_reg1_gap_256", "llama", "phi3", "clip")


def make_host(name: str) -> tuple[nn.Module, Callable[[Any], Tensor], dict[str, Any]]:
    """Return a model, what it is called with, and options of its routing."""
    if name == "clip":
        images = clip_zoo.make_images("ViT-B-32", 2)
        return clip_zoo.make_clip("ViT-B-32"), lambda model: model.encode_image(images), {}
    if name in LANGUAGE:
        words = random_words(2, 12)
        return make_language(name), lambda model: model(words).logits, {"language": {"tokens": "all"}}
    pictures = make_images(name, 2)
    return make_model(name), lambda model: model(pictures), {}


def route_all(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(1)
    config = mmod.RoutingConfig(router="norm", capacity=1.0, context="all", **options)
    routed = mmod.route_(model, image=config) if hasattr(model, "visual") else mmod.route_(model, config)
    return routed.eval()


# Each exchange on three hosts, before it is routed or afterwards.
EXCHANGED = [(*pair, bool(place % 2)) for place, pair in enumerate(in_turn(EXCHANGES, HOSTS, times=3))]


@pytest.mark.parametrize(("exchange", "name", "routed_first"), EXCHANGED)
@torch.no_grad()
def test_layers_that_were_exchanged_are_called(exchange: str, name: str, routed_first: bool) -> None:
    """At capacity 1, kept tokens that attend to all tokens compute what the dense model with such layers computes."""
    change = EXCHANGES[exchange]
    model, run, options = make_host(name)
    expected = run(change(model))
    model, run, options = make_host(name)
    if routed_first:
        model = change(route_all(model, options))
    elif name in LANGUAGE and exchange == "two factors":
        with pytest.raises(ValueError, match=r"its attention has the module \w+, which may mix tokens"):
            route_all(change(model), options)
        return
    else:
        model = route_all(change(model), options)
    torch.testing.assert_close(run(model), expected)
