"""Recipes of 7 billion parameters: what their estimates say, from published sizes and without weights."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from PIL import Image

import mmod
from mmod.data.readers.chat import ChatCollator
from mmod.data.readers.conversations import ConversationsConfig, open_conversations
from mmod.training.chat.config import TrainConfig
from mmod.training.chat.estimate import ChatEstimate, count_patches
from mmod.training.chat.processor import create_word_processor
from mmod.training.chat.start import create_with_processor
from mmod.training.command import main
from mmod.training.kinds import estimate
from tests.kit.chat_configs import MASKED, P_MOD, vlm_config
from tests.kit.counting import flop_counter
from tests.kit.vlm_zoo import JOINT, MERGED, PATCHES, make_joint, prompt

ROOT = Path(__file__).parents[3]
IMAGE_ALONE = {"image": {"router": "linear", "capacity": 0.5}}
LLAMA = transformers.LlamaConfig(vocab_size=32064, max_position_embeddings=4096)  # Vicuna's sizes are the defaults
CLIP = transformers.CLIPVisionConfig(
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=24,
    num_attention_heads=16,
    image_size=336,
    patch_size=14,
    projection_dim=768,
    vocab_size=32000,
)
SQUARE = {"height": 336, "width": 336}
QWEN: dict[str, Any] = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 128000,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}
QWEN_VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}


def write_model(folder: Path, recipe: str) -> None:
    """Write config and processor of a recipe's model, as its checkpoint has them but for the words of the tokenizer."""
    processor: Any = create_word_processor(image_size=336, patch_size=14)
    words = processor.tokenizer
    if recipe.startswith("qwen"):
        words.add_tokens(["<|video_pad|>"], special_tokens=True)
        config: Any = transformers.Qwen2_5_VLConfig(
            text_config=QWEN,
            vision_config=QWEN_VISION,
            image_token_id=words.image_token_id,
            video_token_id=words.convert_tokens_to_ids("<|video_pad|>"),
            tie_word_embeddings=False,
        )
        images, videos = transformers.Qwen2VLImageProcessor(), transformers.Qwen2VLVideoProcessor()
        processor = transformers.Qwen2_5_VLProcessor(images, words, videos, chat_template=processor.chat_template)
    elif recipe.startswith("llava-next"):
        config = transformers.LlavaNextConfig(
            text_config=LLAMA, vision_config=CLIP, image_token_index=words.image_token_id, vision_feature_layer=-2
        )
        processor = transformers.LlavaNextProcessor(
            transformers.LlavaNextImageProcessor(size={"shortest_edge": 336}, crop_size=SQUARE),
            words,
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=processor.chat_template,
        )
    else:
        config = transformers.LlavaConfig(
            text_config=LLAMA, vision_config=CLIP, image_token_index=words.image_token_id, vision_feature_layer=-2
        )
    config.save_pretrained(folder)
    processor.save_pretrained(folder)


def estimate_of(folder: Path, recipe: str, text_tokens: int) -> tuple[TrainConfig, ChatEstimate]:
    """Estimate a recipe on conversations of one picture of 640 x 480 pixels and so many text tokens."""
    write_model(folder, recipe)
    Image.new("RGB", (640, 480)).save(folder / "a.png")
    # Two marks of roles, a first and a last token, and an answer of one word.
    question = " ".join(["<image>", *["what"] * (text_tokens - 5)])
    said = [{"from": "human", "value": question}, {"from": "gpt", "value": "7"}]
    (folder / "all.json").write_text(json.dumps([{"id": "1", "image": "a.png", "conversations": said}]))
    config = TrainConfig.load(ROOT / "configs" / "vlm" / f"{recipe}.yaml")
    model = replace(config.model, checkpoint=str(folder))
    data = replace(config.data, train=str(folder / "all.json"), images=str(folder))
    return config, estimate(replace(config, model=model, data=data))


def decayed(depth: int) -> list[float]:
    """Return p-MoD's shares of image tokens, written out from its paper."""
    shares = [0.5 * math.cos(math.pi * layer / (depth - 1)) + 0.5 for layer in range(depth)]
    return [1.0 if share > 0.85 else max(share, 0.15) for share in shares]


