"""Mixture-of-Recursions on decoders: against a loop over tokens, generated with a cache, saved, undone, counted."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mmod
from mmod.adapters.transformers.cache import RoutedLayer
from mmod.adapters.transformers.cache_base import CACHE, cache_of
from mmod.lab import Recursions
from mmod.lab.recursions import Cycle
from mmod.methods import methods_of
from mmod.methods.base import deciding_together
from mmod.training import fit
from tests.kit.counting import flop_counter
from tests.kit.cover import in_turn
from tests.kit.recursions import cycle_by_masks
from tests.kit.text_configs import text_config
from tests.kit.vlm_zoo import make_language, random_words

CHOICES: list[dict[str, Any]] = [
    {"choice": "score"},
    {"choice": "predictor"},
    {"choice": "tokens"},
]
WAYS = [
    {**choice, "keys": keys, "adds": adds}
    for choice, keys, adds in itertools.product(CHOICES, ("kept", "first"), ("output", "change"))
]
one_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(way.values()))
FULL = {"layer_types": ["full_attention"] * 6}
HOSTS: dict[str, dict[str, Any]] = {"llama": {}, "qwen3": FULL, "phi3": {}, "mistral-window": {}, "gemma": {}}
GREEDY: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def make(name: str, **options: Any) -> Any:
    """Return a model in float64 whose tokens differ in what routers make of them."""
    model = mmod.apply_(make_language(name, num_hidden_layers=6, **HOSTS[name]).double().eval(), Recursions(**options))
    generator = torch.Generator().manual_seed(3)
    for parameter_name, parameter in model.named_parameters():
        if ".routers." in parameter_name or ".predictors." in parameter_name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model


def rotated(x_HNE: Tensor, cos_NE: Tensor, sin_NE: Tensor) -> Tensor:
    low, high = x_HNE.chunk(2, dim=-1)
    return x_HNE * cos_NE + torch.cat([-high, low], dim=-1) * sin_NE


def attended(layer: Any, x_ND: Tensor, source_ND: Tensor, sees_NN: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Return what a Llama layer makes of tokens that see some of the tokens of a source."""
    attention, size = layer.self_attn, layer.self_attn.head_dim
    queries_ND, other = layer.input_layernorm(x_ND), layer.input_layernorm(source_ND)
    q = rotated(attention.q_proj(queries_ND).unflatten(-1, (-1, size)).transpose(0, 1), *rotary)
    k = rotated(attention.k_proj(other).unflatten(-1, (-1, size)).transpose(0, 1), *rotary)
    v = attention.v_proj(other).unflatten(-1, (-1, size)).transpose(0, 1)
    k, v = (head.repeat_interleave(len(q) // len(k), dim=0) for head in (k, v))
    logits = (q @ k.transpose(1, 2) / size**0.5).masked_fill(~sees_NN, -torch.inf)
    z = x_ND + attention.o_proj((logits.softmax(-1) @ v).transpose(0, 1).flatten(1))
    return z + layer.mlp(layer.post_attention_layernorm(z))


def defined(model: Any, ids_N: Tensor, alone: bool) -> Tensor:
    """Return the logits (N, V) of a text by the formulas."""
    body, config, tokens = model.model, methods_of(model)[0], len(ids_N)
    assert isinstance(config, Recursions)
    cycle = next(module for module in model.modules() if isinstance(module, Cycle))
    x_ND = body.embed_tokens(ids_N)
    rotary = tuple(part[0] for part in body.rotary_emb(x_ND[None], torch.arange(tokens)[None]))
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()

    def causally(layer: Any, x_ND: Tensor, source_ND: Tensor, sees_NN: Tensor) -> Tensor:
        return attended(layer, x_ND, source_ND, causal & sees_NN, rotary)

    x_ND = causally(body.layers[0], x_ND, x_ND, causal)
    x_ND = cycle_by_masks(cycle, config, x_ND, causally, alone=alone)
    x_ND = causally(body.layers[-1], x_ND, x_ND, causal)
    logits: Tensor = model.lm_head(body.norm(x_ND))
    return logits


@pytest.mark.parametrize(("way", "recursions"), in_turn(WAYS, [2, 4]), ids=str)
@torch.no_grad()
def test_both_ways_to_choose_by_their_definition(way: dict[str, Any], recursions: int) -> None:
    model, ids = make("llama", recursions=recursions, **way), random_words(2, 13)
    # Scores of linear routers are those of fp32.
    close = 1e-9 if way["choice"] == "tokens" else 1e-5
    batch_logits = model(input_ids=ids, use_cache=False).logits
    for text, logits in zip(ids, batch_logits):
        torch.testing.assert_close(logits, defined(model, text, alone=True), rtol=close, atol=close)
    with deciding_together(model):
        with deciding_together(model):
            pass
        batch_logits = model(input_ids=ids, use_cache=False).logits
    for text, logits in zip(ids, batch_logits):
        torch.testing.assert_close(logits, defined(model, text, alone=False), rtol=close, atol=close)


@one_way
@torch.no_grad()
def test_generation_with_a_cache_is_that_of_whole_passes(way: dict[str, Any]) -> None:
    model, ids = make("llama", recursions=4, **way), random_words(1, 9)
    sequence = ids
    for _ in range(GREEDY["max_new_tokens"]):
        logits = defined(model, sequence[0], alone=True)
        sequence = torch.cat([sequence, logits[-1:].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(model.generate(ids, **GREEDY), sequence)
    assert torch.equal(model.generate(ids, **GREEDY, cache_implementation="static"), sequence)
    # Takes tokens back where a guess was wrong.
    assert torch.equal(model.generate(ids, **GREEDY, prompt_lookup_num_tokens=3), sequence)


@pytest.mark.parametrize(("name", "way"), in_turn(HOSTS, [WAYS[0], WAYS[6], WAYS[8], WAYS[10]]))
@torch.no_grad()
def test_padded_batches_are_decoded_as_in_one_pass(name: str, way: dict[str, Any]) -> None:
    model, ids = make(name, **way), random_words(3, 14)
    mask = torch.ones_like(ids)
    mask[1, :3], mask[2, :6] = 0, 0
    place = (mask.cumsum(1) - 1).clamp(min=0)
    expected = model(input_ids=ids, attention_mask=mask, position_ids=place, use_cache=False).logits
    cache, logits = None, []
    for start, end in [(0, 8), *((n, n + 1) for n in range(8, 14))]:
        inputs = {"input_ids": ids[:, start:end], "attention_mask": mask[:, :end], "position_ids": place[:, start:end]}
        out = model(**inputs, **{CACHE: cache}, use_cache=True)
        cache = cache_of(out)
        logits.append(out.logits)
    torch.testing.assert_close(torch.cat(logits, 1)[mask.bool()], expected[mask.bool()], rtol=1e-5, atol=1e-5)
    # Nor does a text depend on the others, or on what pads it.
    single = model(input_ids=ids[2:, 6:], use_cache=False).logits
    torch.testing.assert_close(expected[2:, 6:], single, rtol=1e-5, atol=1e-5)
    beams = model.generate(ids, attention_mask=mask, **GREEDY, num_beams=2)
    assert beams.shape == (3, 21)


@pytest.mark.parametrize("keys", ["kept", "first"])
@torch.no_grad()
def test_a_cache_holds_what_ran(keys: str) -> None:
    model, ids = make("llama", recursions=4, first=1, last=1, choice="tokens", keys=keys), random_words(2, 12)
    with mmod.trace(model) as decisions:
        cache = cache_of(model(input_ids=ids, use_cache=True))
    kept = [12, *(int(routing.keep_BN.sum(1).max()) for routing in decisions.values())]
    assert kept[-1] < 12
    held = [0 if layer.keys is None else layer.keys.shape[2] for layer in cache.layers[1:5]]
    assert held == (kept if keys == "kept" else [12, 0, 0, 0])
    assert [isinstance(layer, RoutedLayer) for layer in cache.layers[1:5]] == [False, *[keys == "kept"] * 3]


def test_decisions_alone_are_learned_from_the_highest_gates() -> None:
    ids = random_words(2, 12)
    for choice, weight in (("score", 0.5), ("predictor", 2.0)):
        model = make("llama", choice=choice, membership=weight).train()
        with mmod.trace(model) as decisions:
            model(input_ids=ids)
        (routing,) = decisions.values()
        logit_BN = routing.score_BN if choice == "score" else routing.predicted_BN
        assert logit_BN is not None
        assert (routing.predicted_BN is None) == (choice == "score")
        terms = [
            -F.logsigmoid(logit_BN[b, n] if n in routing.kept.index_BK[b] else -logit_BN[b, n])
            for b in range(2)
            for n in range(12)
        ]
        loss = mmod.auxiliary_loss(model)
        torch.testing.assert_close(loss.detach(), weight * sum(terms) / 24, check_dtype=False)
        loss.backward()
        learned = {name for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.abs().sum() > 0)}
        # The predictor leaves the text alone; the score does not.
        alone = {name for name in learned if ".predictors." in name}
        assert learned == alone if choice == "predictor" else "model.embed_tokens.weight" in learned


@pytest.mark.parametrize("keys", ["kept", "first"])
def test_flops_are_those_that_training_runs(keys: str) -> None:
    dense = make_language("llama", num_hidden_layers=6).eval()
    counts = mmod.flops(dense, {"input_ids": random_words(1, 40)})
    report = mmod.flops(
        mmod.apply_(dense, Recursions(recursions=4, keys=keys, choice="score")), {"input_ids": random_words(1, 40)}
    )
    with deciding_together(dense), torch.no_grad(), flop_counter() as counter:
        dense(input_ids=random_words(1, 40), use_cache=False)
    scored, width = 4 * 2 * 40 * 32, 32
    assert report.routed == pytest.approx(counter.get_total_flops(), rel=1e-3)
    saved = 0
    for kept in (30, 20, 10):
        keys_read, keys_made = (40, 0) if keys == "first" else (kept, kept)
        # Half as many heads have keys and values.
        projected = 2 * kept * 2 * width * width + 2 * keys_made * width * width
        saved += counts.blocks[1].dense - projected - 4 * kept * keys_read * width - 2 * kept * 3 * width * 48
    assert report.routed == counts.dense - saved + scored


def test_what_decides_in_one_way_has_one_loss(tmp_path: Path) -> None:
    tokens, best = (
        fit(text_config(tmp_path / way["choice"], methods=[way], epochs=1), progress=False).evaluation
        for way in ({"kind": "recursions", "choice": "tokens"}, {"kind": "recursions", "choice": "topk"})
    )
    assert tokens.causal_loss == tokens.loss
    assert 0 <= tokens.mean_kept <= 1
    assert best.causal_loss is None
    assert best.mean_kept == 0.5


@torch.no_grad()
def test_no_text_is_generated_where_recursions_choose() -> None:
    model = make("llama", recursions=2)
    with pytest.raises(ValueError, match="text cannot be generated where recursions choose"):
        model.generate(random_words(1, 5), **GREEDY)
