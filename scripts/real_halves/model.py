"""A LLaVA of trained halves: DINOv2's ViT-S/14, a new projector and SmolLM2-135M-Instruct."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CLIPImageProcessor,
    Dinov2Config,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from mmod.data.records import IMAGE

PATCH = 14
BEFORE = "A photo of a"
"""Text in front of the image: the first token is the language model's attention sink, which no image token can be."""
DEPTH = 11
"""Blocks of the tower that are used; features of the last one, tuned for saliency, name less well."""
# An answer follows in the words of a text, as this language model continues texts better than it obeys.
_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '" + BEFORE + " " + IMAGE + ".' }}{% else %}"
    "{{ ' Question: ' + part['text'] }}{% endif %}{% endfor %}{% else %}{{ ' Answer: ' }}"
    "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' Answer:' }}{% endif %}"
)


def create(tower: Path, language: Path, patches: int) -> tuple[LlavaForConditionalGeneration, LlavaProcessor]:
    """Return the model, with a projector of random weights, and its processor.

    Args:
        tower: Weights of timm's `vit_small_patch14_dinov2`, or of another width with heads of 64 channels.
        language: Folder of SmolLM2-135M-Instruct.
        patches: Side of the images in patches.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(language)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    tokenizer.image_token = IMAGE
    text: Any = AutoModelForCausalLM.from_pretrained(language, dtype=torch.float32)
    text.resize_token_embeddings(len(tokenizer))
    weights = load_file(tower)
    width = weights["cls_token"].shape[2]
    side = round((weights["pos_embed"].shape[1] - 1) ** 0.5)
    vision = Dinov2Config(
        hidden_size=width,
        num_hidden_layers=DEPTH,
        num_attention_heads=width // 64,
        image_size=side * PATCH,
        patch_size=PATCH,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text.config,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=patches**2,
        tie_word_embeddings=True,
    )
    model = LlavaForConditionalGeneration(config)
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.tie_weights()
    missing, unexpected = model.model.vision_tower.load_state_dict(tower_weights(weights), strict=False)
    # A mask token is used in pretraining alone.
    if unexpected or set(missing) != {"embeddings.mask_token"}:
        raise ValueError(f"{tower} holds other weights than a ViT's: missing {missing}, unexpected {unexpected}")
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225]),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_TEMPLATE,
    )
    read_at(processor, patches)
    return model.eval(), processor


def read_at(processor: LlavaProcessor, patches: int) -> None:
    """Let a processor give images of so many patches a side, in place."""
    side = {"height": patches * PATCH, "width": patches * PATCH}
    processor.image_processor.size = side
    processor.image_processor.crop_size = side


def tower_weights(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return timm's weights of the first blocks by the names of transformers."""
    named = {
        "embeddings.cls_token": weights["cls_token"],
        "embeddings.position_embeddings": weights["pos_embed"],
        "embeddings.patch_embeddings.projection.weight": weights["patch_embed.proj.weight"],
        "embeddings.patch_embeddings.projection.bias": weights["patch_embed.proj.bias"],
        "layernorm.weight": weights["norm.weight"],
        "layernorm.bias": weights["norm.bias"],
    }
    for block in range(DEPTH):
        old, new = f"blocks.{block}.", f"encoder.layer.{block}."
        for part in ("weight", "bias"):
            query, key, value = weights[f"{old}attn.qkv.{part}"].chunk(3)
            named |= {
                f"{new}attention.{name}_proj.{part}": one for name, one in (("q", query), ("k", key), ("v", value))
            }
            named[f"{new}attention.o_proj.{part}"] = weights[f"{old}attn.proj.{part}"]
            for name in ("norm1", "norm2", "mlp.fc1", "mlp.fc2"):
                named[f"{new}{name}.{part}"] = weights[f"{old}{name}.{part}"]
        for scale in ("1", "2"):
            named[f"{new}layer_scale{scale}.lambda1"] = weights[f"{old}ls{scale}.gamma"]
    return named
