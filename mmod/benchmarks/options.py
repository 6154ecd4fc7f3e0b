"""Options that benchmarks have in common, and the runs that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mmod.values import check_fields


class Runs(NamedTuple):
    """The runs of a benchmark by name, which return rows of one class; `notes` returns sentences below the table."""

    title: str
    row: type[Any]
    calls: Mapping[str, Callable[[], Sequence[Any]]]
    notes: Callable[[Sequence[Any]], Sequence[str]] = lambda rows: ()


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every benchmark.

    Args:
        threads: CPU threads; None leaves torch's choice.
        device: "cpu" or "cuda".
        out: Folder for `benchmark.json` and `benchmark.md`, which are never overwritten. A benchmark that was killed
            goes on in the same folder.
    """

    threads: int | None = None
    device: str = "cpu"
    out: str

    def runs(self) -> Runs:
        """Return the runs that these options ask for."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class TimedOptions(Options):
    """Options of a benchmark that times its paths in turns; the others are those of `Options`.

    Args:
        seconds: Each run goes on for at least this long,
        rounds: and for at least this many rounds, in which each path is called once.
        seed: Seed of weights, inputs and order.
    """

    seconds: float = 30.0
    rounds: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, seconds="[0, inf)", rounds="[1, inf)", threads="[1, inf)", seed="[0, inf)")
