"""Checks of a run on conversations before its first step, by the rules of `engine.preflight`."""

from __future__ import annotations

import math
from typing import Any

from mmod.data.readers.conversations import ChatDataset
from mmod.training.chat.config import BPE, WORDS, TrainConfig
from mmod.training.engine.preflight import check_warmup, check_words

# Conversations whose answers are searched for unknown words.
_SEARCHED = 512


def steps_of(arguments: Any, samples: int) -> tuple[int, int]:
    """Return the optimiser steps of a run and those of an epoch.

    Args:
        arguments: transformers' training arguments.
    """
    batch = arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
    of_epoch = math.ceil(samples / batch)
    if arguments.max_steps > 0:
        return arguments.max_steps, of_epoch
    return math.ceil(arguments.num_train_epochs * of_epoch), of_epoch


def check_start(config: TrainConfig, arguments: Any, tokenizer: Any, train: ChatDataset) -> None:
    """Raise a ValueError if a run would end in its warm-up, or train on many words that its tokenizer does not know."""
    if arguments.lr_scheduler_type != "constant":
        # A share of the steps is below the run's length.
        check_warmup("trainer.warmup_steps", arguments.warmup_steps, "steps", steps_of(arguments, len(train))[0])
    advice = "Start from a model whose tokenizer knows them"
    if config.model.processor == WORDS:
        advice = f"Set model.processor to {BPE}, a tokenizer that is trained on the conversations"
    check_words(_answers(train), tokenizer, advice)


def _answers(chats: ChatDataset) -> list[str]:
    """Return the answers in some of the conversations, spread evenly over the data."""
    count = min(_SEARCHED, len(chats))
    rows = (chats.record(place * len(chats) // count) for place in range(count))
    return [" ".join(text for role, text in row["messages"] if role == "assistant") for row in rows]
