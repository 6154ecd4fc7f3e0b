"""Batches of conversations: chat template, processor, labels on the answers, and the order in training.

Axes: B samples, N tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from mmod.data.readers.conversations import ChatSample, Protected
from mmod.data.records import IMAGE, Message
from mmod.values import IGNORED


class PlainTokens(NamedTuple):
    """Number of tokens, and positions of image tokens and of the first answer, with one token for each image.

    `fault` says why labels cannot be located; None if they can.
    """

    length: int
    images: np.ndarray
    answer: int
    fault: str | None


@dataclass
class ChatCollator:
    """Collates conversations into training batches: model inputs, padded on the right, and `labels`.

    Labels cover the assistant's answers and their end-of-turn tokens: the text that the template adds when the answer
    is appended to a prompt. Where a template adds no such token, as that of LLaVA-1.5, an answer ends with the
    tokenizer's: otherwise a model would not learn to stop.

    Args:
        processor: A transformers processor with a fast tokenizer and a chat template.
        max_length: Maximum sequence length in tokens; longer ones are truncated on the right. None for no limit.
        packed: Pack the samples of a batch into one row without padding. Positions restart at each sample, by which
            transformers models separate them.
        protected: Tokens that no routed layer skips in training, see `ConversationsConfig`.

    Raises:
        ValueError: The processor has no chat template, fast tokenizer or image token.
    """

    processor: Any
    max_length: int | None = None
    packed: bool = False
    protected: Protected | None = None

    def __post_init__(self) -> None:
        processor = self.processor
        name = type(self.processor).__name__
        if not getattr(getattr(processor, "tokenizer", None), "is_fast", False):
            raise ValueError(f"{name} has no fast tokenizer to locate the answers: name a vision-language model")
        if not getattr(processor, "chat_template", None):
            raise ValueError(f"{name} has no chat template")
        if getattr(processor, "image_token_id", None) is None:
            raise ValueError(f"{name} has no image_token_id")
        if self.packed and "image_grid_thw" in processor.image_processor.model_input_names:
            raise ValueError(f"samples of a {name} cannot be packed: its models compute their positions per row")
        # Asked once: it renders a conversation.
        self._end = self._missing_end()

    def _missing_end(self) -> str:
        """Return the token that must be added to answers, as the template does not end them; empty if it does."""
        answer = "answer"
        turns = [Message("user", "question"), Message("assistant", answer)]
        # A conversation is rendered to see what the template writes behind an answer.
        behind = self._apply_template(turns).rpartition(answer)[2]
        tokenizer = self.processor.tokenizer
        ids = tokenizer(behind, add_special_tokens=False)["input_ids"]
        if not set(tokenizer.all_special_ids).isdisjoint(ids):
            return ""
        if tokenizer.eos_token is None:
            raise ValueError(f"neither chat template nor tokenizer of {type(self.processor).__name__} ends an answer")
        return str(tokenizer.eos_token)

    def __call__(self, chats: Sequence[ChatSample]) -> dict[str, Any]:
        """Return the processor's output, `labels` (B, N), and `protected_mask` (B, N) if tokens are protected."""
        texts = [self.render(chat.messages) for chat in chats]
        spans = [self._answers(text, chat) for text, chat in zip(texts, chats)]
        batch = self._process(texts, chats, "right")
        labels_BN = torch.full_like(batch["input_ids"], IGNORED)
        for row, (text, chat, answers) in enumerate(zip(texts, chats, spans)):
            mask_N = batch["attention_mask"][row].bool()
            ids = batch["input_ids"][row][mask_N]
            is_answer = self._is_answer(text, chat, answers, ids)
            labels_BN[row, mask_N] = torch.where(is_answer, ids, IGNORED)
        batch["labels"] = labels_BN
        if self.protected is not None:
            protected_BN = batch["attention_mask"].bool() & (batch["input_ids"] != self.processor.image_token_id)
            if self.protected == "question":
                protected_BN &= labels_BN == IGNORED
            batch["protected_mask"] = protected_BN
        batch = self._cut(batch, chats)
        if self.packed:
            batch = _pack(batch)
        return batch

    def prompts(self, chats: Sequence[ChatSample]) -> dict[str, Tensor]:
        """Encode conversations up to the last answer, padded on the left for `generate`."""
        texts = [self.render(chat.messages[:-1], ask=True) for chat in chats]
        return self._process(texts, chats, "left")

    def check_prompt(self, chat: ChatSample) -> None:
        """Raise a ValueError unless a conversation continues the tokens of its own prompt.

        A tokenizer may join the end of a prompt with the first word of the answer. A model is then asked by tokens that
        it never saw in training.
        """
        prompt = self.render(chat.messages[:-1], ask=True)
        text = self.render(chat.messages)
        if not text.startswith(prompt):
            # Refused by `_answers` in training; prompts alone are as their template writes them.
            return
        tokenizer = self.processor.tokenizer
        encoded = tokenizer([prompt, text], add_special_tokens=self._adds_special(text), return_attention_mask=False)
        asked, trained = encoded["input_ids"]
        if trained[: len(asked)] == asked:
            return
        # The last tokens in common are shown too: a space alone says little.
        equal = next(place for place, token in enumerate(asked) if trained[place : place + 1] != [token])
        shown = slice(max(equal - 2, 0), len(asked))
        asked_end = [tokenizer.decode(token) for token in asked[shown]]
        trained_end = [tokenizer.decode(token) for token in trained[shown]]
        raise ValueError(
            f"the chat template asks by other tokens than it trains, as in {chat.key!r}: a prompt ends in {asked_end}, "
            f"where the whole conversation has {trained_end}. Let what the template writes for add_generation_prompt "
            "end where a token ends: mostly without the space at its end, which then begins the answer"
        )

    def render(self, messages: Sequence[Message], ask: bool = False) -> str:
        """Return messages as the chat template writes them, with `ask` up to where an answer begins."""
        ended = []
        for message in messages:
            if message.role == "assistant":
                message = message._replace(text=message.text.rstrip() + self._end)
            ended.append(message)
        return self._apply_template(ended, ask)

    def _apply_template(self, messages: Sequence[Message], ask: bool = False) -> str:
        turns = [{"role": message.role, "content": _content(message)} for message in messages]
        return self.processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=ask)

    def _answers(self, text: str, chat: ChatSample) -> list[tuple[int, int]]:
        """Return start and end of each answer in the rendered text."""
        spans = []
        for index, message in enumerate(chat.messages):
            if message.role != "assistant":
                continue
            # Rendered up to each answer and behind it: the difference is what the model has to say.
            before = self.render(chat.messages[:index], ask=True)
            after = text
            if index + 1 < len(chat.messages):
                after = self.render(chat.messages[: index + 1])
            if not (text.startswith(after) and after.startswith(before)):
                raise ValueError(f"the chat template changes earlier turns when later ones follow, as in {chat.key!r}")
            spans.append((len(before), len(after)))
        return spans

    def _process(self, texts: list[str], chats: Sequence[ChatSample], side: str) -> dict[str, Tensor]:
        images = list(chain.from_iterable(chat.images for chat in chats))
        batch = self.processor(
            images=images or None,
            text=texts,
            padding=True,
            padding_side=side,
            return_tensors="pt",
            add_special_tokens=self._adds_special(texts[0]),
        )
        return dict(batch)

    def _adds_special(self, text: str) -> bool:
        """Return whether the tokenizer must add its first token, because the template does not."""
        first = self.processor.tokenizer.bos_token
        # Templates of some models write the first token, and tokenizers would add it once more.
        return first is None or not text.startswith(first)

    def _is_answer(self, text: str, chat: ChatSample, answers: list[tuple[int, int]], ids_N: Tensor) -> Tensor:
        """Return the mask of tokens of the processed text that belong to an answer (N)."""
        image = self.processor.image_token_id
        plain = self.processor.tokenizer(
            text, return_offsets_mapping=True, add_special_tokens=self._adds_special(text), return_attention_mask=False
        )
        tokens = torch.tensor(plain["input_ids"])
        in_answer = torch.from_numpy(_inside(plain["offset_mapping"], answers))
        position_T = text_positions(tokens.numpy(), ids_N.numpy(), image)
        if position_T is None:
            raise ValueError(
                f"{type(self.processor).__name__} changes the text around images in {chat.key!r}: labels cannot be "
                "located"
            )
        is_answer_N = torch.zeros_like(ids_N, dtype=torch.bool)
        # Image tokens are skipped on both sides: a processor writes many for one placeholder.
        is_answer_N[torch.from_numpy(position_T)] = in_answer[tokens != image]
        return is_answer_N

    def plain_tokens(self, chats: Sequence[ChatSample]) -> list[PlainTokens]:
        """Return where images and the first answer of conversations are, without reading images."""
        texts = [self.render(chat.messages) for chat in chats]
        if not texts:
            return []
        encoded = self.processor.tokenizer(
            texts,
            return_offsets_mapping=True,
            add_special_tokens=self._adds_special(texts[0]),
            return_attention_mask=False,
        )
        found = []
        for chat, text, ids, offsets in zip(chats, texts, encoded["input_ids"], encoded["offset_mapping"]):
            images = np.flatnonzero(np.asarray(ids) == self.processor.image_token_id)
            try:
                answers = np.flatnonzero(_inside(offsets, self._answers(text, chat)))
            except ValueError as error:
                found.append(PlainTokens(len(ids), images, len(ids), str(error)))
                continue
            if len(answers):
                tokens = PlainTokens(len(ids), images, int(answers[0]), None)
            else:
                tokens = PlainTokens(len(ids), images, len(ids), "no token belongs to an answer")
            found.append(tokens)
        return found

    def _cut(self, batch: dict[str, Tensor], chats: Sequence[ChatSample]) -> dict[str, Tensor]:
        length = batch["input_ids"].shape[1]
        if self.max_length is not None and length > self.max_length:
            # What would be cut off; an image without its last tokens would not fit its features.
            over = batch["input_ids"][:, self.max_length :] == self.processor.image_token_id
            if over.any():
                key = chats[int(over.any(1).nonzero()[0])].key
                raise ValueError(
                    f"max_length={self.max_length} cuts off an image in {key!r}: the batch has {length} tokens"
                )
            shape = batch["input_ids"].shape
            cut = dict(batch)
            for name, value in batch.items():
                # By the whole shape: other inputs, such as patches, may have as many columns as a batch has tokens.
                if value.shape == shape:
                    cut[name] = value[:, : self.max_length]
            batch = cut
        empty = (batch["labels"] == IGNORED).all(1)
        if empty.any():
            key = chats[int(empty.nonzero()[0])].key
            raise ValueError(f"max_length={self.max_length} leaves no answer in {key!r}: the batch has {length} tokens")
        return batch


