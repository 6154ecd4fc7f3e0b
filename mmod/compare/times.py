"""Interleaved times of candidates: rows of (pass, candidate, round), measured once on a machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch

from mmod.analysis.timing import Reading, interleave
from mmod.io.progress import progress_bar
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
    readings: Readings[Input],
    *,
    rounds: int,
    device: torch.device,
    warmup: int = 1,
    seed: int = 0,
    shown: bool = False,
) -> Times[Input]:
    """Time all passes of all candidates in turns; see `mmod.analysis.timing.interleave`."""
    calls: dict[tuple[str, Input], Callable[[], object]] = {}
    for name, passes in readings.items():
        calls |= {(name, of): reading.call for of, reading in passes.items()}
    times = interleave(calls, seconds=0, rounds=rounds, device=device, warmup=warmup, seed=seed, shown=shown)
    by_pass: Times[Input] = {}
    for (name, of), ms in times.items():
        samples = readings[name][of].samples
        by_pass.setdefault(of, {})[name] = [total / samples for total in ms]
    return by_pass


def times_once(
    store: Store,
    identity: Mapping[str, object],
    readings: Callable[[], Readings[Input]],
    device: torch.device,
    *,
    rounds: int,
    shown: bool = False,
) -> Times[Input]:
    """Return times from the store of this machine, and measure the rounds that are not there.

    Each round is kept at once: speed-ups compare times of one round, which may be of an earlier call.

    Args:
        identity: Stands for all candidates and passes: times beside other ones are of other turns.
        readings: Makes the models and their passes.
    """
    by_pass: Times[Any] = {}
    ready: Readings[Input] | None = None
    bar = progress_bar(desc="timing", total=rounds, unit="rounds", shown=shown)
    # The store knows times by the threads that they were measured on.
    with on_timing_threads(), bar:
        for number in range(rounds):
            key = {"work": "times of a round", **identity, "round": number}
            times = store.get(key, timed_on=str(device))
            if times is None:
                unmeasured = 0
                if ready is None:
                    ready = readings()
                    # A CPU compiles and chooses no kernels, and one slow round moves no median.
                    unmeasured = int(device.type != "cpu")
                measured = sample_times(ready, rounds=1, device=device, warmup=unmeasured, seed=number)
                times = store.once(key, partial(list, measured.items()), timed_on=str(device))
            for of, by_name in times:
                of_pass = by_pass.setdefault(tuple(of) if isinstance(of, list) else of, {})
                for name, ms in by_name.items():
                    of_pass.setdefault(name, []).extend(ms)
            bar.update()
    return by_pass
