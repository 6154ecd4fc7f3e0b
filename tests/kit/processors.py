"""Processors whose images have as many tokens as their size says."""

from __future__ import annotations

from typing import Any

import transformers

from mmod.training.chat.processor import create_word_processor


def qwen(kind: str = "qwen2_5_vl", **images: Any) -> Any:
    """Return a processor of Qwen2.5-VL, or "qwen3_vl", that knows the words of the embedded questions.

    Args:
        images: Arguments of its image processor.
    """
    words = create_word_processor(image_size=24, patch_size=6)
    added = ["<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    words.tokenizer.add_tokens(added, special_tokens=True)
    size = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 60}
    pictures = transformers.Qwen2VLImageProcessor(**{"size": size, **images})
    if kind == "qwen3_vl":
        host, videos = transformers.Qwen3VLProcessor, transformers.Qwen3VLVideoProcessor()
    else:
        host, videos = transformers.Qwen2_5_VLProcessor, transformers.Qwen2VLVideoProcessor()
    return host(pictures, words.tokenizer, videos, chat_template=words.chat_template)
