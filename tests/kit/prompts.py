"""A small LLaVA and models like Qwen-VL with questions for them, for the advice and the commands of the docs."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, LlavaConfig, LlavaForConditionalGeneration

from mmod.training.chat.processor import create_word_processor
from tests.kit.processors import qwen
from tests.kit.vlm_types import config_of


def make_prompts(root: Path) -> None:
    """Write a tiny LLaVA to `llava`, and `questions.json` with an image of its own."""
    processor = create_word_processor(image_size=8, patch_size=4)
    config = LlavaConfig(
        text_config={
            "model_type": "llama",
            "vocab_size": len(processor.tokenizer),
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        },
        vision_config={
            "model_type": "siglip_vision_model",
            "image_size": 8,
            "patch_size": 4,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "vision_use_head": False,
        },
        image_token_index=processor.image_token_id,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    LlavaForConditionalGeneration(config).save_pretrained(root / "llava")
    processor.save_pretrained(root / "llava")
    Image.new("RGB", (9, 9)).save(root / "one.png")
    turns = [{"from": "human", "value": "<image>\nhow many objects ?"}, {"from": "gpt", "value": "two"}]
    chats = [{"id": str(number), "image": "one.png", "conversations": turns} for number in range(4)]
    (root / "questions.json").write_text(json.dumps(chats))


def make_qwen_prompts(root: Path, kind: str) -> None:
    """Write a tiny model that limits pixels to `qwen`, and `questions.json` with images of two sizes.

    Args:
        kind: "qwen2_5_vl" or "qwen3_vl"; a token stands for 8 x 8 pixels in both.
    """
    size = {"shortest_edge": 8 * 8, "longest_edge": 8 * 8 * 400}
    processor = qwen(kind, size=size, patch_size=4, temporal_patch_size=1)
    config = config_of(kind)
    config.image_token_id = processor.image_token_id
    config.vision_config.spatial_merge_size = 2
    config.text_config.vocab_size = len(processor.tokenizer)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    for parameter in model.parameters():
        # So that answers depend on the images.
        parameter.data.normal_(std=0.5)
    model.save_pretrained(root / "qwen")
    processor.save_pretrained(root / "qwen")
    chats = []
    for number, shape in enumerate([(96, 160, 3), (64, 64, 3), (40, 48, 3)] * 2):
        pixels = torch.randint(256, shape, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(root / f"{number}.png")
        turns = [{"from": "human", "value": "<image>\nhow many objects ?"}, {"from": "gpt", "value": str(number)}]
        chats.append({"id": str(number), "image": f"{number}.png", "conversations": turns})
    (root / "questions.json").write_text(json.dumps(chats))
