"""Losses of both ways to decide are what a plain loop says, and the causal one is that of decoding byte by byte."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import mmod
from mmod.adapters.transformers.cache_base import CACHE, cache_of
from mmod.data.config import TextConfig
from mmod.data.loader import text_stream
from mmod.methods.base import deciding_together
from mmod.methods.route import deciding_by, every_token
from mmod.training.engine.evaluate import read_rows
from mmod.training.text.evaluate import evaluate_ways, score
from tests.kit.vlm_zoo import make_language

LANGUAGE: dict[str, Any] = {"inference_threshold": 0.5}
MEMBERSHIP = {"membership": 0.1}
ROUTINGS = {
    "score": mmod.RoutingConfig(router=mmod.score("linear", init_std=0.3), capacity=0.25, language=LANGUAGE),
    "predictor": mmod.RoutingConfig(
        router=mmod.score("linear", init_std=0.3),
        capacity=0.5,
        gate="sigmoid",
        losses=MEMBERSHIP,
        language={**LANGUAGE, "predictor": True},
    ),
}
WINDOWS = TextConfig(length=24, batch_size=4, val_limit=7)


def make(name: str, routing: mmod.RoutingConfig | None) -> Any:
    model = make_language(name, vocab_size=256).eval()
    return model if routing is None else mmod.route_(model, routing)


def windows() -> tuple[Tensor, Tensor]:
    tokens, following = zip(*text_stream(WINDOWS).batches(0))
    return torch.cat(tokens), torch.cat(following)


def mean_loss(logits: Tensor, following: Tensor) -> float:
    log_p = logits.double().log_softmax(-1)
    chosen = [-log_p[b, n, following[b, n]] for b in range(len(following)) for n in range(following.shape[1])]
    return float(sum(chosen)) / len(chosen)


@torch.no_grad()
def decoded(model: Any, tokens: Tensor) -> Tensor:
    """Return the logits (B, L, 256) of reading one byte after the other into a cache."""
    cache, logits = None, []
    for token_B1 in tokens.split(1, dim=1):
        outputs = model(input_ids=token_B1, **{CACHE: cache}, use_cache=True)
        cache = cache_of(outputs)
        logits.append(outputs.logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_both_losses_and_their_agreement(name: str, routing: str) -> None:
    config, (tokens, following) = ROUTINGS[routing], windows()
    model = make(name, config).train()
    evaluation = score(read_rows(evaluate_ways, model, text_stream(WINDOWS)), model)
    assert model.training
    model.eval()
    assert evaluation.samples == 7
    with torch.no_grad(), mmod.trace(model) as decisions, deciding_together(model):
        best = model(input_ids=tokens, use_cache=False).logits
    assert evaluation.loss == pytest.approx(mean_loss(best, following), rel=1e-5)
    assert evaluation.causal_loss == pytest.approx(mean_loss(decoded(model, tokens), following), rel=1e-5)
    for block, routing_ in decisions.items():
        kept = int(config.capacity * 24)  # type: ignore[operator]
        assert evaluation.kept[block] == pytest.approx(kept / 24)
        logit_BN = routing_.logit_BN
        alike = [
            float((logit_BN[b, n] >= 0) == (n in routing_.kept.index_BK[b].tolist()))
            for n in range(24)
            for b in range(len(logit_BN))
        ]
        assert evaluation.agreement[block] == pytest.approx(sum(alike) / len(alike))
    assert len(evaluation.agreement_by_position) == 8
    assert math.isclose(sum(evaluation.agreement_by_position) / 8, evaluation.mean_agreement or 0, rel_tol=1e-9)
    assert {"loss", "causal_loss", "agreement", "kept"} <= set(evaluation.columns())


def test_what_decides_in_one_way_has_one_loss() -> None:
    threshold = mmod.RoutingConfig(router=mmod.score("linear", init_std=0.3), select="threshold")
    models = [make("llama", routing) for routing in (None, threshold, mmod.RoutingConfig(router="random"))]
    dense, one, none = (score(read_rows(evaluate_ways, model, text_stream(WINDOWS)), model) for model in models)
    assert dense.causal_loss == dense.loss
    assert one.causal_loss == one.loss
    assert 0 < one.mean_kept < 1
    assert none.causal_loss is None
    assert not dense.agreement | one.agreement | none.agreement


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_token_is_the_routed_model_at_capacity_one(routing: str) -> None:
    tokens, _ = windows()
    model = make("llama", ROUTINGS[routing])
    full = make(
        "llama", ROUTINGS[routing].replace(capacity=1.0, language={"inference_threshold": None, "predictor": False})
    )
    full.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        with every_token(model):
            logits = model(input_ids=tokens).logits
        assert torch.equal(logits, full(input_ids=tokens).logits)
        assert not torch.equal(logits, model(input_ids=tokens).logits)


def test_routers_decide_as_before_when_the_context_ends() -> None:
    model = make("llama", ROUTINGS["score"])
    before = [block.router.config for block in mmod.routed_blocks(model).values()]
    with deciding_by(model, lambda config: config.replace(capacity=0.1)):
        inside = [block.router.config for block in mmod.routed_blocks(model).values()]
        with pytest.raises(KeyError), deciding_by(model, lambda config: {}["nothing"]):
            pass
    assert len({id(config) for config in inside}) == 1
    assert inside[0].capacity == 0.1
    after = [block.router.config for block in mmod.routed_blocks(model).values()]
    assert all(routing is other for routing, other in zip(before, after))
