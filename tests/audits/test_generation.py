"""Agreement over long texts is what a plain loop counts, in the decisions that generation itself takes."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import Tensor

import mmod
from mmod.adapters.transformers.cache_base import CACHE, cache_of
from mmod.audits.generation import Generation, evaluate_generation
from mmod.plain import from_plain
from tests.kit.vlm_zoo import make_language

WINDOW = 6
ALONE: dict[str, Any] = {"inference_threshold": 0.5}
ROUTINGS = {
    "score": mmod.RoutingConfig(router=mmod.score("linear", init_std=0.5), capacity=0.5, language=ALONE),
    "predictor": mmod.RoutingConfig(
        router=mmod.score("linear", init_std=0.5),
        capacity=1 / 3,
        losses={"membership": 0.1},
        language={**ALONE, "predictor": True},
    ),
}


def texts(count: int = 5, windows: int = 3) -> Tensor:
    return torch.randint(1, 20, (count, windows * WINDOW), generator=torch.Generator().manual_seed(0))


def make(by: str) -> Any:
    return mmod.route_(make_language("llama", vocab_size=20, eos_token_id=0).eval(), ROUTINGS[by])


@torch.no_grad()
def decoded(model: Any, tokens: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what is kept and the scores, reading one token after the other into a cache."""
    cache, keeps, scores = None, {}, {}
    for token_B1 in tokens.split(1, dim=1):
        with mmod.trace(model) as decisions:
            cache = cache_of(model(input_ids=token_B1, **{CACHE: cache}, use_cache=True))
        for name, routing in decisions.items():
            keeps.setdefault(name, []).append(routing.keep_BN)
            scores.setdefault(name, []).append(routing.score_BN)
    return tuple({name: torch.cat(routing, 1) for name, routing in parts.items()} for parts in (keeps, scores))  # type: ignore[return-value]


@pytest.mark.parametrize("by", ROUTINGS)
def test_figures_are_those_of_a_plain_loop_over_decisions_of_decoding(by: str) -> None:
    model, tokens = make(by), texts()
    evaluated = evaluate_generation(model, tokens, WINDOW)
    assert (evaluated.by, evaluated.window, evaluated.texts) == (by, WINDOW, 5)
    keeps, scores = decoded(model, tokens)
    count = int(ROUTINGS[by].capacity * WINDOW)  # type: ignore[operator]
    for number, stretch in enumerate(evaluated.stretches[:3]):
        assert (stretch.text, stretch.first, stretch.last) == ("written", 6 * number, 6 * number + 5)
        alike, kept = [], []
        for name, keep_BN in keeps.items():
            for text in range(5):
                stretch_slice = slice(stretch.first, stretch.last + 1)
                best = scores[name][text, stretch_slice].argsort(descending=True, stable=True)[:count].tolist()
                alike += [bool(keep_BN[text, stretch_slice][place]) == (place in best) for place in range(WINDOW)]
                kept += keep_BN[text, stretch_slice].tolist()
        assert stretch.agreement.value == pytest.approx(sum(alike) / len(alike))
        assert stretch.kept.value == pytest.approx(sum(kept) / len(kept))
    first, *_, last = evaluated.stretches[:3]
    assert evaluated.decay["written"].value == pytest.approx(last.agreement.value - first.agreement.value)
    # What is generated begins as what was written.
    for name in ("loss", "kept", "agreement", "above_chance"):
        stretch_slice, begun = (getattr(stretch, name).value for stretch in (first, evaluated.stretches[3]))
        assert begun == pytest.approx(stretch_slice, rel=1e-5)
    assert from_plain(Generation, json.loads(json.dumps(dataclasses.asdict(evaluated))), limit=None) == evaluated
    assert len(evaluated.table().rows) == 1 + 6
    assert f"The {by} decides token by token, beside the top-k of windows of 6; 5 texts." in str(evaluated)


def test_draws_follow_the_seed_alone() -> None:
    model = make("score")
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = evaluate_generation(model, texts(), WINDOW, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert evaluate_generation(model, texts(), WINDOW, seed=3) == one
    assert evaluate_generation(model, texts(), WINDOW, seed=4).stretches[3:] != one.stretches[3:]


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match=r"two windows of 6 tokens long or more, in whole windows, got 15"):
        evaluate_generation(make("score"), texts()[:, :15], WINDOW)
    with pytest.raises(ValueError, match="got 6"):
        evaluate_generation(make("score"), texts()[:, :6], WINDOW)
    with pytest.raises(ValueError, match="windows of 0 tokens"):
        evaluate_generation(make("score"), texts(), 0)
    threshold = mmod.RoutingConfig(router="linear", select="threshold")
    for routing in (threshold, mmod.RoutingConfig(router="linear")):
        model = mmod.route_(make_language("llama", vocab_size=20).eval(), routing)
        with pytest.raises(ValueError, match="takes the top-k in training and decides each token alone"):
            evaluate_generation(model, texts(), WINDOW)
