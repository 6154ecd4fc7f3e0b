"""Folders of small image-text models, as transformers saves them, with a tokeniser of the embedded captions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from mmod.data.synthetic.scenes import all_contents

SIDE = 48
LENGTH = 16
_END = "<end>"
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}


def captions_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokeniser whose words are those of the captions; the end of a caption pads it too, as CLIP's does."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<other>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["<start>", "<other>", _END])
    tokenizer.train_from_iterator((content.caption for content in all_contents()), trainer)
    special = [(word, tokenizer.token_to_id(word)) for word in ("<start>", _END)]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"<start> $A {_END}", special_tokens=special)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<start>", eos_token=_END, pad_token=_END, unk_token="<other>"
    )


def save_pair_model(kind: str, folder: Path) -> Any:
    """Save a small "clip" or "siglip" with its processor; return the dense model in evaluation mode."""
    tokenizer = captions_tokenizer()
    vision = {**_TOWER, "image_size": SIDE, "patch_size": 16}
    text = {
        **_TOWER,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": LENGTH,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(0)
    if kind == "clip":
        config = transformers.CLIPConfig(vision_config=vision, text_config=text, projection_dim=24)
        model: Any = transformers.CLIPModel(config)
        size = {"shortest_edge": SIDE}
        images: Any = transformers.CLIPImageProcessor(size=size, crop_size={"height": SIDE, "width": SIDE})
        transformers.CLIPProcessor(images, tokenizer).save_pretrained(folder)
    else:
        model = transformers.SiglipModel(transformers.SiglipConfig(vision_config=vision, text_config=text))
        images = transformers.SiglipImageProcessor(size={"height": SIDE, "width": SIDE})
        transformers.SiglipProcessor(images, tokenizer).save_pretrained(folder)
    model.save_pretrained(folder)
    return model.eval()
