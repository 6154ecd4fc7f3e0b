"""Interleaved times of candidates: rows of (pass, candidate, round), measured once on a machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from mmod.analysis.timing import Reading, interleave
from mmod.io.store import Store
from mmod.io.timing_threads import on_timing_threads

Input = TypeVar("Input")
"""Names what a timed pass reads, such as the kind of its samples and their number."""
Readings = Mapping[str, Mapping[Input, Reading]]
"""The passes of each candidate by name."""
Times = dict[Input, dict[str, list[float]]]
"""Milliseconds of a sample by pass, candidate and round."""


@torch.no_grad()
def sample_times(
    readings: Readings[Input], *, rounds: int, device: torch.device, warmup: int = 2, shown: bool = False
) -> Times[Input]:
    """Time all passes of all candidates in turns; see `mmod.analysis.timing.interleave`."""
    calls: dict[tuple[str, Input], Callable[[], object]] = {}
    for name, passes in readings.items():
        calls |= {(name, of): reading.call for of, reading in passes.items()}
    times = interleave(calls, seconds=0, rounds=rounds, device=device, warmup=warmup, shown=shown)
    by_pass: Times[Input] = {}
    for (name, of), ms in times.items():
        samples = readings[name][of].samples
        by_pass.setdefault(of, {})[name] = [total / samples for total in ms]
    return by_pass


def times_once(
    store: Store, identity: Mapping[str, Any], readings: Callable[[], Readings[Any]], device: torch.device, **how: Any
) -> Times[Any]:
    """Return times from the store of this machine, and measure them if they are not there.

    Args:
        identity: Stands for all candidates and passes: times beside other ones are of other turns.
        readings: Makes the models and their passes.
        how: Further arguments of `sample_times`, which join the identity but for `shown`.
    """

    def measure() -> list[Any]:
        with on_timing_threads():
            return list(sample_times(readings(), device=device, **how).items())

    known = {name: value for name, value in how.items() if name != "shown"}
    rows = store.once({"work": "times", **identity, **known}, measure, timed_on=str(device))
    return {tuple(of) if isinstance(of, list) else of: by_name for of, by_name in rows}
