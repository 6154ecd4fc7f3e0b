"""Checks of the evaluation data before the first step; kinds have checks of their own in files of this name."""

from __future__ import annotations

import dataclasses
from itertools import chain
from typing import Any

from mmod.data.stream import BatchStream
from mmod.io.processes import gathered
from mmod.io.store import Store


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
