"""What an audit has counted so far, in a journal, so that one that was killed resumes on the same batches."""

from __future__ import annotations

import base64
import io
import json
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import asdict, dataclass, field
from pathlib import Path
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
from mmod.io.journal import Journal
from mmod.io.progress import progress_bar
from mmod.values import from_plain

# Seconds between two times that it is written.
_EVERY = 10.0
_ARRAY = "array"
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


class Progress:
    """The counts of an audit, and the number of batches by step that they hold.

    A journal keeps both; without a path they are in memory alone.
    """

    def __init__(self, path: str | Path | None, identity: Mapping[str, Any], counts: Counts) -> None:
        self.journal = Journal(path, identity, "audit")
        self.counts = counts
        self.done: dict[str, int] = {}
        # Checksums of all batches that are done, by step.
        self._checks: dict[str, int] = {}
        self._written = time.monotonic()
        if not self.journal.records:
            return
        saved = self.journal.records[-1]
        try:
            self.done = dict(saved["done"])
            self._checks = dict(saved["checks"])
            self.counts = from_plain(Counts, _unpacked(saved["counts"]), "counts", limit=None)
        except (AttributeError, KeyError, TypeError, ValueError, zlib.error) as error:
            raise ValueError(
                f"{str(path)!r} is damaged: {type(error).__name__}: {error}. Delete it or choose another file"
            ) from error

    def batches(self, step: str, batches: Iterable[Any], *, shown: bool) -> Iterator[tuple[int, Any]]:
        """Yield the batches that are not done yet, with their numbers; one is done when the next is asked for."""
        first = self.done.get(step, 0)
        number = 0
        check = 0
        total = len(batches) if isinstance(batches, Sized) else None
        with progress_bar(desc=step, total=total, initial=first, shown=shown) as bar:
            for number, batch in enumerate(batches, 1):
                check = 0 if self.journal.path is None else _check_of(batch, check)
                # The last batch that was done carries the checksum of all before it.
                is_same = number != first or check == self._checks[step]
                self.journal.check(is_same, f"its first {first} batches of {step!r} are others")
                if number <= first:
                    continue
                yield number - 1, batch
                self.done[step] = number
                self._checks[step] = check
                bar.update()
                if time.monotonic() - self._written >= _EVERY:
                    self._write()
        self.journal.check(number >= first, f"it did {first} batches of {step!r}, and there are {number}")
        if number > first:
            self._write()

    def _write(self) -> None:
        if self.journal.path is not None:
            record = {"done": self.done, "checks": self._checks, "counts": asdict(self.counts)}
            self.journal.replace(json.loads(json.dumps(record, default=_packed)))
            self._written = time.monotonic()


def _check_of(batch: Any, check: int) -> int:
    """Return a checksum of the tensors of a batch, continued from that of the batches before."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            check = zlib.crc32(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data, check)
    return check


def _packed(tensor: Tensor) -> dict[str, str]:
    file = io.BytesIO()
    np.save(file, tensor.cpu().numpy(), allow_pickle=False)
    return {_ARRAY: base64.b64encode(zlib.compress(file.getvalue())).decode()}


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {_ARRAY}:
        content = io.BytesIO(zlib.decompress(base64.b64decode(value[_ARRAY])))
        return torch.from_numpy(np.load(content, allow_pickle=False))
    return {name: _unpacked(item) for name, item in value.items()}
