"""What an audit has done so far, in a file, so that one that was cut goes on."""

from __future__ import annotations

import base64
import io
import json
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mmod.io.files import check_regular, parse_json, write_atomically

# Seconds between two times that it is written.
_EVERY = 10.0
_ARRAY = "array"
# Number of the layout of the file, which changes with what is kept.
_FORMAT = 2


class Partial:
    """Progress of an audit in a JSON file with a checksum, or in memory for None; `done` counts batches by step."""

    def __init__(self, path: str | Path | None) -> None:
        self.path = path
        self.done: dict[str, int] = {}
        # Of all batches that were done, by the same names.
        self._checks: dict[str, int] = {}
        self._identity: Mapping[str, Any] = {}
        self._written = time.monotonic()

    def read(self, identity: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return what was kept; None where there is nothing."""
        self._identity = identity
        if self.path is None or not Path(self.path).exists():
            return None
        try:
            check_regular(self.path)
            saved = parse_json(Path(self.path).read_bytes(), "its content")
        except ValueError as error:
            raise self._refused(f"is damaged: {error}") from error
        if not isinstance(saved, dict) or saved.get("format") != _FORMAT:
            raise self._refused(f"is not the progress of an audit in format {_FORMAT}")
        if saved.pop("check", None) != zlib.crc32(json.dumps(saved).encode()):
            raise self._refused("is damaged: its content was changed after it was written, by its checksum")
        try:
            differing = [name for name, value in identity.items() if saved["of"].get(name) != value]
            self.done, self._checks = dict(saved["done"]), dict(saved["checks"])
            state: dict[str, Any] = {**_unpacked(saved["state"])}
        except (AttributeError, KeyError, TypeError, ValueError, zlib.error) as error:
            raise self._refused(f"is damaged: {type(error).__name__}: {error}") from error
        if differing:
            raise self._refused(f"belongs to another audit, which differs in {', '.join(differing)}")
        return state

    def left(self, name: str, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches with which something was not done yet."""
        done, number, check = self.done.get(name, 0), 0, 0
        for number, batch in enumerate(batches, 1):
            check = 0 if self.path is None else _check_of(batch, check)
            if number == done and check != self._checks[name]:
                raise self._refused(f"belongs to another audit: its first {done} batches of {name!r} are others")
            if number > done:
                self._checks[name] = check
                yield batch
        if number < done:
            raise self._refused(f"belongs to another audit: it did {done} batches of {name!r}, and there are {number}")

    def add(self, name: str, state: Callable[[], Mapping[str, Any]]) -> None:
        """Note that one more batch is done, and write what is known by now if that was long ago."""
        self.done[name] = self.done.get(name, 0) + 1
        if time.monotonic() - self._written >= _EVERY:
            self.write(state)

    def write(self, state: Callable[[], Mapping[str, Any]]) -> None:
        """Write what is known by now."""
        if self.path is not None:
            progress = {"of": self._identity, "done": self.done, "checks": self._checks, "state": state()}
            content = json.dumps({"format": _FORMAT, **progress}, default=_packed)
            write_atomically(self.path, f'{{"check": {zlib.crc32(content.encode())}, {content[1:]}')
            self._written = time.monotonic()

    def _refused(self, why: str) -> ValueError:
        return ValueError(f"{str(self.path)!r} {why}. Delete it or choose another file")


def _check_of(batch: Any, check: int) -> int:
    """Return a checksum of the tensors of a batch, continued from that of the batches before."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            check = zlib.crc32(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data, check)
    return check


def _packed(array: np.ndarray) -> dict[str, str]:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return {_ARRAY: base64.b64encode(zlib.compress(file.getvalue())).decode()}


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {_ARRAY}:
        return np.load(io.BytesIO(zlib.decompress(base64.b64decode(value[_ARRAY]))), allow_pickle=False)
    return {name: _unpacked(item) for name, item in value.items()}
