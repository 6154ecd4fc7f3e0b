"""Drafts of a routed model change nothing but how many full passes a text takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmod
from mmod.adapters.transformers.cache_base import CACHE, cache_of
from mmod.lab import full_pass
from mmod.methods.route import every_token
from tests.kit.cover import in_turn
from tests.kit.vlm_zoo import make_language

SCORE = mmod.score("linear", init_std=0.2)
ALONE: dict[str, Any] = {"inference_threshold": 0.5}
ROUTINGS = {
    "score": mmod.RoutingConfig(router=SCORE, capacity=0.5, language=ALONE),
    "predictor": mmod.RoutingConfig(
        router=SCORE,
        capacity=(0.3, 0.6),
        gate="sigmoid",
        losses={"membership": 0.1},
        language={**ALONE, "predictor": True},
    ),
    "threshold": mmod.RoutingConfig(router=SCORE, select="threshold", gate="sigmoid", language={"gate_on": "branches"}),
    "attention": mmod.RoutingConfig(router=SCORE, select="threshold", operator="attention"),
}
GREEDY: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def make(name: str, routing: str) -> Any:
    # In float64, where no two logits are equal but for rounding.
    return mmod.route_(make_language(name).double(), ROUTINGS[routing]).eval()


@pytest.mark.parametrize(("name", "routing"), in_turn(["llama", "qwen3", "mistral", "gemma"], ROUTINGS))
def test_tokens_are_those_of_greedy_decoding(name: str, routing: str) -> None:
    draft = make(name, routing)
    full, prompt = full_pass(draft), torch.randint(3, 80, (1, 9))
    plain = full.generate(prompt, **GREEDY)
    assert torch.equal(full.generate(prompt, assistant_model=draft, **GREEDY), plain)
    # Neither keeps a state of the other's.
    assert torch.equal(full.generate(prompt, **GREEDY), plain)


@given(routing=st.sampled_from(sorted(ROUTINGS)), tokens=st.integers(1, 30), seed=st.integers(0, 99))
@settings(max_examples=15)
@torch.no_grad()
def test_the_full_pass_keeps_every_token_with_and_without_a_cache(routing: str, tokens: int, seed: int) -> None:
    model, generator = make("llama", routing), torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 80, (2, tokens), generator=generator)
    full = full_pass(model)
    once = full(input_ids=ids, use_cache=False).logits
    with every_token(model):
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, once)
    if tokens > 1:
        begun = full(input_ids=ids[:, :-1], use_cache=True)
        step = full(input_ids=ids[:, -1:], **{CACHE: cache_of(begun)}, use_cache=True)
        # Norms and rotary angles of the hosts are in float32 whatever the weights are.
        torch.testing.assert_close(step.logits, once[:, -1:], rtol=1e-4, atol=1e-5)


def test_an_identity_gate_makes_the_full_pass_the_dense_model() -> None:
    dense, ids = make_language("llama"), torch.randint(3, 80, (2, 11))
    routed = mmod.route_(make_language("llama"), ROUTINGS["attention"].replace(gate="identity", operator="block"))
    with torch.no_grad():
        assert torch.equal(full_pass(routed)(input_ids=ids).logits, dense(input_ids=ids).logits)


def test_weights_are_shared_and_the_model_is_left_as_it_was() -> None:
    model = make("llama", "predictor")
    before = mmod.routing_config(model)
    full = full_pass(model)
    parameters = dict(full.named_parameters())
    assert parameters.keys() <= dict(model.named_parameters()).keys()
    assert all(parameter is dict(model.named_parameters())[name] for name, parameter in parameters.items())
    assert mmod.routing_config(model) == before
    assert mmod.routing_config(full).select == mmod.Threshold(0.0)
    with pytest.raises(ValueError, match="routed"):
        full_pass(make_language("llama"))