def layer_flops(tokens: int, weights: int, width: int) -> int:
    """Two per weight and token; two products of all pairs of tokens, each two per channel."""
    return 2 * tokens * weights + 4 * tokens**2 * width


LLAMA_WEIGHTS = 4 * 4096**2 + 3 * 4096 * 11008
QWEN_WEIGHTS = 2 * 3584**2 + 2 * 3584 * 512 + 3 * 3584 * 18944
# Rank 16 beside queries, keys, values and the output.
QWEN_ADAPTERS = 16 * (2 * (3584 + 3584) + 2 * (3584 + 512))
GAMMA = [1.0] * 3 + [0.7] * 28 + [1.0]
KINDS = {
    # text and image tokens; shares; weights of a layer and its width; vocabulary; parameters without routers
    "llava-1.5-7b-p-mod": (55, 576, decayed(32), LLAMA_WEIGHTS, 4096, 32064, 7_063_427_072),
    "llava-1.5-7b-gamma-mod": (224, 576, GAMMA, LLAMA_WEIGHTS, 4096, 32064, 7_063_427_072),
    # A view of 24 x 24, and 36 of 48 rows, each ended by a token: the picture is no square.
    "llava-next-7b-p-mod": (60, 576 + 36 * 49, decayed(32), LLAMA_WEIGHTS, 4096, 32064, 7_063_431_168),
    # 34 x 46 patches, four to a token.
    "qwen2.5-vl-7b-p-mod": (60, 391, decayed(28), QWEN_WEIGHTS + QWEN_ADAPTERS, 3584, 152064, 8_292_166_656),
}
# TFLOPs of a prompt that the sources state, dense and routed, for as many tokens as give the dense one; and how far the
# estimate's routed ones lie from the stated. gamma-MoD's count lets 29 layers skip text, too.
PUBLISHED = {"llava-1.5-7b-p-mod": (8.38, 4.92, 0.978), "llava-1.5-7b-gamma-mod": (10.7, 7.7, 1.118)}


