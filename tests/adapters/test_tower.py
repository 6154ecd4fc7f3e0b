"""Importance of image tokens as the vision tower has it."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import mmod
from mmod.adapters.transformers.tower import IN_SQUARES, TowerImportance, by_square
from mmod.adapters.transformers.vision import vision_part
from tests.kit.towers import make_deep, tower_of
from tests.kit.vlm_types import FAMILIES
from tests.kit.vlm_zoo import (
    IMAGE,
    LINEAR,
    VIDEO,
    lively,
    make_joint,
    make_language,
    merged_embeddings,
    prompt,
    sample_of,
    type_of,
    video,
)

PLAIN = ("llava", "internvl", "idefics3", "smolvlm", "qwen2-vl", "qwen2.5-vl", "qwen3-vl")
CONFIG = mmod.RoutingConfig(router={"name": "attention", "importance": "vision_tower"}, capacity=0.5, blocks="all")
GENERATION: dict[str, Any] = {"max_new_tokens": 2, "min_new_tokens": 2, "do_sample": False}


_SMALL: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "image_size": 12, "patch_size": 4}
# Towers of a LLaVA without a class token, and with layers of other names and registers of no kind.
TOWERS: dict[str, dict[str, Any]] = {
    "siglip": {
        "vision_config": transformers.SiglipVisionConfig(**_SMALL, num_hidden_layers=4, intermediate_size=24),
        "vision_feature_select_strategy": "full",
        "vision_feature_layer": [1, 3],
    },
    "dinov2": {"vision_config": transformers.Dinov2Config(**_SMALL, num_hidden_layers=4, layerscale_value=0.5)},
}


def make_llava(tower: str, attention: str) -> nn.Module:
    """Return a LLaVA with CLIP's tower, or with one of `TOWERS`."""
    if tower == "clip":
        return make_joint("llava", attention=attention)
    text = make_joint("llava").config.text_config
    config = transformers.LlavaConfig(text_config=text, image_token_index=90, **copy.deepcopy(TOWERS[tower]))
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
    batch = prompt("llava", (1, 2), side="right")
    # Hidden state -2 is the output of the last layer but one; hidden state 3 that of the third.
    expected = defined(make_llava(tower, "eager"), batch, 2, tower != "siglip")
    model = make_llava(tower, attention)
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


def merged_map(name: str, pixels_ICHW: Tensor) -> Tensor:
    """Return the mean importance (I, T) of 2 x 2 of 6 x 6 patches in the last layer of a tower, by its own map."""
    tower = tower_of(make_joint(name, attention="eager"))
    map_IHNN = tower(pixels_ICHW, output_attentions=True).attentions[-1].double()
    if name == "internvl":
        received_IN = map_IHNN.mean(1)[:, 0, 1:]
    else:
        received_IN = map_IHNN.mean((1, 2))
    return received_IN.view(-1, 3, 2, 3, 2).mean((2, 4)).flatten(1)


