"""Importance of image tokens as the vision tower has it."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import mmod
from tests.kit.vlm_zoo import IMAGE, LINEAR, make_joint, make_language, merged_embeddings, prompt
from tests.kit.zoo import make_model

CONFIG = mmod.RoutingConfig(router={"name": "attention", "importance": "vision_tower"}, capacity=0.5, blocks="all")
GENERATION: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}


def make_siglip(attention: str) -> nn.Module:
    """Return a LLaVA whose tower has no class token."""
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "image_size": 12,
        "patch_size": 4,
    }
    text = make_joint("llava").config.text_config
    config = transformers.LlavaConfig(
        text_config=text,
        vision_config=vision,
        image_token_index=90,
        vision_feature_select_strategy="full",
        vision_feature_layer=[1, 3],
    )
    config._attn_implementation = attention
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration(config).eval()


def make_dinov2(attention: str) -> nn.Module:
    """Return a LLaVA whose tower's layers have other names, and registers of no kind."""
    vision = transformers.Dinov2Config(
        hidden_size=16, num_hidden_layers=4, num_attention_heads=2, image_size=12, patch_size=4, layerscale_value=0.5
    )
    config = transformers.LlavaConfig(
        text_config=make_joint("llava").config.text_config, vision_config=vision, image_token_index=90
    )
    config._attn_implementation = attention
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration(config).eval()


def defined(model: nn.Module, batch: dict[str, Tensor], layer: int, class_token: bool) -> Tensor:
    """Return the attention (B, N) that image tokens receive in a layer of the tower, by its own map."""
    tower = model.get_submodule("model.vision_tower")
    map_IHNN = tower(batch["pixel_values"], output_attentions=True).attentions[layer].double()
    received_IN = map_IHNN.mean(1)[:, 0, 1:] if class_token else map_IHNN.mean((1, 2))
    image_BN = batch["input_ids"] == 90
    return torch.zeros(image_BN.shape, dtype=torch.double).masked_scatter(image_BN, received_IN)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("tower", ["clip", "siglip", "dinov2"])
