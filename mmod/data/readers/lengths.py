"""The check of conversations against a model's processor, before training and without decoding images."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from PIL import Image

from mmod.data.corrupt import Fault
from mmod.data.readers.chat import ChatCollator, PlainTokens
from mmod.data.readers.conversations import ChatDataset, ChatSample, ConversationsConfig, open_conversations
from mmod.data.readers.images import identify_image
from mmod.data.records import IMAGE, Message
from mmod.io.files import locked, parse_json, write_atomically
from mmod.io.progress import progress_bar

_VERSION = 2
# Sides of images in pixels (width, height) that tell whether a processor makes equally many tokens of all.
_SIZES = ((64, 64), (333, 1000), (1000, 333), (800, 800), (37, 91))
_PROBE = (Message("user", f"{IMAGE}a"), Message("assistant", "a"))
_BATCH = 512
_THREADS = 16
# Conversations that tell how much a template adds to a message, and tokens that a tokenizer may add to a text.
_SAMPLED = 64
_AROUND = 16
_HEADER = 1 << 16
# Checks of fewer conversations are as fast as to look for their result.
_WORTH_KEEPING = 1000


def open_checked(
    source: str, config: ConversationsConfig, collator: ChatCollator, progress: bool = False, prompts: bool = False
) -> ChatDataset:
    """Open a source, and leave out or refuse the conversations that a collator cannot encode.

    Those are texts with tokens of the processor, images of sizes that it refuses, images that `max_length` cuts off,
    and conversations that it leaves without an answer. A long check is kept beside the data, and read again for equal
    data, processor and `max_length`.

    Args:
        prompts: Only prompts are encoded, which are not cut.

    Raises:
        CorruptDataError: A conversation cannot be read or encoded, and `config.on_corrupt` is "raise".
        ValueError: No conversation is left, or the processor cannot encode any image.
    """
    chats = open_conversations(source, config, progress)
    folder = Path(source).parent if config.root is None else Path(config.root)
    faults = _Check(chats, collator, progress, prompts).faults(folder)
    for place, reason in sorted(faults.items()):
        chats.report.add([Fault(source, f"conversation {place}, {chats.record(place)['key']!r}", reason)])
    return chats.without(faults) if faults else chats


@dataclass
class _Check:
    """Finds the conversations that a collator cannot encode."""

    chats: ChatDataset
    collator: ChatCollator
    progress: bool
    prompts: bool
    counts: dict[tuple[int, int], int] = field(default_factory=dict)
    rewritable: set[int] = field(default_factory=set)

    def faults(self, folder: Path) -> dict[int, str]:
        """Return the reasons by index; those of a long check are kept in the folder if it exists and can be written."""
        faults, unsure = self._check_texts()
        if len(unsure) < _WORTH_KEEPING:
            return faults | self._check_tokens(unsure)
        place = folder / f".conversations-{self._digest(unsure)}.check"
        with _locked(place):
            kept = _read(place, len(self.chats))
            if kept is None:
                kept = self._check_tokens(unsure)
                # It saves time only, so a folder that is full or cannot be written is no error.
                with contextlib.suppress(OSError):
                    if os.access(folder, os.W_OK):
                        write_atomically(place, json.dumps({"version": _VERSION, "faults": list(kept.items())}))
        return faults | kept

    def _check_texts(self) -> tuple[dict[int, str], list[int]]:
        """Return the faults that texts show, and the conversations whose tokens must be counted."""
        faults: dict[int, str] = {}
        unsure: list[int] = []
        processor = self.collator.processor
        special = _special_tokens(processor)
        for place in self._bar(range(len(self.chats)), "check texts"):
            row = self.chats.record(place)
            found = [token for token in special if any(token in text for _, text in row["messages"])]
            if found:
                faults[place] = f"a message holds {found[0]!r}, a token of {type(processor).__name__} that is no text"
                continue
            if self.prompts:
                continue
            answers = [text for role, text in row["messages"] if role == "assistant"]
            # Templates that rewrite earlier turns remove marks such as </think>, or do it always.
            if len(answers) > 1 and (not self.rewritable or any("<" in text for text in answers)):
                self.rewritable.add(place)
            count = 0 if not row["images"] else self._constant
            is_short = count is not None and self._is_short(row, [count] * len(row["images"]))
            if place in self.rewritable or not is_short:
                unsure.append(place)
        return faults, unsure

    def _bar(self, items: Any, name: str, total: int | None = None) -> Any:
        count = len(items) if total is None else total
        return progress_bar(items, desc=name, unit="record", total=count, shown=self.progress, leave=False)

    def _is_short(self, row: Mapping[str, Any], counts: Sequence[int]) -> bool:
        """Return whether `max_length` certainly keeps all images and a token of the first answer."""
        limit = self.collator.max_length
        messages = row["messages"]
        if limit is None:
            return True
        needed = _needed(messages)
        letters = sum(_most_tokens(text) for _, text in messages[:needed])
        return letters + needed * self._overhead + sum(counts) + _AROUND < limit

    @cached_property
    def _overhead(self) -> int:
        """Twice the most characters that the template adds to the messages before an answer, in some conversations."""
        most = 0
        for place in np.linspace(0, len(self.chats) - 1, min(_SAMPLED, len(self.chats))).astype(int):
            messages = _messages(self.chats.record(int(place)))
            first = next(place for place, message in enumerate(messages) if message.role == "assistant")
            text = self.collator.render(messages[:first], ask=True)
            most = max(most, len(text) - sum(len(message.text) for message in messages[:first]))
        return 2 * most

    @cached_property
    def _constant(self) -> int | None:
        """The number of tokens of an image of any size; None if it depends on the size."""
        counts = {self._probe(size) for size in _SIZES}
        return counts.pop() if len(counts) == 1 else None

    @cached_property
    def _has_rule(self) -> bool:
        """Whether the processor predicts its own number of image tokens correctly, for images of a few sizes."""
        rule = getattr(self.collator.processor, "_get_num_multimodal_tokens", None)
        return rule is not None and all(self._by_rule(size) == self._probe(size) for size in _SIZES)

    def _by_rule(self, size: tuple[int, int]) -> int:
        width, height = size
        found = self.collator.processor._get_num_multimodal_tokens(image_sizes=[[height, width]])
        return int(found.num_image_tokens[0])

    def _probe(self, size: tuple[int, int]) -> int:
        """Return the number of tokens that the processor makes of an image (width, height), markers among them."""
        if size not in self.counts:
            ids = self._probed(size)
            self.counts[size] = len(ids) - self._alone.size + 1
        return self.counts[size]

    def _probed(self, size: tuple[int, int]) -> np.ndarray:
        """Return the tokens of a conversation about one image (width, height)."""
        sample = ChatSample(f"an image of {size[0]}x{size[1]} pixels", _PROBE, (Image.new("RGB", size),))
        batch = replace(self.collator, max_length=None, packed=False)([sample])
        ids: np.ndarray = batch["input_ids"][0].numpy()
        return ids

    @cached_property
    def _alone(self) -> np.ndarray:
        """The tokens of that conversation with one token for the image."""
        return self.collator.tokens_without_images(ChatSample("", _PROBE, ()))

    @cached_property
    def _behind(self) -> int:
        """The number of markers that the processor writes behind the last token of an image."""
        image = self.collator.processor.image_token_id
        text_behind = self._alone.size - 1 - int(np.flatnonzero(self._alone == image)[-1])
        ids = self._probed(_SIZES[0])
        return ids.size - text_behind - 1 - int(np.flatnonzero(ids == image)[-1])

    def _count(self, size: tuple[int, int]) -> int:
        if size not in self.counts and self._has_rule:
            self.counts[size] = self._by_rule(size)
        return self._probe(size)

    def _check_tokens(self, places: list[int]) -> dict[int, str]:
        """Return the faults of some conversations, found from their tokens."""
        faults: dict[int, str] = {}
        counts: dict[int, list[int]] = {}
        for place, found in self._count_images(places):
            if isinstance(found, str):
                faults[place] = found
            elif place in self.rewritable or not self._is_short(self.chats.record(place), found):
                counts[place] = found
        left = list(counts)
        bar = self._bar(None, "check lengths", len(left))
        for start in range(0, len(left), _BATCH):
            batch = left[start : start + _BATCH]
            tokens = self.collator.plain_tokens([self._shortened(place) for place in batch])
            reasons = {place: self._reason(found, counts[place]) for place, found in zip(batch, tokens)}
            faults |= {place: reason for place, reason in reasons.items() if reason is not None}
            bar.update(len(batch))
        bar.close()
        return faults

    def _shortened(self, place: int) -> ChatSample:
        """Return a conversation without its images, up to the answer that decides, or whole if it may be rewritten."""
        row = self.chats.record(place)
        messages = _messages(row)
        # Messages take turns, so an answer follows.
        end = None if place in self.rewritable else _needed(messages) + 1
        return ChatSample(row["key"], messages[:end], ())

    def _count_images(self, places: list[int]) -> Iterator[tuple[int, list[int] | str]]:
        """Yield the number of tokens of each image of some conversations, from the files' headers, or why not."""
        if self.chats.images[places].any() and self._constant is None:
            with ThreadPoolExecutor(_THREADS) as pool:
                for place, sizes in zip(places, self._bar(pool.map(self._sizes, places), "read sizes", len(places))):
                    try:
                        yield place, sizes if isinstance(sizes, str) else [self._count(size) for size in sizes]
                    except ValueError as error:
                        yield place, str(error)
            return
        for place in places:
            images = int(self.chats.images[place])
            yield place, [self._constant or 0] * images if images else []

    def _sizes(self, place: int) -> list[tuple[int, int]] | str:
        try:
            return [_image_size(image) for image in self.chats.record(place)["images"]]
        except (OSError, ValueError) as error:
            return str(error)

    def _reason(self, tokens: PlainTokens, counts: Sequence[int]) -> str | None:
        """Return the fault of a conversation, given the number of tokens of each image; None if it has none."""
        limit = self.collator.max_length
        if tokens.fault is not None or limit is None:
            return tokens.fault
        if len(counts) != len(tokens.images):
            return f"the chat template writes {len(tokens.images)} tokens of images for {len(counts)} images"
        # Each image takes the place of one token.
        added = np.cumsum([0, *(count - 1 for count in counts)])
        if counts and (end := int(tokens.images[-1] + 1 + added[-1]) - self._behind) > limit:
            return f"max_length={limit} cuts off an image: the last one ends after {end} tokens"
        start = tokens.answer + int(added[np.searchsorted(tokens.images, tokens.answer)])
        if start >= limit:
            return f"max_length={limit} leaves no answer: the first one starts after {start} tokens"
        return None

    def _digest(self, places: list[int]) -> str:
        """Return a checksum of all that the result depends on."""
        processor = self.collator.processor
        digest = hashlib.sha256(self.chats.content())
        described = json.dumps(processor.to_dict(), sort_keys=True, default=repr)
        tokenizer = json.loads(processor.tokenizer.backend_tokenizer.to_str())
        # What the last call set, and the next one sets anew.
        tokenizer |= {"padding": None, "truncation": None}
        parts = (transformers.__version__, type(processor), described, tokenizer, processor.chat_template)
        digest.update("\n".join(map(str, (*parts, self.collator.max_length))).encode())
        if self.chats.images.any() and self._constant is None:
            # Sizes count, so files that were exchanged are read again.
            images = chain.from_iterable(self.chats.record(place)["images"] for place in places)
            for name in sorted({image if isinstance(image, str) else image[0] for image in images}):
                with contextlib.suppress(OSError):
                    stat = os.stat(name)
                    digest.update(f"{name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        return digest.hexdigest()[:32]


def _messages(row: Mapping[str, Any]) -> tuple[Message, ...]:
    return tuple(Message(*message) for message in row["messages"])


def _needed(messages: Sequence[Any]) -> int:
    """Return the number of messages before the first answer, or before the answer to the last image."""
    first = next(place for place, (role, _) in enumerate(messages) if role == "assistant")
    return max([first, *(place + 1 for place, (_, text) in enumerate(messages) if IMAGE in text)])


def _special_tokens(processor: Any) -> list[str]:
    """Return the tokens of a processor that stand for images, videos and the like, but for the placeholder."""
    values = {value for name, value in vars(processor).items() if name.endswith("_token") and isinstance(value, str)}
    return sorted(value for value in values if value.strip() and value != IMAGE)


def _most_tokens(text: str) -> int:
    """Return a bound of the tokens of a text: its bytes, also where a tokenizer normalises it."""
    if text.isascii():
        return len(text)
    return max(len(form.encode()) for form in (text, unicodedata.normalize("NFKC", text)))


def _image_size(place: str | list[Any]) -> tuple[int, int]:
    """Return width and height of an image from its header."""
    name, start, length = (place, 0, None) if isinstance(place, str) else place
    with open(name, "rb") as file:
        file.seek(start)
        data = file.read(_HEADER if length is None else min(length, _HEADER))
        try:
            return _size_in(data)
        except ValueError:
            # A header may be longer than this.
            file.seek(start)
            return _size_in(file.read(-1 if length is None else length))


def _size_in(data: bytes) -> tuple[int, int]:
    try:
        with identify_image(data) as image:
            return image.size
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, struct.error and others
        raise ValueError(f"the size of an image of {len(data)} bytes cannot be read") from error


@contextlib.contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Let one process of a node check at a time; others then read its result. A read-only folder has no lock."""
    with locked(place, wait=True) if os.access(place.parent, os.W_OK) else contextlib.nullcontext():
        yield


def _read(place: Path, count: int) -> dict[int, str] | None:
    """Return the faults that were kept; None if there are none of this version."""
    try:
        content = parse_json(place.read_bytes(), str(place))
    except (OSError, ValueError):
        return None
    faults = content.get("faults") if isinstance(content, dict) and content.get("version") == _VERSION else None
    if not isinstance(faults, list):
        return None
    kept = {fault[0]: fault[1] for fault in faults if isinstance(fault, list) and len(fault) == 2}
    is_sound = all(isinstance(n, int) and 0 <= n < count and isinstance(text, str) for n, text in kept.items())
    return kept if is_sound and len(kept) == len(faults) else None