def text_positions(plain: np.ndarray, processed: np.ndarray, image: int) -> np.ndarray | None:
    """Return where the text of a conversation is after a processor has put in the tokens of images.

    An image may take several tokens, of which not all are image tokens: processors of split images write markers of
    rows and columns between them.

    Args:
        plain: Tokens with one image token for each image (N,).
        processed: Tokens with all tokens of each image (M,).
        image: The image token.

    Returns:
        Positions of the text tokens among the processed ones; None if the text between two images is not found again.

    Example:
        >>> text_positions(np.array([1, 9, 2, 3]), np.array([1, 8, 9, 9, 8, 2, 3]), image=9)
        array([0, 5, 6])
    """
    texts = np.split(plain, np.flatnonzero(plain == image))
    # Each but the first begins with the image token in front of it.
    texts = [texts[0], *(text[1:] for text in texts[1:])]
    positions = []
    end = 0
    for number, text in enumerate(texts):
        first = end + min(number, 1)
        last = len(processed) - len(text)
        # What stands in front of all images begins the conversation, and what follows them ends it.
        candidates = range(first, last + 1)
        if number == len(texts) - 1:
            candidates = range(max(first, last), last + 1)
        elif number == 0:
            candidates = range(min(1, last + 1))
        matching = (at for at in candidates if np.array_equal(processed[at : at + len(text)], text))
        start = next(matching, None)
        if start is None:
            return None
        end = start + len(text)
        positions.append(np.arange(start, end))
    return np.concatenate(positions)


