"""What an audit has counted so far, kept in a store, from which an interrupted one resumes on the same batches."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mmod.analysis.audit.across import Counter
from mmod.analysis.audit.choices import FreeDecision
from mmod.analysis.audit.information import InfluenceCounts
from mmod.analysis.audit.oracle import TokenValues
from mmod.analysis.audit.strata import Outcomes, Strata
from mmod.io.progress import progress_bar
from mmod.io.store import Store

# Seconds between two times that it is written.
_EVERY = 10.0
# Name of the audited set, beside those of shifts and other sets.
AUDITED = ""


@dataclass
class Counts:
    """Results of the batches so far; their size does not grow with the images but for losses and accuracies."""

    positions: Counter
    across: Counter
    influence: InfluenceCounts = field(default_factory=InfluenceCounts)
    worth: TokenValues = field(default_factory=TokenValues)
    strata: Strata = field(default_factory=Strata)
    # By name of a set: its number of images, and the decisions on its last image.
    images: dict[str, int] = field(default_factory=dict)
    last: dict[str, dict[str, FreeDecision]] = field(default_factory=dict)
    # By names of a shift or set, and of a choice; and on the audited set by name of another model.
    outcomes: dict[str, dict[str, Outcomes]] = field(default_factory=dict)
    beside: dict[str, Outcomes] = field(default_factory=dict)


@dataclass
class Done:
    """The counts of an audit, and by step how many batches they hold, with a checksum of these."""

    counts: Counts
    batches: dict[str, int] = field(default_factory=dict)
    checks: dict[str, int] = field(default_factory=dict)


class Progress:
    """What an audit has done, kept in a store, so that an interrupted audit resumes on the same batches.

    Args:
        identity: What the counts depend on beside the batches.
        steps: The batches of each step.
    """

    def __init__(
        self, store: Store, identity: Mapping[str, Any], counts: Counts, steps: Mapping[str, Iterable[Any]]
    ) -> None:
        self.store = store
        self.identity = identity
        self.steps = steps
        self.done = Done(counts)
        # Batches that are left of steps that were begun.
        self._left: dict[str, Iterator[Any]] = {}
        self._written = time.monotonic()
        earlier = store.get(identity, Done)
        if earlier is not None and self._is_of_these_batches(earlier):
            self.done = earlier

    def batches(self, step: str, *, shown: bool) -> Iterator[tuple[int, Any]]:
        """Yield the batches of a step that are not done yet, with their numbers; the next one is asked for after it."""
        first = number = self.done.batches.get(step, 0)
        check = self.done.checks.get(step, 0)
        batches = self.steps[step]
        total = len(batches) if isinstance(batches, Sized) else None
        with progress_bar(desc=step, total=total, initial=first, shown=shown) as bar:
            for number, batch in enumerate(self._left.pop(step, batches), first + 1):
                # Before it is evaluated, which might change it.
                check = 0 if self.store.path is None else _check_of(batch, check)
                yield number - 1, batch
                self.done.batches[step] = number
                self.done.checks[step] = check
                bar.update()
                if time.monotonic() - self._written >= _EVERY:
                    self._write()
        if number > first:
            self._write()

    def _is_of_these_batches(self, earlier: Done) -> bool:
        """Return whether the batches that were done are the first ones of their steps; the others are left."""
        for step, count in earlier.batches.items():
            left = self._left[step] = iter(self.steps[step])
            check = 0
            for batch in islice(left, count):
                check = _check_of(batch, check)
            if check != earlier.checks.get(step):
                self._left.clear()
                return False
        return True

    def _write(self) -> None:
        if self.store.path is not None:
            self.store.put(self.identity, self.done)
            self._written = time.monotonic()


def _check_of(batch: Any, check: int) -> int:
    """Return a checksum of the tensors and labels of a batch, continued from that of the batches before."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Mapping):
            # What a processor returns, and other mappings that torch takes for leaves.
            check = _check_of(dict(leaf), check)
        elif isinstance(leaf, Tensor):
            check = zlib.crc32(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data, check)
        elif isinstance(leaf, (str, int, float, np.ndarray)):
            check = zlib.crc32(repr(leaf.tolist() if isinstance(leaf, np.ndarray) else leaf).encode(), check)
    return check