@pytest.mark.parametrize("name", ["internvl", "idefics3", "smolvlm"])
@torch.no_grad()
def test_a_token_of_several_patches_has_their_mean(name: str) -> None:
    batch = prompt(name, (1, 2), side="right")
    pixels = batch["pixel_values"].view(3, 3, 24, 24)
    expected = merged_map(name, pixels)
    model = mmod.route_(make_joint(name), language=CONFIG)
    with mmod.trace(model) as trace:
        model(**batch)
    free = batch["input_ids"] == IMAGE
    for routing in trace.values():
        torch.testing.assert_close(routing.score_BN[free].double(), expected.flatten(), rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_patches_that_are_reordered_are_found() -> None:
    # Qwen's patches stand in groups of 2 x 2, which become one token; its tower has rotary embeddings and no batch.
    model = make_deep("qwen2-vl", layers=4, spatial_merge_size=2)
    generator = torch.Generator().manual_seed(3)
    grid = torch.tensor([[1, 4, 4], [1, 2, 6]])
    ids = torch.tensor([[1, 5, *[IMAGE] * 4, 6, *[IMAGE] * 3, 7]])
    batch = {
        "input_ids": ids,
        "pixel_values": torch.randn(28, 48, generator=generator),
        "image_grid_thw": grid,
        "mm_token_type_ids": (ids == IMAGE).long(),
    }
    seen: dict[str, Any] = {}

    def look(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        seen.update(options, x=args[0] if args else options["hidden_states"])

    attention: Any = tower_of(model).blocks[-1].attn
    handle = attention.register_forward_pre_hook(look, with_kwargs=True)
    model(**batch)
    handle.remove()
    query, key, _ = attention.qkv(seen["x"]).view(28, 3, attention.num_heads, -1).unbind(1)
    rotate = transformers.models.qwen2_vl.modeling_qwen2_vl.apply_rotary_pos_emb_vision
    query, key = rotate(query, key, *seen["position_embeddings"])
    expected = []
    for q_NHE, k_NHE in zip(query.double().split([16, 12]), key.double().split([16, 12])):
        map_HNN = torch.einsum("ihe,jhe->hij", q_NHE, k_NHE).mul(q_NHE.shape[-1] ** -0.5).softmax(-1)
        expected.append(map_HNN.mean((0, 1)).view(-1, 4).mean(1))
    mmod.route_(model, language=CONFIG)
    with mmod.trace(model) as trace:
        model(**batch)
    for routing in trace.values():
        torch.testing.assert_close(routing.score_BN[ids == IMAGE].double(), torch.cat(expected), rtol=1e-4, atol=1e-6)


# Fields of configs by which several patches become a token.
SQUARES: dict[str, dict[str, Any]] = {
    "aya_vision": {"downsample_factor": 2},
    "cohere2_vision": {"downsample_factor": 2},
    "gemma3": {"mm_tokens_per_image": 9},
    "ovis2": {"vision_config": {"hidden_stride": 2}},
}
NAMES = {"gemma3": "gemma3-vision"}


@pytest.mark.parametrize("kind", IN_SQUARES)
def test_image_tokens_stand_for_squares_of_patches(kind: str) -> None:
    config: Any = make_joint(NAMES.get(kind, kind)).config
    for field, value in SQUARES.get(kind, {}).items():
        if isinstance(value, dict):
            vars(config)[field].update(value)
        else:
            setattr(config, field, value)
    if kind in SQUARES:
        config.vision_config.image_size = 24
    torch.manual_seed(0)
    model: Any = lively(transformers.AutoModelForImageTextToText.from_config(config))
    part = vision_part(model.model)
    assert part is not None
    reader = TowerImportance(model.model, part())
    starts: list[Tensor] = []

    def begin(module: nn.Module, args: object, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        starts.append(first.detach().requires_grad_())
        return (starts[-1], *output[1:]) if isinstance(output, tuple) else starts[-1]

    reader.reads.register_forward_hook(begin)
    pictures = FAMILIES[kind].pictures
    side = 2 if kind in SQUARES else pictures.pixels[-1] // 12
    pixels = torch.randn(1, *pictures.pixels[:-2], 12 * side, 12 * side)
    output = model.model.get_image_features(pixel_values=pixels[None] if pictures.together else pixels)
    features = getattr(output, "pooler_output", output)
    parts = [features] if isinstance(features, Tensor) else features
    feature_TD = torch.cat([part.flatten(0, -2) for part in parts])
    patch_1RC = torch.arange((3 * side) ** 2).view(1, 3 * side, 3 * side)
    for row, patches in zip(feature_TD, by_square(patch_1RC, side), strict=True):
        (gradient_1PD,) = torch.autograd.grad(row.sum(), starts, retain_graph=True)
        reached = gradient_1PD[0, reader.stack.prefix :].abs().sum(-1).nonzero().flatten()
        assert torch.equal(reached, patches.sort().values)


@pytest.mark.parametrize(
    "name", [*PLAIN, "gemma3-vision", "paligemma", "vipllava", "perception_lm", "janus", "glm4v", "video_llama_3"]
)
@torch.no_grad()
def test_every_family_whose_tokens_are_made_of_patches_of_their_own_is_routed_by_it(name: str, tmp_path: Path) -> None:
    model, batch = make_joint(name), prompt(name, (1, 2))
    dense, classes = model(**batch).logits, [type(module) for module in model.modules()]
    random = torch.get_rng_state()
    mmod.route_(model, language=CONFIG)
    with mmod.trace(model) as trace:
        logits = model(**batch).logits
    assert torch.equal(torch.get_rng_state(), random)
    for routing in trace.values():
        tokens = FAMILIES[type_of(name)[0]].pictures.tokens
        assert (routing.score_BN > 0).sum(1).tolist() == [tokens, 2 * tokens]
    place = batch["attention_mask"][0].bool()
    torch.testing.assert_close(logits[0, place], model(**sample_of(batch, 0, (1, 2))).logits[0], atol=2e-5, rtol=0)
    model.save_pretrained(tmp_path)
    assert torch.equal(mmod.load_pretrained(tmp_path)(**batch).logits, logits)
    mmod.set_capacity_(model, 1)
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(model(**batch).logits[real], dense[real], atol=2e-5, rtol=0)
    mmod.undo_(model)
    assert torch.equal(model(**batch).logits, dense)
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.parametrize("name", ["llava", "internvl", "qwen2-vl"])
@torch.no_grad()
def test_beams_of_prompts_with_several_images_are_those_of_a_batch(name: str) -> None:
    model = mmod.route_(make_joint(name), language=CONFIG)
    batch = prompt(name, (2, 1))
    together = model.generate(**batch, **GENERATION, num_beams=2)
    with torch.inference_mode():
        assert torch.equal(model.generate(**batch, **GENERATION, num_beams=2), together)
    alone = model.generate(**sample_of(batch, 0, (2, 1)), **GENERATION, num_beams=2)
    assert torch.equal(alone[0, -4:], together[0, -4:])
    words = {key: values[:, -4:] for key, values in batch.items() if values.shape == batch["input_ids"].shape}
    assert torch.isfinite(model(**words).logits).all()


@torch.no_grad()
def test_frames_of_videos_have_the_importance_of_their_patches() -> None:
    model, batch = mmod.route_(make_joint("qwen2-vl"), language=CONFIG), video("qwen2-vl", (1, 2))
    with mmod.trace(model) as trace:
        model(**batch)
    for routing in trace.values():
        assert ((routing.score_BN > 0) == (batch["input_ids"] == VIDEO)).all()


@pytest.mark.parametrize("router", [CONFIG.router, "duplicate"], ids=["importance", "pixels"])
@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl", "video_llama_3"])
@torch.no_grad()
def test_images_and_videos_of_a_call_have_the_values_of_calls_of_their_own(name: str, router: Any) -> None:
    model = mmod.route_(make_joint(name), language=CONFIG.replace(router=router))
    films, pictures = video(name, (1, 1)), prompt(name, (1, 1))
    # Half of the patches repeat the one before.
    for batch, key in ((films, "pixel_values_videos"), (pictures, "pixel_values")):
        batch[key][1::2] = batch[key][: 2 * (len(batch[key]) // 2) : 2]
    by_token = [key for key, value in films.items() if value.shape == films["input_ids"].shape]
    # A video comes before an image in the prompt, and behind it in the tower.
    together = {**films, **pictures, **{key: torch.cat([films[key], pictures[key]], dim=1) for key in by_token}}
    scores = []
    for batch in (together, films, pictures):
        with mmod.trace(model) as trace:
            model(**batch)
        scores.append(next(iter(trace.values())).score_BN)
    places = films["input_ids"].shape[1]
    for score_BN, batch, token in ((scores[1], films, VIDEO), (scores[2], pictures, IMAGE)):
        assert score_BN[batch["input_ids"] == token].unique().numel() > 1
    torch.testing.assert_close(scores[0][:, :places], scores[1])
    torch.testing.assert_close(scores[0][:, places:], scores[2])


@torch.no_grad()
def test_a_tower_that_gets_no_rows_reads_images_or_videos() -> None:
    model, batch = mmod.route_(make_joint("perception_lm"), language=CONFIG), prompt("perception_lm", (1, 1))
    ids = batch["input_ids"]
    twice = torch.cat([ids, ids.where(ids != IMAGE, model.config.video_token_id)], dim=1)
    with pytest.raises(ValueError, match=r"this call has both. Pass them in calls of their own, or choose a score"):
        model(input_ids=twice, pixel_values=batch["pixel_values"], pixel_values_videos=batch["pixel_values"])


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
    with pytest.raises(ValueError, match=r"for image tokens: .* a model that has a tower, got a Llama"):
        mmod.route_(make_language("llama"), language=CONFIG)
    # A resampler mixes the patches of an image, and tiles leave out those of padding.
    for name, router in itertools.product(("aria", "llava-next"), (CONFIG.router, "duplicate")):
        with pytest.raises(ValueError, match=r"squares of patches.* with model_type='.* Choose another score"):
            mmod.route_(make_joint(name), language=CONFIG.replace(router=router))
    model = make_joint("llava")
    with pytest.raises(ValueError, match="route with tokens='image'"):
        mmod.route_(model, language=CONFIG.replace(language={"tokens": "all"}))
    mmod.route_(model, language=CONFIG)
    batch = prompt("llava", (1, 2))
    pixels = batch.pop("pixel_values")
    with pytest.raises(ValueError, match="pass pixel_values"):
        model(**batch)
    # What the tower did for someone else is no importance of these images.
    expected = model(**batch, pixel_values=pixels).logits
    model.model.vision_tower(pixels[:2])
    assert torch.equal(model(**batch, pixel_values=pixels).logits, expected)


@pytest.mark.parametrize(("tower", "strategy", "tokens"), [("clip", "full", 10), ("siglip", "default", 8)])
@torch.no_grad()
def test_image_tokens_are_all_that_a_strategy_selects(tower: str, strategy: str, tokens: int) -> None:
    model: Any = make_llava(tower, "eager")
    model.config.vision_feature_select_strategy = strategy
    pixels = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    # One patch repeats its left neighbour.
    pixels[:, :, :4, 8:] = pixels[:, :, :4, 4:8]
    ids = torch.tensor([[1, *[IMAGE] * tokens, 5, *[IMAGE] * tokens, 6]])
    map_IHNN = model.model.vision_tower(pixels, output_attentions=True).attentions[2]
    importance_IP = map_IHNN.mean(1)[:, 0] if tower == "clip" else map_IHNN.mean((1, 2))
    # A class token has no pixels.
    differs_IP = torch.ones(2, importance_IP.shape[1], dtype=torch.bool)
    differs_IP[:, -7] = False
    for router, expected_IP in ((CONFIG.router, importance_IP), ("duplicate", differs_IP)):
        mmod.route_(model, language=CONFIG.replace(router=router))
        with mmod.trace(model) as trace:
            model(input_ids=ids, pixel_values=pixels)
        score_IT = next(iter(trace.values())).score_BN[ids == IMAGE].view(2, tokens)
        actual_IT = score_IT if router != "duplicate" else score_IT > 0
        torch.testing.assert_close(actual_IT, expected_IP[:, -tokens:])
        mmod.unroute_(model)


@pytest.mark.parametrize("router", [CONFIG.router, "duplicate"], ids=["importance", "pixels"])
@torch.no_grad()
def test_a_llava_of_ones_own_is_routed_as_llava(router: Any) -> None:
    class OwnConfig(transformers.LlavaConfig):
        model_type = "llava_of_ones_own"

    logits = []
    for config_class in (transformers.LlavaConfig, OwnConfig):
        model: Any = make_joint("llava")
        for module in (model, model.model):
            module.config = config_class.from_dict(model.config.to_dict())
        mmod.route_(model, language=CONFIG.replace(router=router))
        logits.append(model(**prompt("llava", (1, 2))).logits)
    assert torch.equal(*logits)


def test_a_tower_whose_read_layer_is_routed_is_refused() -> None:
    model = make_joint("llava")
    classes = [type(module) for module in model.modules()]
    # The features come from the third of four layers.
    both = {"language": CONFIG, "image": mmod.RoutingConfig(router="norm", capacity=0.5, blocks=(2,))}
    refused = "block that features come from, which another method or the config of image changes"
    with pytest.raises(ValueError, match=refused):
        mmod.route_(model, **both)
    assert [type(module) for module in model.modules()] == classes
    mmod.route_(model, image=both["image"])
    with pytest.raises(ValueError, match=refused):
        mmod.route_(model, language=CONFIG)
    batch = prompt("llava", (1,))
    mmod.route_(mmod.undo_(model), language=CONFIG, image=both["image"].replace(blocks=(1,)))
    assert torch.isfinite(model(**batch).logits).all()


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
