"""Options that benchmarks have in common."""

from __future__ import annotations

from dataclasses import dataclass

from mmod.values import check_fields


@dataclass(frozen=True, kw_only=True)
class Options:
    """What every benchmark is told.

    Args:
        threads: CPU threads; None leaves torch's choice.
        device: "cpu" or "cuda".
        out: Folder for `benchmark.json` and `benchmark.md`, which are never overwritten. A benchmark that was killed
            goes on in the same folder.
    """

    threads: int | None = None
    device: str = "cpu"
    out: str


@dataclass(frozen=True, kw_only=True)
class TimedOptions(Options):
    """What a benchmark is told that times its paths in turns; other options are those of `Options`.

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