@torch.no_grad()
def test_it_is_what_the_tower_attends_to(tower: str, attention: str) -> None:
    makers: dict[str, Any] = {"clip": partial(make_joint, "llava"), "siglip": make_siglip, "dinov2": make_dinov2}
    make = makers[tower]
    batch = prompt("llava", (1, 2), side="right")
    # Hidden state -2 is the output of the last layer but one; hidden state 3 that of the third.
    expected = defined(make(attention="eager"), batch, 2, tower != "siglip")
    model = make(attention=attention)
    dense = model(**batch).logits
    mmod.route_(model, language=CONFIG)
    with mmod.trace(model) as trace:
        routed = model(**batch).logits
    assert len(trace) == 4
    free, real = batch["input_ids"] == 90, batch["attention_mask"].bool()
    for routing in trace.values():
        torch.testing.assert_close(routing.score_BN[free].double(), expected[free], rtol=1e-4, atol=1e-6)
        assert all(kept[is_free].sum() == is_free.sum() // 2 for kept, is_free in zip(routing.keep_BN, free))
    mmod.set_capacity_(model, 1)
    torch.testing.assert_close(model(**batch).logits[real], dense[real])
    assert not torch.equal(routed[real], dense[real])
    assert torch.equal(mmod.unroute_(model)(**batch).logits, dense)


@pytest.mark.parametrize("router", ["attention", "important_diversity"])
@torch.no_grad()
def test_prompts_generate_alone_what_they_do_in_a_batch_and_as_beams(router: str) -> None:
    model = mmod.route_(
        make_joint("llava"), language=CONFIG.replace(router=mmod.score(router, importance="vision_tower"))
    )
    batch = prompt("llava", (1, 1))
    together = model.generate(**batch, **GENERATION)[:, -4:]
    for sample in range(2):
        real = batch["attention_mask"][sample].bool()
        alone = {"input_ids": batch["input_ids"][sample : sample + 1, real], "attention_mask": real[real].long()[None]}
        pixels = batch["pixel_values"][sample : sample + 1]
        assert torch.equal(model.generate(**alone, pixel_values=pixels, **GENERATION)[0, -4:], together[sample])
    assert model.generate(**batch, **GENERATION, num_beams=2).shape == (2, batch["input_ids"].shape[1] + 4)
    assert torch.equal(copy.deepcopy(model).generate(**batch, **GENERATION)[:, -4:], together)
    words = {name: values[:, -4:] for name, values in batch.items() if name != "pixel_values"}
    assert torch.isfinite(model(**words).logits).all()


def test_scores_learn_from_it_under_checkpointing() -> None:
    config = LINEAR.replace(losses={"importance": 1.0}, router={"importance": "vision_tower"}, blocks=(0, 1, 2))
    gradients = []
    for checkpointed in (False, True):
        model = mmod.route_(make_joint("llava"), language=config).train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        loss = model(**prompt("llava", (1, 2))).logits.square().mean() + mmod.auxiliary_loss(model)
        loss.backward()
        gradients.append([router.grad.clone() for name, router in model.named_parameters() if "router" in name])
    assert len(gradients[0]) == 3
    for plain, again in zip(*gradients):
        assert plain.any()
        torch.testing.assert_close(plain, again)


def test_models_and_calls_without_it_are_refused() -> None:
    with pytest.raises(ValueError, match="importance='vision_tower' is for language models"):
        mmod.route_(make_model("test_vit"), CONFIG)
    for model in (make_language("llama"), make_joint("llava-next"), make_joint("qwen2-vl")):
        with pytest.raises(ValueError, match="whose image tokens are the patches of its tower"):
            mmod.route_(model, language=CONFIG)
    rotary = transformers.LlavaConfig(
        text_config=make_joint("llava").config.text_config,
        vision_config=transformers.DINOv3ViTConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=4,
            num_attention_heads=2,
            image_size=12,
            patch_size=4,
        ),
        image_token_index=90,
    )
    with pytest.raises(ValueError, match=r"changes them by .*position_embeddings"):
        mmod.route_(transformers.LlavaForConditionalGeneration(rotary), language=CONFIG)
    model = make_joint("llava")
    with pytest.raises(ValueError, match="route with tokens='image'"):
        mmod.route_(model, language=CONFIG.replace(language={"tokens": "all"}))
    mmod.route_(model, language=CONFIG)
    batch = prompt("llava", (1, 2))
    pixels = batch.pop("pixel_values")
    with pytest.raises(ValueError, match="pass pixel_values"):
        model(**batch)
    embedded = {"inputs_embeds": model.get_input_embeddings()(batch["input_ids"]), **batch}
    del embedded["input_ids"]
    with pytest.raises(ValueError, match="pass pixel_values"):
        model(**embedded)
    model.model.vision_tower(pixels[:2])
    with pytest.raises(ValueError, match="processed 18 patches, the prompts have 27 image tokens"):
        model(**batch)


@torch.no_grad()
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_pass_that_failed_leaves_no_importance_to_the_next(error: type[BaseException]) -> None:
    config = mmod.RoutingConfig(router=mmod.score("attention", importance="vision_tower"), capacity=0.5, blocks=(0, 1))
    model, batch = mmod.route_(make_joint("llava"), language=config), prompt("llava", (1,))
    expected = model(**batch).logits
    mask = batch["input_ids"] == IMAGE
    embeds = merged_embeddings(model, batch)

    def fail(*_: Any) -> None:
        raise error

    handle = model.model.language_model.layers[0].register_forward_pre_hook(fail)
    with pytest.raises(error):
        model(**batch)
    handle.remove()
    # The tower processes no image in this call, whose image tokens are those of other images.
    with pytest.raises(ValueError, match="pass pixel_values"):
        model(inputs_embeds=embeds, image_mask=mask)
    assert torch.equal(model(**batch).logits, expected)
