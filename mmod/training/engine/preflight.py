"""Checks before the first step: settings with which a run would train to its end in vain.

Each function raises a ValueError that says what to set, or warns where a user may want to train so. The loop, the
trainer of conversations and the estimates of their costs call them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any

from mmod.data.labels import Classes
from mmod.training.engine.kind import LoopKind

# Shares of unknown words of which a run warns, and with which it does not start.
_NOTED = 0.001
_REFUSED = 0.05


def check_schedule(kind: LoopKind, world: int = 1) -> None:
    """Raise a ValueError if a run would end in its warm-up, or if its learning rate is below the schedule's bounds.

    Args:
        world: Processes of the run, over which a step's samples add up.
    """
    config = kind.config
    check_warmup("schedule.warmup_epochs", config.schedule.warmup_epochs, "epochs", config.epochs)
    config.schedule.check_rate(config.optim, config.step_samples(world))


def check_warmup(key: str, warmup: float, length_key: str, length: float) -> None:
    """Raise a ValueError if the warm-up of the learning rate is as long as the run.

    Example:
        >>> check_warmup("schedule.warmup_epochs", 5, "epochs", 3)
        Traceback (most recent call last):
        ValueError: schedule.warmup_epochs=5 is as long as the run, epochs=3: training would end before the learning \
rate is reached. Set schedule.warmup_epochs to 0, or at most 2
    """
    if not warmup or warmup < length:
        return
    most = math.ceil(length) - 1
    advice = f"0, or at most {most}" if most else "0"
    raise ValueError(
        f"{key}={warmup:g} is as long as the run, {length_key}={length:g}: training would end before the learning rate "
        f"is reached. Set {key} to {advice}"
    )


def check_outputs(classes: Classes | None, outputs: int | None, *, from_checkpoint: bool) -> None:
    """Raise a ValueError if a classifier has another number of outputs than its training data has classes.

    More are fine where the classes are matched to those of the model by name.

    Args:
        classes: The classes of the training data; None where they have no names.
        outputs: Outputs of the model; None where it does not say.
        from_checkpoint: The classifier's weights are those of a checkpoint.
    """
    if classes is None or not outputs:
        return
    count = 1 + max(classes.numbers.values())
    # More outputs than classes are meant where the user listed the classes, and a slip elsewhere.
    if count == outputs or (count < outputs and classes.given):
        return
    head = " and model.head to fresh" if from_checkpoint else ""
    names = "; or list the classes of all outputs in a file, data.classes" if count < outputs else ""
    raise ValueError(
        f"the training data has {count} classes, {classes.taken}, and the model {outputs} outputs: set "
        f"model.args.num_classes to {count}{head}{names}"
    )


def check_words(texts: Iterable[str], tokenizer: Any, advice: str) -> None:
    """Warn of words in training answers that a tokenizer does not know; a ValueError if they are many.

    Args:
        tokenizer: A tokenizer of transformers.
        advice: What to do, an English imperative.
    """
    unknown = tokenizer.unk_token_id
    tokens = [] if unknown is None else tokenizer(list(texts), add_special_tokens=False)["input_ids"]
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
