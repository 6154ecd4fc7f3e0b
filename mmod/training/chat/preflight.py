"""Checks of a run on conversations before its first step, by the rules of `engine.preflight`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from mmod.data.readers.conversations import ChatDataset
from mmod.training.chat.config import BPE, WORDS, TrainConfig
from mmod.training.engine.preflight import check_warmup, check_words

# Conversations whose answers are searched for unknown words.
_SEARCHED = 512


def step_samples(arguments: Any) -> int:
    """Return the samples of an optimiser step over all processes, by transformers' training arguments."""
    return int(arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size)


def steps_of(arguments: Any, samples: int) -> tuple[int, int]:
    """Return the optimiser steps of a run and those of an epoch.

    Args:
        arguments: transformers' training arguments.
    """
    of_epoch = math.ceil(samples / step_samples(arguments))
    if arguments.max_steps > 0:
        return arguments.max_steps, of_epoch
    return math.ceil(arguments.num_train_epochs * of_epoch), of_epoch


def check_start(
    config: TrainConfig, arguments: Any, tokenizer: Any, train: ChatDataset, val: ChatDataset | None
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


def _answers_of(chats: ChatDataset) -> Iterator[list[str]]:
    """Yield the answers in some of the conversations, spread evenly over the data."""
    count = min(_SEARCHED, len(chats))
    for number in range(count):
        messages = chats.record(number * len(chats) // count)["messages"]
        yield [text for role, text in messages if role == "assistant"]