def _inside(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return which tokens, by first and last character (N, 2), lie inside one of some spans (N,)."""
    first, last = np.asarray(offsets, np.int64).reshape(-1, 2).T
    inside = np.zeros(len(first), bool)
    for start, end in spans:
        # Tokens of no characters, which the tokenizer adds, belong to no answer.
        inside |= (start <= first) & (last <= end) & (first < last)
    return inside


def _pack(batch: dict[str, Tensor]) -> dict[str, Any]:
    mask_BN = batch.pop("attention_mask").bool()
    position_BN = torch.arange(mask_BN.shape[1]).expand_as(mask_BN)
    for name, value in {**batch, "position_ids": position_BN}.items():
        if value.shape == mask_BN.shape:
            batch[name] = value[mask_BN].unsqueeze(0)
    # With a cache, transformers ignores that positions restart, and samples would attend to each other.
    return {**batch, "use_cache": False}


def _content(message: Message) -> list[dict[str, str]]:
    """Split a message at its images, in the format of chat templates."""
    content: list[dict[str, str]] = []
    for number, words in enumerate(message.text.split(IMAGE)):
        if number:
            content.append({"type": "image"})
        if words.strip():
            content.append({"type": "text", "text": words.strip()})
    return content


# Batches that are sorted by length together: enough for even batches, few enough that an epoch stays shuffled.
_WINDOW = 8


@dataclass(eq=False)
class LengthSampler(Sampler[int]):
    """Shuffles samples so that batches have similar lengths; a function of seed and epoch.

    Args:
        batch: Samples of one step over all processes.
        images: Images of each sample, if each batch of a process needs one: processes wait for each other's gradients
            of the vision tower. None otherwise.
        share: Samples in a batch of one process.

    Example:
        >>> order = list(LengthSampler([1, 9, 1, 9], batch=2, seed=0))
        >>> sorted(order), order[0] % 2 == order[1] % 2
        ([0, 1, 2, 3], True)
    """

    lengths: Sequence[int] | np.ndarray
    batch: int
    seed: int
    images: Sequence[int] | np.ndarray | None = None
    share: int = 1
    epoch = 0

    def __post_init__(self) -> None:
        self._lengths = np.asarray(self.lengths)
        self.seeing = None
        if self.images is not None and np.any(self.images):
            self.seeing = np.asarray(self.images) > 0
        batches = -(-len(self.lengths) // self.share)
        if self.seeing is not None and self.seeing.sum() < batches:
            raise ValueError(
                f"{self.seeing.sum()} conversations have an image, and {batches} batches of {self.share} need one "
                "each: use larger batches, or leave conversations without images out"
            )

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        order = list(self._shuffled())
        if self.seeing is not None:
            order = _spread(order, self.seeing, self.share)
        return iter(order)

    def _shuffled(self) -> Iterator[int]:
        rng = np.random.default_rng([self.seed, self.epoch])
        order = rng.permutation(len(self.lengths))
        for start in range(0, len(order), self.batch * _WINDOW):
            window = order[start : start + self.batch * _WINDOW]
            # Sorted inside a window of the shuffled order: similar lengths in a batch, and another neighbourhood in
            # each epoch.
            window = window[np.argsort(self._lengths[window], kind="stable")]
            full = len(window) // self.batch * self.batch
            # The order of the batches is shuffled again, so that short ones do not come first.
            for number in rng.permutation(full // self.batch):
                yield from window[number * self.batch : (number + 1) * self.batch].tolist()
            # The incomplete batch of a window comes behind its others.
            yield from window[full:].tolist()


def _spread(order: list[int], seeing: np.ndarray, share: int) -> list[int]:
    """Swap the fewest samples such that every batch has one with an image."""
    batches = [order[start : start + share] for start in range(0, len(order), share)]
    # Batches that have one image to spare.
    donors = [batch for batch in batches if seeing[batch].sum() > 1]
    for batch in batches:
        if seeing[batch].any():
            continue
        # The last ones first, so that the beginning of the order stays as it was.
        donor = donors[-1]
        last = int(np.flatnonzero(seeing[donor])[-1])
        batch[-1], donor[last] = donor[last], batch[-1]
        if seeing[donor].sum() == 1:
            donors.pop()
    return list(chain.from_iterable(batches))
