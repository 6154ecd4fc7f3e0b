"""A model that merges image features itself, as LLaVA's own repository does: a subclass of a plain language model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import mmod
from mmod.adapters.transformers.cache_base import CACHE
from tests.kit.cover import in_turn
from tests.kit.vlm_zoo import IMAGE, JOINT, make_joint, make_language, merged_embeddings, prompt

PLACEHOLDER = -200
GENERATION: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
METHODS = ("p-mod", "a-mod", "videollm-mod")


class OwnLlavaModel(transformers.LlamaModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.mm_projector = torch.nn.Linear(16, config.hidden_size)


class OwnLlava(transformers.LlamaForCausalLM):
    """Takes the features of one image per sample in place of a placeholder, and names all arguments of its forward."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = OwnLlavaModel(config)
        self.post_init()

    def forward(  # type: ignore[override]
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        cache: Any = None,
        inputs_embeds: Any = None,
        labels: Any = None,
        use_cache: Any = None,
        images: Any = None,
        return_dict: Any = None,
        logits_to_keep: Any = 0,
        image_mask: Any = None,
    ) -> Any:
        if images is not None:
            inputs_embeds, image_mask = self.merge(input_ids, images)
            input_ids = None
        marked = {} if image_mask is None else {"image_mask": image_mask}
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **{CACHE: cache},
            **marked,
        )

    def merge(self, ids: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings and which of them are an image's."""
        rows, masks = [], []
        for row, features in zip(ids, self.model.mm_projector(images)):
            at = int((row == PLACEHOLDER).nonzero()[0])
            words = self.model.embed_tokens(row.clamp(min=0))
            rows.append(torch.cat([words[:at], features, words[at + 1 :]]))
            masks.append(
                torch.zeros(len(rows[-1]), dtype=torch.bool).index_fill_(0, torch.arange(len(features)) + at, 1)
            )
        return torch.stack(rows), torch.stack(masks)


def make_own(config: Any = None, token: int | None = PLACEHOLDER) -> Any:
    """Return a small model of the class, routed if a config is given; `token` is its config's image token."""
    torch.manual_seed(0)
    model: Any = OwnLlava(make_language("llama").config).eval()
    for parameter in model.parameters():
        parameter.data += 0.15 * torch.randn_like(parameter)
    if token is not None:
        model.config.image_token_id = token
    if config is None:
        return model
    mmod.route_(model, language=config)
    for block in mmod.routed_blocks(model).values():
        if block.router.config.router.learns:
            block.router.score.weight.data.normal_(std=0.2)
    return model


def preset(name: str) -> mmod.RoutingConfig:
    return mmod.preset(name, blocks=(1, 2), capacity=0.5)


IDS, FEATURES = torch.tensor([[1, 5, PLACEHOLDER, 7, 8, 9], [4, 3, 6, PLACEHOLDER, 8, 2]]), torch.randn(2, 12, 16)


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_only_image_tokens_are_skipped_and_text_is_generated(method: str) -> None:
    model = make_own(preset(method))
    embeds, mask = model.merge(IDS, FEATURES)
    with mmod.trace(model) as decisions:
        expected = model(IDS, images=FEATURES).logits
    assert decisions
    for routing in decisions.values():
        assert bool(routing.keep_BN[~mask].all())
        assert int(routing.keep_BN[mask].sum()) == 2 * 6
    assert torch.equal(model(inputs_embeds=embeds, image_mask=mask).logits, expected)
    answer = model.generate(inputs_embeds=embeds, image_mask=mask, **GENERATION)
    # Word by word with the whole prompt, whose new words are text.
    for word in range(GENERATION["max_new_tokens"]):
        logits = model(inputs_embeds=embeds, image_mask=mask, use_cache=False).logits[:, -1]
        if method != "a-mod" or not word:
            assert torch.equal(logits.index_fill(1, torch.tensor([2]), -torch.inf).argmax(-1), answer[:, word])
        embeds = torch.cat([embeds, model.get_input_embeddings()(answer[:, word : word + 1])], 1)
        mask = torch.nn.functional.pad(mask, (0, 1))


@pytest.mark.parametrize("method", METHODS[::2])
def test_a_preset_for_image_tokens_refuses_a_model_without_them_and_the_advice_works(method: str) -> None:
    for model in (make_own(token=None), make_own(token=None).model, make_language("llama")):
        with pytest.raises(ValueError, match=r"names no image token: set config\.image_token_id"):
            mmod.route_(model, preset(method))
        assert not mmod.is_routed(model)
    model = make_own(token=None)
    with pytest.raises(ValueError, match=r"let text be skipped too, with language=\{'tokens': 'all'\}"):
        mmod.route_(model, preset(method))
    mmod.route_(model, preset(method).replace(language={"tokens": "all"}))
    with mmod.trace(model) as decisions, torch.no_grad():
        model(input_ids=torch.randint(3, IMAGE, (1, 8)), use_cache=False)
    assert {int(routing.keep_BN.sum()) for routing in decisions.values()} == {4}


@torch.no_grad()
def test_embeddings_without_marks_are_refused_and_each_advice_works() -> None:
    model = make_own(preset("p-mod"))
    embeds, mask = model.merge(IDS, FEATURES)
    for call in (model, lambda **arguments: model.generate(**arguments, **GENERATION)):
        with pytest.raises(ValueError, match="the image tokens are unknown: pass input_ids or image_mask"):
            call(inputs_embeds=embeds)
        call(inputs_embeds=embeds, image_mask=mask)
        call(inputs_embeds=embeds, image_mask=torch.zeros_like(mask))
    ids = torch.full(mask.shape, 5).masked_fill(mask, PLACEHOLDER)
    generated = model.generate(inputs_embeds=embeds, input_ids=ids, **GENERATION)
    marked = model.generate(inputs_embeds=embeds, image_mask=mask, **GENERATION)
    assert torch.equal(generated[:, -5:], marked)
    everything = make_own(mmod.RoutingConfig(router="linear", language={"tokens": "all"}))
    for call in (everything, lambda **arguments: everything.generate(**arguments, **GENERATION)):
        with pytest.raises(ValueError, match="routed with tokens='all': leave it out, or route with tokens='image'"):
            call(inputs_embeds=embeds, image_mask=mask)
    everything(inputs_embeds=embeds)
    make_own(mmod.RoutingConfig(router="linear", language={"tokens": "image"}))(inputs_embeds=embeds, image_mask=mask)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "method"),
    in_turn([name for name in JOINT if not name.startswith(("qwen", "smol", "gemma", "pali"))], METHODS),
)
def test_generation_from_marked_embeddings_equals_that_from_ids(name: str, method: str) -> None:
    model, batch = make_joint(name), prompt(name, (1, 2))
    embeds, image_mask = merged_embeddings(model, batch), batch["input_ids"] == IMAGE
    mmod.route_(model, language=preset(method))
    for block in mmod.routed_blocks(model).values():
        if method != "a-mod":
            block.router.score.weight.normal_(std=0.2)
    # Beams repeat the samples, and with them what is marked.
    beams = {"num_beams": 3, "num_return_sequences": 2} if method == "a-mod" else {}
    settings = {**GENERATION, **beams, "suppress_tokens": [IMAGE]}
    length, mask = batch["input_ids"].shape[1], batch["attention_mask"]
    expected = model.generate(**batch, **settings)[:, length:]
    generated = model.generate(inputs_embeds=embeds, attention_mask=mask, image_mask=image_mask, **settings)
    assert torch.equal(generated, expected)
    with pytest.raises(ValueError, match="image_mask has shape"):
        model.generate(inputs_embeds=embeds, attention_mask=mask, image_mask=image_mask[[0, 0, 1]], **settings)
