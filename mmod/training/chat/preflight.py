"""Checks of a run on conversations before its first step, by the rules of the loop."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from transformers import TrainingArguments

from mmod.data.readers.conversations import ChatDataset
from mmod.training.chat.config import BPE, WORDS, TrainConfig
from mmod.training.engine.groups import check_warmup

# Conversations whose answers are searched for unknown words.
_SEARCHED = 512
# Shares of unknown words of which a run warns, and with which it does not start.
_NOTED = 0.001
_REFUSED = 0.05


def step_samples(arguments: TrainingArguments) -> int:
    """Return the samples of an optimiser step over all processes."""
    return int(arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size)


def steps_of(arguments: TrainingArguments, samples: int) -> tuple[int, int]:
    """Return the optimiser steps of a run and those of an epoch."""
    of_epoch = math.ceil(samples / step_samples(arguments))
    if arguments.max_steps > 0:
        return arguments.max_steps, of_epoch
    return math.ceil(arguments.num_train_epochs * of_epoch), of_epoch


def check_start(
    config: TrainConfig, arguments: TrainingArguments, tokenizer: Any, train: ChatDataset, val: ChatDataset | None
) -> None:
    """Raise a ValueError about a run whose result would mislead.

    It would end in its warm-up, train on many words that its tokenizer does not know, or be tested by answers that are
    longer than it may give.
    """
    if arguments.lr_scheduler_type != "constant":
        # A share of the steps is below the run's length.
        check_warmup("trainer.warmup_steps", arguments.warmup_steps, "steps", steps_of(arguments, len(train))[0])
    advice = "Start from a model whose tokenizer knows them"
    if config.model.processor == WORDS:
        advice = f"Set model.processor to {BPE}, a tokenizer that is trained on the conversations"
    check_words([" ".join(answers) for answers in _answers_of(train)], tokenizer, advice)
    if val is not None:
        expected = [answers[-1] for answers in _answers_of(val)]
        lengths = [len(ids) for ids in tokenizer(expected, add_special_tokens=False)["input_ids"]]
        longer = sum(length > config.max_new_tokens for length in lengths)
        if longer:
            raise ValueError(
                f"{longer} of {len(lengths)} answers in data.val have more tokens than "
                f"max_new_tokens={config.max_new_tokens} and would count as wrong: set it to {max(lengths)} or more"
            )


def check_words(texts: Iterable[str], tokenizer: Any, advice: str) -> None:
    """Warn of words in training answers that a tokenizer does not know; a ValueError if they are many.

    Args:
        tokenizer: A tokenizer of transformers.
        advice: What to do, an English imperative.
    """
    unknown = tokenizer.unk_token_id
    # A tokenizer that knows every byte has no token for unknown words.
    if unknown is None:
        return
    tokens = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    counts = [(sum(token == unknown for token in row), len(row)) for row in tokens]
    count = sum(found for found, _ in counts)
    total = sum(length for _, length in counts)
    if count <= _NOTED * total:
        return
    text = (
        f"the tokenizer does not know {count / total:.1%} of the tokens of training answers: the model would learn "
        f"{tokenizer.unk_token!r} in their place, and never answer them right. {advice}"
    )
    if count > _REFUSED * total:
        raise ValueError(text)
    warnings.warn(text, stacklevel=2)


def _answers_of(chats: ChatDataset) -> Iterator[list[str]]:
    """Yield the answers in some of the conversations, spread evenly over the data."""
    count = min(_SEARCHED, len(chats))
    for number in range(count):
        messages = chats.record(number * len(chats) // count)["messages"]
        yield [text for role, text in messages if role == "assistant"]
