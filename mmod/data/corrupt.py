"""Corrupt data: an error, or a count if the user chose to skip it."""

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
    """A sample or shard cannot be read."""


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
    """One corrupt file or sample.

    Attributes:
        file: The shard or image file.
        sample: The sample within the shard; empty if the fault concerns the file.
        reason: The error.
    """

    file: str
    sample: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}{f' [{self.sample}]' if self.sample else ''}: {self.reason}"


@dataclass
class CorruptReport:
    """The distinct faults so far.

    Args:
        on_corrupt: "raise" raises the first fault; "skip" counts faults.
        faults: The faults, in order of occurrence.

    Raises:
        ValueError: `on_corrupt` has another value.

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
        """Count faults, or raise the first.

        Raises:
            CorruptDataError: There is a fault and `on_corrupt` is "raise".
        """
        for fault in faults:
            if self.on_corrupt == "raise":
                raise CorruptDataError(f"{fault} (on_corrupt='skip' counts such samples and leaves them out)")
            self.faults[fault] = None

    @property
    def counts(self) -> dict[str, int]:
        """Number of faults of each file."""
        return dict(Counter(fault.file for fault in self.faults))

    def __str__(self) -> str:
        if not self.faults:
            return "no corrupt data"
        return "\n".join([f"{len(self.faults)} corrupt, skipped:", *map(str, self.faults)])


_WORKER = re.compile(r"'?Caught \w+ in DataLoader worker process \d+\.")
_RAISED = re.compile(r"^(?:(?P<module>[\w.]+)\.)?(?P<name>\w+)(?:: (?P<message>.*?))?\n?\Z", re.MULTILINE | re.DOTALL)


@contextmanager
def original_errors() -> Iterator[None]:
    """Raise errors of a loader's worker processes with their original class and message.

    torch replaces the message by the worker's traceback, and replaces errors with several arguments by a RuntimeError.

    Raises:
        Exception: The worker's error; for a class with several arguments, the nearest base class with one.

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
        # The error follows the last frame of the traceback.
        raised = _RAISED.search(text, text.rfind('\n  File "')) if _WORKER.match(text) else None
        if raised is None:
            raise
        raise _rebuilt(type(error), **raised.groupdict(default="")) from error


def _rebuilt(default: type[Exception], module: str, name: str, message: str) -> Exception:
    """Rebuild an error of another process."""
    original: Any = getattr(sys.modules.get(module, builtins), name, default)
    for base in original.__mro__:
        try:
            error: Exception = base(message)
        except TypeError:
            continue
        return error
    return default(message)
