"""The progress of an audit in a journal, so that one that was killed resumes on the same batches."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mmod.analysis.statistics import read_published
from mmod.io.journal import Journal

Counts = TypeVar("Counts")
# Seconds between two times that it is written.
_EVERY = 10.0
_ARRAY = "array"


class Progress(Generic[Counts]):
    """The counts of an audit, a dataclass, and the number of batches by step that they hold.

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
            self.done, self._checks = dict(saved["done"]), dict(saved["checks"])
            self.counts = read_published(type(counts), _unpacked(saved["counts"]))
        except (AttributeError, KeyError, TypeError, ValueError, zlib.error) as error:
            raise ValueError(
                f"{str(path)!r} is damaged: {type(error).__name__}: {error}. Delete it or choose another file"
            ) from error

    def left(self, step: str, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches that are not done yet."""
        done, number, check = self.done.get(step, 0), 0, 0
        for number, batch in enumerate(batches, 1):
            check = 0 if self.journal.path is None else _check_of(batch, check)
            is_same = number != done or check == self._checks[step]
            self.journal.check(is_same, f"its first {done} batches of {step!r} are others")
            if number > done:
                self._checks[step] = check
                yield batch
        self.journal.check(number >= done, f"it did {done} batches of {step!r}, and there are {number}")

    def add(self, step: str) -> None:
        """Count one more batch as done, and write the counts if they were written long ago."""
        self.done[step] = self.done.get(step, 0) + 1
        if time.monotonic() - self._written >= _EVERY:
            self.write()

    def write(self) -> None:
        """Write the counts."""
        if self.journal.path is not None:
            record = {"done": self.done, "checks": self._checks, "counts": dataclasses.asdict(self.counts)}  # type: ignore[call-overload]
            self.journal.replace(json.loads(json.dumps(record, default=_packed)))
            self._written = time.monotonic()


def _check_of(batch: Any, check: int) -> int:
    """Return a checksum of the tensors of a batch, continued from that of the batches before."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            check = zlib.crc32(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data, check)
    return check


def _packed(array: np.ndarray | Tensor) -> dict[str, str]:
    file = io.BytesIO()
    np.save(file, array.cpu().numpy() if isinstance(array, Tensor) else array, allow_pickle=False)
    return {_ARRAY: base64.b64encode(zlib.compress(file.getvalue())).decode()}


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {_ARRAY}:
        return np.load(io.BytesIO(zlib.decompress(base64.b64decode(value[_ARRAY]))), allow_pickle=False)
    return {name: _unpacked(item) for name, item in value.items()}
