"""The check of conversations against a model's processor, before training and without decoding images."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import transformers
from PIL import ExifTags, Image

from mmod.data.corrupt import Fault
from mmod.data.readers.chat import ChatCollator, PlainTokens
from mmod.data.readers.conversations import (
    ChatDataset,
    ChatSample,
    ConversationsConfig,
    StoredImage,
    file_of_image,
    open_conversations,
)
from mmod.data.readers.images import identify_image
from mmod.data.records import IMAGE, Message
from mmod.io.files import locked_where_possible
from mmod.io.progress import progress_bar
from mmod.io.store import OptionalStore

# In the folder of the data, whose names do not begin so.
_KEPT = ".conversations.jsonl"
_QUESTION = (Message("user", f"{IMAGE}a"), Message("assistant", "a"))
_BATCH = 512
_THREADS = 16
_HEADER = 1 << 16
# EXIF orientations that swap width and height.
_TURNED = (5, 6, 7, 8)
# Conversations, spread over the data, whose prompts are compared with them.
_COMPARED = 16
# Checks of fewer conversations are as fast as to look for their result.
_WORTH_KEEPING = 1000

Size = tuple[int, int]
"""Width and height of an image in pixels."""


class ImageLength(NamedTuple):
    """Tokens that a processor writes for an image: all of them, and those up to the last that is no marker."""

    length: int
    end: int


def open_checked(
    source: str, config: ConversationsConfig, collator: ChatCollator, progress: bool = False, prompts: bool = False
) -> ChatDataset:
    """Open a source, and leave out or refuse the conversations that a collator cannot encode.

    Those are texts with tokens of the processor, images of sizes that it refuses, images that `max_length` cuts off,
    and conversations that it leaves without an answer. Every text is tokenised, and the processor encodes a blank
    image of each size. A long check is saved next to the data, and read again for equal data, processor and
    `max_length`.

    Args:
        prompts: Only prompts are encoded, which are not cut: of images, headers are read alone.

    Raises:
        CorruptDataError: A conversation cannot be read or encoded, and `config.on_corrupt` is "raise".
        ValueError: No conversation is left, or the chat template asks by other tokens than it trains.
    """
    chats = open_conversations(source, config, progress)
    if prompts:
        sizes = _read_sizes(chats, progress)
        faults = {index: reason for index, reason in sizes if isinstance(reason, str)}
    else:
        folder = Path(config.root or Path(source).parent)
        faults = _kept_check(chats, collator, folder, progress)
    faults |= _foreign_tokens(chats, collator.processor)
    for index, reason in sorted(faults.items()):
        key = chats.record(index)["key"]
        chats.report.add([Fault(source, f"conversation {index}, {key!r}", reason)])
    if faults:
        chats = chats.without(faults)
    count = min(_COMPARED, len(chats))
    for number in range(count):
        collator.check_prompt(_text_of(chats, number * len(chats) // count))
    return chats


def _text_of(chats: ChatDataset, index: int) -> ChatSample:
    """Return a conversation without its images."""
    row = chats.record(index)
    return ChatSample(row["key"], tuple(Message(*message) for message in row["messages"]), ())


def _foreign_tokens(chats: ChatDataset, processor: object) -> dict[int, str]:
    """Return the faults of texts that hold a token of the processor: for images, videos and the like."""
    # Placeholders in a text would be read as images by the processor.
    values = set()
    for name, value in vars(processor).items():
        if name.endswith("_token") and isinstance(value, str):
            values.add(value)
    special = sorted(value for value in values if value.strip() and value != IMAGE)
    faults = {}
    for index in range(len(chats)):
        texts = [text for _, text in chats.record(index)["messages"]]
        token = next((token for token in special if any(token in text for text in texts)), None)
        if token is not None:
            faults[index] = f"a message holds {token!r}, a token of {type(processor).__name__} that is no text"
    return faults


def _kept_check(chats: ChatDataset, collator: ChatCollator, folder: Path, progress: bool) -> dict[int, str]:
    """Return the faults of encoding; those of a long check are kept in the folder if it exists and can be written."""
    if len(chats) < _WORTH_KEEPING or not folder.is_dir():
        return _check(chats, collator, progress)
    # One process of a node checks, which may take hours, and the others read its result.
    with locked_where_possible(folder / "conversations"):
        check = partial(_check, chats, collator, progress)
        faults = OptionalStore(folder / _KEPT).once(_identity(chats, collator), check)
    return {int(number): str(reason) for number, reason in faults.items()}


def _identity(chats: ChatDataset, collator: ChatCollator) -> dict[str, object]:
    """Return all that the check depends on."""
    processor = collator.processor
    tokenizer = json.loads(processor.tokenizer.backend_tokenizer.to_str())
    # What the last call set, and the next one sets anew.
    tokenizer |= {"padding": None, "truncation": None}
    described = json.dumps(processor.to_dict(), sort_keys=True, default=repr)
    images = chain.from_iterable(chats.record(index)["images"] for index in range(len(chats)))
    files = []
    # Sizes count, so files that were exchanged are read again.
    for name in sorted(set(map(file_of_image, images))):
        with contextlib.suppress(OSError):
            stat = os.stat(name)
            files.append(f"{name} {stat.st_size} {stat.st_mtime_ns}")
    return {
        "work": "check of conversations",
        "conversations": _checksum(chats.content()),
        "images": _checksum("\n".join(files).encode()),
        "processor": _checksum(f"{type(processor)} {described} {tokenizer} {processor.chat_template}".encode()),
        "transformers": transformers.__version__,
        "max_length": collator.max_length,
    }


def _checksum(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _check(chats: ChatDataset, collator: ChatCollator, progress: bool) -> dict[int, str]:
    """Return why conversations cannot be encoded, by their number."""
    sizes: dict[int, list[Size]] = {}
    faults: dict[int, str] = {}
    for index, found in _read_sizes(chats, progress):
        if isinstance(found, str):
            faults[index] = found
        else:
            sizes[index] = found
    # A processor is asked once for each size, of which a set has far fewer than images.
    distinct = sorted(set(chain.from_iterable(sizes.values())))
    lengths = _ask(collator, distinct, progress)
    left = [index for index in range(len(chats)) if index not in faults]
    with progress_bar(desc="check lengths", unit="records", total=len(left), shown=progress, leave=False) as bar:
        for start in range(0, len(left), _BATCH):
            batch = left[start : start + _BATCH]
            # Images take no part in the text.
            samples = [_text_of(chats, index) for index in batch]
            for index, text in zip(batch, collator.plain_tokens(samples)):
                image_lengths = [lengths[size] for size in sizes.get(index, ())]
                reason = _reason(text, image_lengths, collator.max_length)
                if reason is not None:
                    faults[index] = reason
            bar.update(len(batch))
    return faults


def _read_sizes(chats: ChatDataset, progress: bool) -> Iterator[tuple[int, list[Size] | str]]:
    """Yield number and sizes of the images of conversations with some, from files' headers, or why one is unknown."""

    def read(index: int) -> list[Size] | str:
        try:
            return [_image_size(image) for image in chats.record(index)["images"]]
        except (OSError, ValueError) as error:
            return str(error)

    indices = np.flatnonzero(chats.images).tolist()
    with ThreadPoolExecutor(_THREADS) as pool:
        results = zip(indices, pool.map(read, indices))
        bar = progress_bar(results, desc="read sizes", unit="records", total=len(indices), shown=progress, leave=False)
        yield from bar


