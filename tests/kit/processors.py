"""A processor whose images have as many tokens as their size says."""

from __future__ import annotations

from typing import Any

import transformers

from mmod.training.chat.processor import create_word_processor


def qwen() -> Any:
    """Return a processor of Qwen2.5-VL that knows the words of the embedded questions."""
    words = create_word_processor(image_size=24, patch_size=6)
    words.tokenizer.add_tokens(["<|video_pad|>"], special_tokens=True)
    images = transformers.Qwen2VLImageProcessor(size={"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 60})
    videos = transformers.Qwen2VLVideoProcessor()
    return transformers.Qwen2_5_VLProcessor(images, words.tokenizer, videos, chat_template=words.chat_template)
