"""Corrupt data: an error, or a count if the user chose to skip it."""

from __future__ import annotations

import builtins
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, SupportsInt

from mmod.names import prefixed
from mmod.values import one_of

OnCorrupt = Literal["raise", "skip"]
_MAX_DETAILS = 1000
# Faults that an error names.
_TOLD = 5


class CorruptDataError(ValueError):
    """A sample or shard cannot be read."""


class UnusableError(ValueError):
    """An item that cannot become a sample: one of a few reasons that reports count by, and the path or value."""

    def __init__(self, reason: str, details: str) -> None:
        super().__init__(reason, details)
        self.reason = reason
        # A record may hold megabytes where a path belongs.
        if len(details) > _MAX_DETAILS:
            half = _MAX_DETAILS // 2
            details = f"{details[:half]}...{details[-half:]}"
        self.details = details

    def __str__(self) -> str:
        return f"{self.reason}: {self.details}"


class Fault(NamedTuple):
    """One corrupt shard or image file, or with `sample` one sample of it, and the error."""

    file: str
    sample: str
    reason: str

    def __str__(self) -> str:
        place = self.file
        if self.sample:
            place = f"{self.file} [{self.sample}]"
        return f"{place}: {self.reason}"


@dataclass
class CorruptReport:
    """What a stream could not read, each fault once and in order.

    Args:
        on_corrupt: "raise" raises the first fault; "skip" counts faults.
        limit: Maximum number of faults that are skipped; None for any number.
        retried: Number of reads of remote files that were repeated.
        skip: How a user sets "skip", for messages: a key of configs, or an option of a command.

    Example:
        >>> report = CorruptReport("skip")
        >>> report.add([Fault("a.tar", "7", "no .cls member")])
        >>> report.counts
        {'a.tar': 1}
    """

    on_corrupt: OnCorrupt = "raise"
    # A dict for its order; keys are counted once, however often a sample is read.
    faults: dict[Fault, None] = field(default_factory=dict)
    limit: int | None = None
    # A tensor that worker processes share, where files are remote.
    retried: SupportsInt = 0
    skip: str = "on_corrupt: skip in data"

    def __post_init__(self) -> None:
        one_of("on_corrupt", self.on_corrupt, ("raise", "skip"))

    def add(self, faults: Iterable[Fault], hint: str = "") -> None:
        """Count faults; if `on_corrupt` is "raise", raise a CorruptDataError of the first few, with a hint."""
        met = list(faults)
        if met and self.on_corrupt == "raise":
            # The first of each reason before others: one reason may be that of most.
            firsts: dict[str, Fault] = {}
            for fault in met:
                firsts.setdefault(fault.reason, fault)
            others = [fault for fault in met if firsts[fault.reason] is not fault]
            told = "; ".join(map(str, [*firsts.values(), *others][:_TOLD]))
            if len(met) > _TOLD:
                told += f"; {len(met) - _TOLD} more"
            raise CorruptDataError(f"{told} ({self.advice}{prefixed('; ', hint)})")
        for fault in met:
            self.faults[fault] = None
            if self.limit is not None and len(self.faults) > self.limit:
                raise CorruptDataError(f"more than max_corrupt={self.limit} faults, the last: {fault}")

    @property
    def advice(self) -> str:
        """What else may be done with samples that cannot be read, in brackets behind a message."""
        return f"{self.skip} counts such samples and leaves them out"

    @property
    def counts(self) -> dict[str, int]:
        """Number of faults of each file."""
        return dict(Counter(fault.file for fault in self.faults))

    def __str__(self) -> str:
        lines = ["no corrupt data"]
        if self.faults:
            lines = [f"{len(self.faults)} corrupt, skipped:", *map(str, self.faults)]
        if self.retried:
            lines.append(f"{int(self.retried)} remote reads repeated")
        return "\n".join(lines)


_WORKER = re.compile(r"'?Caught \w+ in DataLoader worker process \d+\.")
_RAISED = re.compile(r"^(?:(?P<module>[\w.]+)\.)?(?P<name>\w+)(?:: (?P<message>.*?))?\n?\Z", re.MULTILINE | re.DOTALL)


@contextmanager
def original_errors() -> Iterator[None]:
    """Raise errors of a loader's worker processes with their original class, or its nearest base with one argument."""
    try:
        yield
    except Exception as error:
        # torch replaces the message by the worker's traceback, and errors with several arguments by a RuntimeError.
        text = str(error.args[0]) if error.args else ""
        # The error follows the last frame of the traceback.
        raised = None
        if _WORKER.match(text):
            raised = _RAISED.search(text, text.rfind('\n  File "'))
        if raised is None:
            raise
        # A frame of its traceback refers to it: the cycle would keep the loader and its workers.
        error.__traceback__ = None
        raise _rebuilt(type(error), **raised.groupdict(default="")) from error


def _rebuilt(default: type[Exception], module: str, name: str, message: str) -> Exception:
    """Rebuild an error of another process."""
    original = getattr(sys.modules.get(module, builtins), name, default)
    # Bases in order: an error whose class takes other arguments becomes the nearest that takes a message.
    for base in original.__mro__:
        try:
            error: Exception = base(message)
        except TypeError:
            continue
        return error
    return default(message)
