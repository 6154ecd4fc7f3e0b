"""Checks before the first step: settings and data with which a run would train in vain.

Each function raises a ValueError that says what to set. The loop, the trainer of conversations and the estimates of
their costs call them; kinds have checks of their own in files of this name.
"""

from __future__ import annotations

import dataclasses
import math
from itertools import chain
from typing import Any

from mmod.data.stream import BatchStream
from mmod.io.processes import gathered
from mmod.io.store import Store
from mmod.training.engine.kind import LoopKind


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


def check_evaluation(stream: BatchStream, data: Any, store: Store | None = None, shown: bool = False) -> None:
    """Read the evaluation samples of all processes once: those that cannot be read are counted, or raise.

    The first evaluation would find them after hours of training. It takes as long as that needs to read its images.

    Args:
        data: The config of the data.
        store: Data whose samples could all be read are noted there, and not read again. Faults are not kept, so that
            files that were mended meanwhile are read.
        shown: Show a progress bar.
    """
    identity = {
        "work": "evaluation samples that can be read",
        "data": dataclasses.asdict(data),
        "process": [stream.rank, stream.world],
    }
    faults = [] if store is not None and identity in store else stream.faults(shown)
    if store is not None and not faults:
        store.put(identity, True)
    # Of all processes, so that all of them end.
    stream.report.add(chain.from_iterable(gathered(faults)))