def _ask(collator: ChatCollator, sizes: Sequence[Size], progress: bool) -> dict[Size, ImageLength | str]:
    """Return the tokens that the processor makes of a blank image of each size, or why it refuses the size."""
    whole = replace(collator, max_length=None, packed=False)
    # A conversation with one image and hardly any text, so that what the image adds is the difference.
    (plain,) = whole.plain_tokens([ChatSample("", _QUESTION, ())])
    lengths: dict[Size, ImageLength | str] = {}
    for size in progress_bar(sizes, desc="encode sizes", unit="sizes", shown=progress, leave=False):
        key = f"an image of {size[0]}x{size[1]} pixels"
        sample = ChatSample(key, _QUESTION, (Image.new("RGB", size),))
        try:
            ids = whole([sample])["input_ids"][0].numpy()
        except ValueError as error:
            lengths[size] = str(error)
            continue
        # The image replaced one token.
        added = len(ids) - plain.length + 1
        start = int(plain.images[0])
        end = int(np.flatnonzero(ids == collator.processor.image_token_id)[-1]) + 1
        lengths[size] = ImageLength(added, end - start)
    return lengths


def _reason(text: PlainTokens, lengths: Sequence[ImageLength | str], limit: int | None) -> str | None:
    """Return why a conversation cannot be encoded, given the tokens of its text and images; None if it can."""
    images = [length for length in lengths if not isinstance(length, str)]
    if len(images) < len(lengths):
        return next(length for length in lengths if isinstance(length, str))
    if text.fault is not None:
        return text.fault
    if len(images) != len(text.images):
        return f"the chat template writes {len(text.images)} tokens of images for {len(images)} images"
    if limit is None:
        return None
    # Each image replaces one token.
    added = np.cumsum([0, *(image.length - 1 for image in images)])
    if images:
        last = int(text.images[-1] + added[-2])
        end = last + images[-1].end
        if end > limit:
            return f"max_length={limit} cuts off an image: the last one ends after {end} tokens"
    # Images in front of the answer move its start.
    start = text.answer + int(added[np.searchsorted(text.images, text.answer)])
    if start >= limit:
        return f"max_length={limit} leaves no answer: the first one starts after {start} tokens"
    return None


def _image_size(stored: StoredImage) -> Size:
    """Return the size of an image from its header."""
    # A file up to its end, or a member of a shard.
    if isinstance(stored, str):
        name, start, length = stored, 0, -1
        header = _HEADER
    else:
        name, start, length = stored
        header = min(length, _HEADER)
    with open(name, "rb") as file:
        file.seek(start)
        with contextlib.suppress(ValueError):
            return _size_in(file.read(header))
        # A header may be longer than this.
        file.seek(start)
        data = file.read(length)
    try:
        return _size_in(data)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _size_in(data: bytes) -> Size:
    try:
        with identify_image(data) as image:
            width, height = image.size
            if _orientation(image) in _TURNED:
                return height, width
            return width, height
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, struct.error and others
        raise ValueError(f"the size of an image of {len(data)} bytes cannot be read") from error


def _orientation(image: Image.Image) -> int | None:
    """Return the EXIF orientation of an opened image; None where there is none, or none that can be read."""
    # Of a PNG file without it in front of the pixels, Pillow would decode these to look behind them.
    if image.format == "PNG" and "exif" not in image.info:
        return None
    try:
        return image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # Pillow's parser of EXIF raises errors of many types, see `turn_upright`
        return None
