"""Mixtures of experts in decoders: against a loop over tokens, generated with a cache, staged, saved, counted."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import mmod
from mmod.lab import Experts
from mmod.methods import methods_of, undo_
from mmod.methods.base import deciding_together
from mmod.training import fit
from tests.kit.cover import in_turn
from tests.kit.experts import DECODER_WAYS, STAGED, mixture_by_loop
from tests.kit.text_configs import PREDICTOR, text_config
from tests.kit.vlm_zoo import make_language, random_words
from tests.kit.zoo import perturb_

one_way = pytest.mark.parametrize("way", DECODER_WAYS, ids=lambda way: "-".join(map(str, way.values())))
GREEDY: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


# Experts, routers and predictors differ.
lively = partial(perturb_, parts=(".others.", ".router.", ".predictor"))


def make(name: str = "llama", staged: bool = False, **options: Any) -> Any:
    """Return a model in float64 with three experts in each layer."""
    model = mmod.apply_(make_language(name).double().eval(), Experts(**{"experts": 3, **options}))
    return lively(mmod.route_(model, STAGED) if staged else model)


@one_way
@pytest.mark.parametrize("name", ["llama", "phi3"])
@torch.no_grad()
def test_every_mixture_by_its_definition(name: str, way: dict[str, Any]) -> None:
    model = make(name, **way)
    mlp, config = model.model.layers[1].mlp, methods_of(model)[0]
    x = torch.randn(2, 13, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    alone = torch.stack([mixture_by_loop(mlp, config, text, alone=True) for text in x])
    torch.testing.assert_close(mlp(x), alone, rtol=1e-9, atol=1e-10)
    together = torch.stack([mixture_by_loop(mlp, config, text) for text in x])
    with deciding_together(model):
        torch.testing.assert_close(mlp(x), together if way["choice"] != "tokens" else alone, rtol=1e-9, atol=1e-10)
    model.train()
    torch.testing.assert_close(mlp(x), together, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("way", "staged"), in_turn(DECODER_WAYS, [False, True]), ids=str)
@torch.no_grad()
def test_generation_with_a_cache_is_that_of_whole_passes(way: dict[str, Any], staged: bool) -> None:
    model, ids = make(staged=staged, **way), random_words(1, 9)
    sequence = ids
    for _ in range(GREEDY["max_new_tokens"]):
        logits = model(input_ids=sequence, use_cache=False).logits
        sequence = torch.cat([sequence, logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(model.generate(ids, **GREEDY), sequence)
    assert torch.equal(model.generate(ids, **GREEDY, cache_implementation="static"), sequence)
    assert torch.equal(model.generate(ids, **GREEDY, prompt_lookup_num_tokens=3), sequence)


def test_decisions_alone_are_learned_from_what_was_chosen() -> None:
    ids = random_words(2, 12)
    for choice in ("score", "predictor"):
        model = make(choice=choice, capacity=0.75, membership=0.5, blocks=(1,)).train()
        with mmod.trace(model) as decisions:
            model(input_ids=ids)
        assert list(decisions) == [f"model.layers.1.mlp.expert{number}" for number in (1, 2, 3)]
        terms = []
        for decision in decisions.values():
            assert decision.predicted_BN is not None
            assert decision.keep_BN.sum(dim=1).unique().tolist() == [3]
            choices = zip(decision.predicted_BN.flatten(), decision.keep_BN.flatten())
            terms += [-F.logsigmoid(logit if kept else -logit) for logit, kept in choices]
        loss = mmod.auxiliary_loss(model)
        torch.testing.assert_close(loss.detach(), 0.5 * sum(terms).detach() / len(terms), check_dtype=False)  # type: ignore[union-attr]
        loss.backward()
        learned = {name for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.abs().sum() > 0)}
        # A predictor leaves the text alone; the score does not.
        if choice == "predictor":
            assert all(".predictors." in name for name in learned)
        else:
            assert {"model.layers.1.mlp.router.weight", "model.embed_tokens.weight"} <= learned


@one_way
def test_flops_follow_from_the_slots(way: dict[str, Any]) -> None:
    width, hidden, tokens = 32, 48, 40
    dense = mmod.flops(make_language("llama"), mmod.Prompt(tokens)).blocks[1].dense
    model = make(**way)
    config: Any = methods_of(model)[0]
    routers = 2 * tokens * width * (3 + config.idle)
    if way.get("choice") == "predictor":
        routers += 3 * 2 * tokens * (width * 8 + 8)
    share = 3 / (3 + config.idle) if config.capacity is None else config.capacity
    computed = 3 * int(share * tokens / 3 + 1e-9)
    expected = dense - 6 * (tokens - computed) * width * hidden + routers
    row = mmod.flops(model, mmod.Prompt(tokens)).blocks[1]
    assert (row.dense, row.routed, row.router) == (dense, expected, routers)
    total = mmod.flops(model, {"input_ids": random_words(1, tokens)})
    assert total.blocks[1].routed == expected
    mmod.route_(model, STAGED.replace(language={"inference_threshold": None, "predictor": False}))
    staged = mmod.flops(model, mmod.Prompt(tokens)).blocks[1]
    assert staged.kept == tokens // 2
    assert staged.routed < expected


def test_a_staged_run_measures_both_ways_and_one_of_tokens_that_choose_one(tmp_path: Path) -> None:
    method = {"kind": "experts", "experts": 2, "choice": "predictor"}
    config = text_config(tmp_path / "a", methods=[method], routing=PREDICTOR, epochs=1)
    staged: Any = fit(config, progress=False)
    evaluation = staged.evaluation
    # Experts inside routed layers share the tokens of these.
    assert [name.rpartition(".")[2] for name in evaluation.kept] == [
        "expert1",
        "expert2",
        "1",
        "expert1",
        "expert2",
        "3",
    ]
    assert evaluation.kept["model.layers.0.mlp.expert1"] == 0.5
    assert evaluation.causal_loss != evaluation.loss
    method = {"kind": "experts", "experts": 2, "choice": "tokens", "capacity": None}
    tokens: Any = fit(text_config(tmp_path / "b", methods=[method], epochs=1), progress=False).evaluation
    assert tokens.causal_loss == tokens.loss
    assert not tokens.agreement
    assert sum(tokens.kept.values()) == pytest.approx(4)


@torch.no_grad()
def test_what_cannot_be_is_refused() -> None:
    model, ids = make(), random_words(2, 8)
    assert bool(model(input_ids=ids).logits.isfinite().all())
    with pytest.raises(ValueError, match="text cannot be generated where experts choose"):
        model.generate(ids, **GREEDY)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="but rows are padded"):
        model(input_ids=ids, attention_mask=mask)
    reason = r"inference_threshold is not possible in model.*'experts' chooses among .*choice='score', 'predictor' or"
    with pytest.raises(ValueError, match=reason):
        mmod.route_(model, STAGED)
    undo_(model)
    model = make(choice="tokens", capacity=None)
    with pytest.raises(ValueError, match=r"gate_on='branches' is not possible in model.*MLP 'experts' weighs"):
        mmod.route_(model, mmod.preset("modification", language={"gate_on": "branches"}))
    assert not mmod.is_routed(model)
