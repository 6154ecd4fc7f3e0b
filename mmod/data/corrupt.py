"""Faults of files that cannot be read: they raise, or are counted where the user chose to skip them."""

from __future__ import annotations

import builtins
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from mmod.values import one_of

OnCorrupt = Literal["raise", "skip"]
# Longer than any path that a file can have.
_MAX_DETAILS = 5000


class CorruptDataError(ValueError):
    """A sample or a shard that cannot be read."""


class UnusableError(ValueError):
    """An item that cannot become a sample.

    Args:
        reason: The cause, one of a few that reports count by.
        details: The path or value, and the error.
    """

    def __init__(self, reason: str, details: str) -> None:
        super().__init__(reason, details)
        self.reason = reason
        # A record may hold megabytes where a path belongs.
        self.details = details if len(details) <= _MAX_DETAILS else f"{details[:_MAX_DETAILS]}..."

    def __str__(self) -> str:
        return f"{self.reason}: {self.details}"


class Fault(NamedTuple):
    """One thing that could not be read.

    Attributes:
        file: The shard, or the image file itself.
        sample: The sample within the shard; empty when the fault concerns the whole file.
        reason: What is wrong with it.
    """

    file: str
    sample: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}{f' [{self.sample}]' if self.sample else ''}: {self.reason}"


@dataclass
class CorruptReport:
    """The faults met so far, each counted once however often it was met.

    Args:
        on_corrupt: Whether a fault raises or is only counted.
        faults: The faults, in the order in which they were met.

    Raises:
        ValueError: If `on_corrupt` is neither "raise" nor "skip".

    Example:
        >>> report = CorruptReport("skip")
        >>> report.add([Fault("a.tar", "7", "no .cls member")])
        >>> report.counts
        {'a.tar': 1}
    """

    on_corrupt: OnCorrupt = "raise"
    faults: dict[Fault, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        one_of("on_corrupt", self.on_corrupt, ("raise", "skip"))

    def add(self, faults: Iterable[Fault]) -> None:
        """Count faults, or raise the first of them.

        Args:
            faults: What could not be read.

        Raises:
            CorruptDataError: If `on_corrupt` is "raise" and there is a fault.
        """
        for fault in faults:
            if self.on_corrupt == "raise":
                raise CorruptDataError(f"{fault} (on_corrupt='skip' counts such samples and goes on without them)")
            self.faults[fault] = None

    @property
    def counts(self) -> dict[str, int]:
        """Number of faults of each file."""
        return dict(Counter(fault.file for fault in self.faults))

    def __str__(self) -> str:
        if not self.faults:
            return "no corrupt data met"
        return "\n".join([f"{len(self.faults)} corrupt, skipped:", *map(str, self.faults)])


_WORKER = re.compile(r"'?Caught \w+ in DataLoader worker process \d+\.")
_RAISED = re.compile(r"^(?:(?P<module>[\w.]+)\.)?(?P<name>\w+)(?:: (?P<message>.*?))?\n?\Z", re.MULTILINE | re.DOTALL)


@contextmanager
def original_errors() -> Iterator[None]:
    """Raise errors of a loader's worker processes as they were raised there.

    torch puts the worker's traceback in place of the message, and a RuntimeError in place of errors that take more than
    a message.

    Raises:
        Exception: The error of the worker; of one that takes more than a message, the nearest class that it derives
            from.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> with original_errors():
        ...     list(DataLoader(["1", "x"], num_workers=1, collate_fn=lambda texts: int(texts[0])))
        Traceback (most recent call last):
        ValueError: invalid literal for int() with base 10: 'x'
    """
    try:
        yield
    except Exception as error:
        text = str(error.args[0]) if error.args else ""
        # The last frame of the traceback and its line are indented; the error follows.
        raised = _RAISED.search(text, text.rfind('\n  File "')) if _WORKER.match(text) else None
        if raised is None:
            raise
        raise _rebuilt(type(error), **raised.groupdict(default="")) from error


def _rebuilt(kind: type[Exception], module: str, name: str, message: str) -> Exception:
    """Return an error that another process raised."""
    found: Any = getattr(sys.modules.get(module, builtins), name, kind)
    for base in found.__mro__:
        try:
            error: Exception = base(message)
        except TypeError:
            continue
        return error
    return kind(message)
