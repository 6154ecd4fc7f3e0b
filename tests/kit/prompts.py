"""A small LLaVA with questions for it, for the advice and the commands of the docs."""

from __future__ import annotations

import json
from pathlib import Path

from PIL import Image
from transformers import LlavaConfig, LlavaForConditionalGeneration

from mmod.training.chat.processor import create_word_processor


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
