"""What an audit has done so far, in a file, so that one that was cut goes on."""

from __future__ import annotations

import base64
import io
import json
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mmod.io.files import check_regular, parse_json, write_atomically

__all__ = ["Partial"]

# Seconds between two times that it is written.
_EVERY = 10.0
_ARRAY = "array"


class Partial:
    """What was done so far, kept in a JSON file.

    Args:
        path: The file; None keeps nothing.

    Attributes:
        done: Batches that were done, by the name of what is done with them.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "partial.json"
        >>> partial = Partial(path)
        >>> partial.read({"draws": 2})
        >>> partial.add("audit", lambda: {})
        >>> partial.write(lambda: {"losses": np.array([0.1, 0.2])})
        >>> again = Partial(path)
        >>> again.read({"draws": 2}), again.done
        ({'losses': array([0.1, 0.2])}, {'audit': 1})
    """

    def __init__(self, path: str | Path | None) -> None:
        self.path = path
        self.done: dict[str, int] = {}
        self._identity: Mapping[str, Any] = {}
        self._written = time.monotonic()

    def read(self, identity: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return what was kept; None where there is nothing.

        Args:
            identity: What decides the outcome, as plain values.

        Raises:
            ValueError: The file belongs to another audit.
        """
        self._identity = identity
        if self.path is None or not Path(self.path).exists():
            return None
        check_regular(self.path)
        found = parse_json(Path(self.path).read_bytes(), repr(str(self.path)))
        own = found.get("of", {}) if isinstance(found, dict) else {}
        differing = [name for name, value in identity.items() if own.get(name) != value]
        if differing:
            raise ValueError(
                f"{str(self.path)!r} belongs to another audit, which differs in {', '.join(differing)}: remove it or "
                "choose another place"
            )
        self.done = found["done"]
        state: dict[str, Any] = _unpacked(found["state"])
        return state

    def add(self, name: str, state: Callable[[], Mapping[str, Any]]) -> None:
        """Note that one more batch is done, and write what is known by now if that was long ago.

        Args:
            name: What was done with it.
            state: Returns what is known, as plain values and arrays.
        """
        self.done[name] = self.done.get(name, 0) + 1
        if time.monotonic() - self._written >= _EVERY:
            self.write(state)

    def write(self, state: Callable[[], Mapping[str, Any]]) -> None:
        """Write what is known by now.

        Args:
            state: As for `add`.
        """
        if self.path is not None:
            content = {"of": self._identity, "done": self.done, "state": state()}
            write_atomically(self.path, json.dumps(content, default=_packed))
            self._written = time.monotonic()


def _packed(array: np.ndarray) -> dict[str, str]:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return {_ARRAY: base64.b64encode(zlib.compress(file.getvalue())).decode()}


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(own) for own in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {_ARRAY}:
        return np.load(io.BytesIO(zlib.decompress(base64.b64decode(value[_ARRAY]))), allow_pickle=False)
    return {name: _unpacked(own) for name, own in value.items()}
