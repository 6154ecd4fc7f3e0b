"""Later questions and images over a cache: as the full prompt, or refused with advice that works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmod
from mmod.adapters.transformers.cache_base import CACHE, cache_of
from tests.kit.cover import in_turn
from tests.kit.generation import IMAGES_ONLY, generate, routed
from tests.kit.vlm_zoo import IMAGE, PATCHES, make_language, prompt


@torch.no_grad()
def test_advice_on_generated_text_works() -> None:
    ids = torch.randint(3, 80, (1, 8))
    model = mmod.route_(make_language("llama"), mmod.RoutingConfig(router="attention", select="threshold"))
    with pytest.raises(ValueError, match="such as router='linear', with select='threshold' or with inference_thresh"):
        generate(model, {"input_ids": ids}, suppress_tokens=None)
    for advised in (
        mmod.RoutingConfig(router="linear", select="threshold"),
        mmod.RoutingConfig(router="linear", language={"inference_threshold": 0.5}, losses={"membership": 0.01}),
    ):
        generate(mmod.route_(make_language("llama"), advised), {"input_ids": ids}, suppress_tokens=None)
    # The model knows its image tokens, so that they alone may be skipped.
    model, batch = (
        routed("llava", mmod.RoutingConfig(router="linear", language={"tokens": "all"})),
        prompt("llava", (1,)),
    )
    with pytest.raises(ValueError, match="or with tokens='image'"):
        generate(model, batch)
    generate(routed("llava", mmod.RoutingConfig(router="linear", language={"tokens": "image"})), batch)


QUESTIONS = torch.randint(3, 80, (3, 1, 4), generator=torch.Generator().manual_seed(5))
BY_QUESTION = {
    "attention": IMAGES_ONLY["attention"],
    "last token": IMAGES_ONLY["attention"].replace(router={"importance": "last_token"}),
    "frames": IMAGES_ONLY["attention"].replace(language={"tokens": "span"}),
}


# What a cache went through before the question.
WAYS = ("continued", "cropped", "repeated")


def cached_prompt(model: Any, batch: dict[str, Any], more: Tensor | None = None) -> Any:
    ids, mask = batch["input_ids"], batch["attention_mask"]
    if more is not None:
        ids, mask = torch.cat([ids, more], 1), torch.cat([mask, torch.ones_like(more)], 1)
    return cache_of(model(**{**batch, "input_ids": ids, "attention_mask": mask}, use_cache=True))


@torch.no_grad()
@pytest.mark.parametrize(("method", "way"), in_turn(BY_QUESTION, WAYS))
def test_a_later_question_is_refused_where_it_chooses_image_tokens(method: str, way: str) -> None:
    model, batch = routed("llava", BY_QUESTION[method]), prompt("llava", (1,))
    ids = torch.cat([batch["input_ids"], QUESTIONS[0]], 1)
    cache = cached_prompt(model, batch, QUESTIONS[1] if way == "cropped" else None)
    if way == "cropped":
        cache.crop(-4)
    if way == "repeated":
        cache.batch_repeat_interleave(3)
        ids = torch.cat([torch.cat([batch["input_ids"], question], 1) for question in QUESTIONS])
    with pytest.raises(
        ValueError, match=r"attention of all queries of the prompt: pass the full prompt at once, without"
    ):
        generate(model, {"input_ids": ids}, **{CACHE: cache})
    second_turn = {**batch, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    second_turn["pixel_values"] = batch["pixel_values"].repeat_interleave(len(ids), dim=0)
    generate(model, second_turn)


@torch.no_grad()
@pytest.mark.parametrize(("method", "way"), in_turn([name for name in IMAGES_ONLY if name != "attention"], WAYS))
def test_a_later_question_reads_a_cache_as_the_full_prompt(method: str, way: str) -> None:
    model, batch = routed("llava", IMAGES_ONLY[method]), prompt("llava", (1,))
    ids = torch.cat([torch.cat([batch["input_ids"], question], 1) for question in QUESTIONS[:1]])
    cache = cached_prompt(model, batch, QUESTIONS[1] if way == "cropped" else None)
    if way == "cropped":
        cache.crop(-4)
    if way == "repeated":
        cache.batch_repeat_interleave(3)
        ids = torch.cat([torch.cat([batch["input_ids"], question], 1) for question in QUESTIONS])
    pixels = batch["pixel_values"].repeat_interleave(len(ids), dim=0)
    expected = generate(model, {"input_ids": ids, "pixel_values": pixels})
    assert torch.equal(generate(model, {"input_ids": ids}, **{CACHE: cache}), expected)


@torch.no_grad()
def test_drafts_over_a_cache_are_no_later_question() -> None:
    model, batch = routed("llava", IMAGES_ONLY["attention"]), prompt("llava", (1,))
    first = generate(model, batch, max_new_tokens=8)
    # Repeated words make drafts that are accepted; the prompt's own drafts would count as queries.
    assert generate(model, batch, max_new_tokens=8, prompt_lookup_num_tokens=2).shape == first.shape
    # The generation is over, and a single word goes on from its cache.
    out = generate(model, batch, max_new_tokens=4, return_dict_in_generate=True)
    words = out.sequences  # type: ignore[attr-defined]
    longer = generate(model, {"input_ids": words}, max_new_tokens=4, **{CACHE: cache_of(out)})  # type: ignore[arg-type]
    assert torch.equal(longer, first)


@torch.no_grad()
def test_advice_on_later_images_works() -> None:
    batch = prompt("llava", (2,))
    ids, image = batch["input_ids"], torch.cat([torch.tensor([[7, 8]]), torch.full((1, PATCHES), IMAGE)], 1)
    conversation = torch.cat([ids, image, QUESTIONS[0]], 1)
    pixels = torch.randn(3, *batch["pixel_values"].shape[1:])

    def answers(config: mmod.RoutingConfig) -> tuple[Tensor, Tensor]:
        model = routed("llava", config)
        cache = cached_prompt(model, {**batch, "pixel_values": pixels[:2]})
        full = generate(model, {"input_ids": conversation, "pixel_values": pixels})
        return generate(model, {"input_ids": conversation, "pixel_values": pixels[2:]}, **{CACHE: cache}), full

    with pytest.raises(ValueError, match="or frame by frame with tokens='span'"):
        answers(IMAGES_ONLY["linear"])
    for advised in (
        IMAGES_ONLY["linear"].replace(select="threshold", gate="sigmoid"),
        IMAGES_ONLY["linear"].replace(language={"tokens": "span"}),
    ):
        assert torch.equal(*answers(advised))
