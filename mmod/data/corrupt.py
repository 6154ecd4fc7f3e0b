"""Faults of files that cannot be read: they raise, or are counted where the user chose to skip them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from mmod.values import one_of

OnCorrupt = Literal["raise", "skip"]


class CorruptDataError(ValueError):
    """A sample or a shard that cannot be read."""


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
