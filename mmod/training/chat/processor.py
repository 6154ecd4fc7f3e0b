"""Processors of vision-language models: those of checkpoints, and small ones that are built for the conversations."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain
from typing import Any

from mmod.data.readers.conversations import open_conversations
from mmod.data.records import IMAGE
from mmod.data.synthetic.questions import WORDS
from mmod.plain import without_none
from mmod.training.chat.config import BPE, BUILT, TrainConfig

# Tokens of the built BPE vocabulary, 256 of which are bytes.
_TOKENS = 1024
_ROLES = ("<user>", "<assistant>")
_SPECIAL = ("<pad>", "<s>", "</s>", IMAGE, *_ROLES)
# A prompt ends without the space that in BPE is part of an answer's first token.
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<' + message['role'] + '> ' }}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image> ' }}{% else %}{{ part['text'] + ' ' }}{% endif %}{% endfor %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def create_processor(config: TrainConfig) -> object:
    """Create the processor of a run's model; "bpe" reads the training conversations."""
    model = config.model
    if model.processor not in BUILT:
        # It imports transformers, which training on other data does not need.
        from mmod.opening.language import open_processor

        model.check_sources()
        processor = open_processor(model.processor or model.folder or str(model.checkpoint), **model.processor_args)
        if model.image_size is None:
            return processor
        return _at_size(processor, model.image_size)
    vision = (model.config or {}).get("vision_config", {})
    if not {"image_size", "patch_size"} <= set(vision):
        raise ValueError(
            f"processor {model.processor!r} needs model.config.vision_config with image_size and patch_size"
        )
    sides = model.image_size or vision["image_size"], vision["patch_size"]
    if model.processor == BPE:
        # All questions and answers of training, and none that it is evaluated on.
        turns = open_conversations(config.data.train, config.data).turns()
        return create_bpe_processor(chain.from_iterable((question, answer) for _, question, answer in turns), *sides)
    return create_word_processor(*sides)


def _at_size(processor: Any, side: int) -> object:
    """Make a processor return images of another size."""
    images = processor.image_processor
    for name in ("size", "crop_size"):
        current = dict(getattr(images, name, None) or {})
        changed = {key: side for key in ("height", "width", "shortest_edge") if current.get(key) is not None}
        # The longest is a limit, of a side or of the pixels, beside which images keep their proportions.
        if name == "size" and (not changed or current.get("longest_edge") is not None):
            limits = without_none(current)
            named = f", which would be {{'size': {limits}}} now" if limits else ""
            raise ValueError(
                f"model.image_size: {type(images).__name__} takes images of any size within limits; set others by "
                f"model.processor_args{named}"
            )
        # Some crop nothing.
        if changed:
            setattr(images, name, changed)
    return processor


def pixel_limits_of(processor: Any) -> dict[str, int] | None:
    """Return the fewest and most pixels of an image, as `size` has them; None for processors without such limits."""
    images = processor.image_processor
    size = dict(getattr(images, "size", None) or {})
    fewest, most = size.get("shortest_edge"), size.get("longest_edge")
    count = getattr(images, "get_number_of_image_patches", None)
    if count is None or not fewest or not most:
        return None
    # The names are those of sides, and some count the pixels of several frames: a large image tells.
    side = 2 * math.isqrt(most)
    patches = count(side, side, {})
    if not isinstance(patches, int):
        return None
    pixels = patches * images.patch_size**2
    is_of_pixels = 2 * pixels > most >= pixels
    if not is_of_pixels:
        return None
    return {"shortest_edge": fewest, "longest_edge": most}


def create_word_processor(image_size: int, patch_size: int) -> object:
    """Create a `LlavaProcessor` of the embedded questions: a token per word and per patch of images; sides in pixels.

    Example:
        >>> processor = create_word_processor(image_size=12, patch_size=6)
        >>> processor.tokenizer.decode(processor(text="which digit is left of the 7 ?")["input_ids"])
        ['which digit is left of the 7 ?']
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [*_SPECIAL[:3], "<unk>", *_SPECIAL[3:], *map(str, range(10)), *WORDS]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # Mean and standard deviation of the digits' grey values.
    return _create(backend, image_size, patch_size, {"image_mean": [0.13] * 3, "image_std": [0.28] * 3}, "<unk>")


def create_bpe_processor(texts: Iterable[str], image_size: int, patch_size: int) -> object:
    """Create a `LlavaProcessor` with a byte-level BPE vocabulary of these texts; it knows every text, however rare.

    Example:
        >>> processor = create_bpe_processor(["A tench.", "A red fox."], image_size=12, patch_size=6)
        >>> processor.tokenizer.decode(processor(text="A naïve fox!")["input_ids"])
        ['A naïve fox!']
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    # All bytes first, so that no text is unknown.
    trainer = trainers.BpeTrainer(
        vocab_size=_TOKENS, special_tokens=list(_SPECIAL), initial_alphabet=sorted(alphabet), show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return _create(backend, image_size, patch_size, {}, None)


def _create(backend: object, image_size: int, patch_size: int, scale: dict[str, object], unknown: str | None) -> object:
    from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token=unknown,
        extra_special_tokens={"image_token": IMAGE, "user_token": _ROLES[0], "assistant_token": _ROLES[1]},
    )
    size = {"height": image_size, "width": image_size}
    return LlavaProcessor(
        image_processor=CLIPImageProcessor(size=size, crop_size=size, do_center_crop=False, **scale),
        tokenizer=tokenizer,
        patch_size=patch_size,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
        chat_template=_TEMPLATE,
    )