# A config that comes with mmod has no name that transformers gives up.
@pytest.mark.filterwarnings("error:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("recipe", KINDS)
def test_estimates_equal_what_a_hand_computes(recipe: str, tmp_path: Path) -> None:
    text, images, shares, weights, width, vocabulary, parameters = KINDS[recipe]
    config, cost = estimate_of(tmp_path, recipe, text)
    tokens, depth = text + images, len(shares)
    assert (cost.tokens, cost.image_tokens, cost.longest, cost.depth) == (tokens, images, tokens, depth)
    routed = [layer for layer, share in enumerate(shares) if share < 1]
    estimated = {int(name.rsplit(".", 1)[1]): share for name, share in cost.kept.items()}
    assert estimated == pytest.approx({layer: shares[layer] for layer in routed}, abs=1e-3)
    head = 2 * width * vocabulary
    assert cost.language.dense == head + depth * layer_flops(tokens, weights, width)
    # The answer and its end are not protected.
    free = images + (2 if config.data.protected == "question" else 0)
    kept = [tokens - free + math.floor(free * estimated.get(layer, 1.0) + 1e-9) for layer in range(depth)]
    routers = len(routed) * 2 * tokens * width
    assert cost.language.routed == head + routers + sum(layer_flops(rows, weights, width) for rows in kept)
    if recipe in PUBLISHED:
        dense, published, above = PUBLISHED[recipe]
        assert cost.language.dense / 1e12 == pytest.approx(dense, rel=2e-3)
        assert cost.language.routed / 1e12 == pytest.approx(published * above, rel=2e-3)
    adapters = depth * QWEN_ADAPTERS if config.lora else 0
    # Beside adapters, peft trains copies of the routers.
    originals = cost.router_parameters if adapters else 0
    assert cost.parameters == parameters + adapters + cost.router_parameters + originals
    # Adapters and the routers beside them are in float32.
    singles = adapters + (cost.router_parameters if adapters else 0)
    assert cost.weight_bytes == 2 * cost.parameters + 2 * singles
    trained = cost.trained if config.lora is None else adapters + cost.router_parameters
    assert cost.trained == trained
    assert cost.training_bytes == 3 * (2 * trained + 2 * singles)
    # Inputs of the layers alone, in half precision: the backward pass computes the rest again.
    held = config.trainer["per_device_train_batch_size"] * depth * tokens * width * 2
    assert cost.activation_bytes == held
    assert not (ROOT / config.output).exists()


@pytest.fixture(scope="module")
def cost(folder: Path) -> ChatEstimate:
    return estimate(vlm_config(folder, "planned", routing=P_MOD))


def test_a_dry_run_says_what_the_vision_tower_costs(
    folder: Path, cost: ChatEstimate, capsys: pytest.CaptureFixture[str]
) -> None:
    config = vlm_config(folder, "printed", routing=P_MOD)
    (folder / "printed.yaml").write_text(yaml.safe_dump(config.to_dict()))
    main([str(folder / "printed.yaml"), "--dry-run=0.001"], "chat")
    printed = capsys.readouterr().out
    assert f"of a sample: conversation {cost.flops['conversation'] / 1e9:.4g}; about" in printed
    assert f"\nforward GFLOPs of the vision tower: {cost.vision / 1e9:.4g}; of the dense model: " in printed
    assert f"\n{cost.hours(0.001):.4g} hours at 0.001 TFLOP/s in each process\n" in printed


@pytest.mark.parametrize("routing", [None, P_MOD, IMAGE_ALONE, {**P_MOD, **IMAGE_ALONE}], ids=str)
def test_a_conversation_costs_what_torch_counts_of_the_whole_model(folder: Path, routing: Any, tmp_path: Path) -> None:
    Image.new("RGB", (640, 480)).save(tmp_path / "a.png")
    said = [{"from": "human", "value": "<image> which colour is it"}, {"from": "gpt", "value": "7"}]
    (tmp_path / "one.json").write_text(json.dumps([{"id": "1", "image": "a.png", "conversations": said}]))
    data = ConversationsConfig(str(tmp_path / "one.json"), images=str(tmp_path), on_corrupt="skip")
    config = vlm_config(folder, routing=routing, data=data)
    cost = estimate(config)
    model, processor = create_with_processor(config)
    (chat,) = open_conversations(data.train, data).read([0])
    batch = ChatCollator(processor, data.max_length)([chat])
    with torch.no_grad(), flop_counter() as counter:
        model.eval()(**batch)
    assert cost.flops == {"conversation": counter.get_total_flops()}
    assert (cost.dense == cost.flops["conversation"]) == (routing is None)
    assert cost.step_flops == 3 * cost.batch * cost.flops["conversation"]
    if routing is None:
        assert estimate(replace(config, data=replace(data, packed=True))) == cost
        fixed = estimate(replace(config, frozen=["image"]))
        assert fixed.step_flops == fixed.batch * (3 * fixed.dense - 2 * fixed.vision)


def test_estimate_agrees_with_the_model(folder: Path, cost: ChatEstimate) -> None:
    config = vlm_config(folder, "planned", routing=P_MOD)
    model, _ = create_with_processor(config)
    assert cost.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert cost.router_parameters == 3 * 33
    assert cost.kept == mmod.capacities(model)
    assert (cost.samples, cost.steps, cost.batch, cost.depth) == (256, 4, 4, 4)
    assert cost.language.routed < cost.language.dense
    assert estimate(replace(config, trainer={"per_device_train_batch_size": 8, "num_train_epochs": 2})).steps == 64
    assert "3 of 4 layers are routed" in str(cost)
    dense = estimate(replace(config, routing=None))
    assert cost.activation_bytes < dense.activation_bytes
    assert f"256 conversations of {cost.tokens} tokens on average, {cost.image_tokens} of images and " in str(dense)
    assert "routed" not in str(dense)
    free, masked = (
        estimate(vlm_config(folder, routing=MASKED, data=replace(config.data, protected=protected)))
        for protected in (None, "question")
    )
    assert free.language.routed < masked.language.routed < masked.language.dense
    assert free.activation_bytes < masked.activation_bytes
    assert not (folder / "planned").exists()


@pytest.mark.parametrize("name", JOINT)
def test_patches_of_every_family_are_counted(name: str) -> None:
    views = {"llava-next": 3, "llava-onevision": 2}.get(name, 4 if name in MERGED else 1)
    assert count_patches(make_joint(name), prompt(name, (2,))) == 2 * views * PATCHES
