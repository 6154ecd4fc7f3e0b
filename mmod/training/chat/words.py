"""The processor of the embedded questions: a vocabulary of words and a chat template."""

from __future__ import annotations

from typing import Any

from mmod.data.records import IMAGE
from mmod.data.synthetic.questions import WORDS

_ROLES = ("<user>", "<assistant>")
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<' + message['role'] + '> ' }}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image> ' }}{% else %}{{ part['text'] + ' ' }}{% endif %}{% endfor %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)


def create_word_processor(image_size: int, patch_size: int) -> Any:
    """Create a `LlavaProcessor` of the embedded questions: one token per word, one image token per patch.

    Args:
        image_size: Side of an image, in pixels.
        patch_size: Side of a patch, in pixels.

    Example:
        >>> processor = create_word_processor(image_size=12, patch_size=6)
        >>> processor.tokenizer.decode(processor(text="which digit is left of the 7 ?")["input_ids"])
        ['which digit is left of the 7 ?']
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>", IMAGE, *_ROLES]
    words = [*special, *map(str, range(10)), *WORDS]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens={"image_token": IMAGE, "user_token": _ROLES[0], "assistant_token": _ROLES[1]},
    )
    size = {"height": image_size, "width": image_size}
    images = CLIPImageProcessor(
        size=size, crop_size=size, do_center_crop=False, image_mean=[0.13] * 3, image_std=[0.28] * 3
    )
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=patch_size,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
        chat_template=_TEMPLATE,
    )
