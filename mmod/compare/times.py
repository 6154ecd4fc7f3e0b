"""Interleaved times of candidates: rows of (pass, candidate, round), and milliseconds and speed-ups from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from mmod.analysis.timing import Reading, interleave, relative_times
from mmod.compare.table import DENSE, Table
from mmod.io.timing_threads import on_timing_threads

Input = TypeVar("Input")
"""Names what a timed pass reads, such as the kind of its samples and their number."""


Readings = Mapping[str, Mapping[Input, Reading]]
"""The passes of each candidate by name."""


def time_models(
    readings: Readings[Input],
    *,
    rounds: int,
    device: torch.device,
    warmup: int = 2,
    shown: bool = False,
) -> dict[Input, dict[str, list[float]]]:
    """Return milliseconds by pass, candidate and round, all in turns; see `mmod.analysis.timing.interleave`.

    The caller switches gradients off. In inference mode a model may keep tensors that it cannot be trained with.
    """
    calls: dict[tuple[str, Input], Callable[[], object]] = {}
    for name, passes in readings.items():
        calls |= {(name, of): reading.call for of, reading in passes.items()}
    with on_timing_threads():
        times = interleave(calls, seconds=0, rounds=rounds, device=device, warmup=warmup, shown=shown)
    by_pass: dict[Input, dict[str, list[float]]] = {}
    for (name, of), by_round in times.items():
        by_pass.setdefault(of, {})[name] = by_round
    return by_pass


def sample_times(
    table: Table, readings: Readings[Input], *, rounds: int, device: torch.device, shown: bool = False
) -> dict[Input, dict[str, tuple[float, float]]]:
    """Time candidates in turns, and return milliseconds of a sample and speed-up over the dense model by pass and name.

    Args:
        table: Gets the times.
    """
    with torch.inference_mode():
        table.times = time_models(readings, rounds=rounds, device=device, shown=shown)
    figures: dict[Input, dict[str, tuple[float, float]]] = {}
    for of, by_name in table.times.items():
        figures[of] = {
            name: (total / readings[name][of].samples, speedup)
            for name, (total, speedup) in relative_times(by_name, DENSE).items()
        }
    return figures
