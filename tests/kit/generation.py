"""Configs that generation is tested with, and the check that a cache changes nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import mmod
from mmod.adapters.transformers.cache_base import CACHE, cache_of
from tests.kit.vlm_zoo import IMAGE, LANGUAGE, VIDEO, make_joint, make_language

SCORE = mmod.score("linear", init_std=0.2)
IMAGES_ONLY = {
    "linear": mmod.RoutingConfig(router=SCORE, capacity=0.5, blocks=(0, 1, 3)),
    "attention": mmod.RoutingConfig(router="attention", capacity=0.5, blocks=(1, 3)),
    "p-mod": mmod.RoutingConfig(
        router={"name": "linear", "bias": True, "init_std": 0.2},
        capacity=(0.8, 0.3),
        blocks=(1, 2),
        skipped="scale",
        language={"gate_on": "mlp"},
    ),
    "frames": mmod.RoutingConfig(router=SCORE, capacity=0.34, blocks=(1, 2), language={"tokens": "span"}),
    "modification": mmod.RoutingConfig(
        router=SCORE, select="threshold", gate="sigmoid", language={"gate_on": "branches"}, blocks=(0, 2)
    ),
    "random": mmod.RoutingConfig(router="random", capacity=0.5, blocks=(1, 2)),
    "change": mmod.RoutingConfig(router="change", capacity=(0.5, 0.34), blocks=(1, 2)),
    "stride": mmod.RoutingConfig(router="stride", capacity=0.25, blocks=(1, 3)),
    "temporal": mmod.RoutingConfig(router=mmod.score("temporal", images=True), capacity=0.34, blocks=(0, 1, 3)),
}
EVERYTHING = {
    "threshold": mmod.RoutingConfig(
        router=SCORE, select="threshold", gate="sigmoid", language={"tokens": "all"}, blocks=(0, 2)
    ),
    "inference": mmod.RoutingConfig(
        router=SCORE, capacity=0.5, language={"inference_threshold": 0.5, "tokens": "all"}, blocks=(1, 3)
    ),
    "predictor": mmod.RoutingConfig(
        router=SCORE,
        capacity=0.5,
        language={"inference_threshold": 0.5, "tokens": "all", "predictor": True},
        blocks=(0, 1),
        losses={"membership": 0.01},
    ),
    "compact": mmod.RoutingConfig(
        router={"name": "linear", "normalize": False, "init_std": 0.2, "tied": True},
        capacity=0.5,
        language={
            "inference_threshold": 0.5,
            "tokens": "all",
            "scored": "norm",
            "positions": "compact",
            "gate_on": "mlp",
        },
        blocks=(1, 2),
        gate="sigmoid",
    ),
}
NO_IMAGES = {"suppress_tokens": [IMAGE, VIDEO]}


def routed(name: str, config: mmod.RoutingConfig, attention: str = "sdpa", **changes: Any) -> Any:
    """Return a small language or joint model of the zoo with routed layers."""
    model = make_language(name, **changes) if name in LANGUAGE else make_joint(name, attention=attention, **changes)
    return mmod.route_(model, language=config)


def generate(model: Any, batch: dict[str, Any], **options: Any) -> Tensor:
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **NO_IMAGES, **options}
    result: Tensor = model.generate(**batch, **settings)
    return result


@torch.no_grad()
def check_cache_changes_nothing(model: Any, batch: dict[str, Any], steps: int = 3) -> None:
    """Prefill and decode word by word, and compare every step with one full forward pass over the same tokens.

    The pass gets the words as labels, so that importance is that of the prompt.
    """
    out = model(**batch, use_cache=True)
    cache, logits = cache_of(out), [out.logits]
    ids, mask = batch["input_ids"], batch["attention_mask"]
    # The arguments that mark image tokens grow with the prompt.
    masks = {name: batch[name] for name in ("mm_token_type_ids", "token_type_ids") if name in batch}
    sectioned = getattr(model.model, "rope_deltas", None) is not None
    last = mask.cumsum(1).argmax(1)
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        word = torch.randint(3, IMAGE, (len(ids), 1), generator=generator)
        ids, mask = torch.cat([ids, word], 1), torch.cat([mask, torch.ones_like(word)], 1)
        place = {}
        masks = {name: torch.cat([kinds, _kind_of_words(model, name, word)], 1) for name, kinds in masks.items()}
        if sectioned:
            # As `generate` does: time, height and width of a word are its place after the images' own.
            place = {"position_ids": (mask.sum(1, keepdim=True) - 1 + model.model.rope_deltas).expand(3, -1, -1)}
        out = model(input_ids=word, attention_mask=mask, **{CACHE: cache}, use_cache=True, **place)
        logits.append(out.logits)
    whole = {**batch, "input_ids": ids, "attention_mask": mask, **masks}
    # A loss may ignore the last token of an answer.
    labels = torch.nn.functional.pad(ids[:, -steps:-1], (ids.shape[1] - steps, 1), value=-100)
    full = model(**whole, labels=labels, use_cache=False).logits
    stepwise = torch.cat(logits[1:], 1)
    torch.testing.assert_close(stepwise, full[:, -steps:], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(
        logits[0][torch.arange(len(last)), last], full[torch.arange(len(last)), last], atol=1e-5, rtol=1e-4
    )


def _kind_of_words(model: Any, name: str, word: Tensor) -> Tensor:
    """Return what marks generated words: PaliGemma's prompt, of type 0, sees both ways, and its answer is of type 1."""
    answers = name == "token_type_ids" and model.config.model_type == "paligemma"
    return torch.full_like(word, int(answers))
