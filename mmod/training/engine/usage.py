"""What a run has used so far: time, throughput and memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch

Item = TypeVar("Item")

USAGE = ("wall_seconds", "cpu_seconds", "samples_per_second", "data_wait", "peak_rss_mib", "peak_cuda_mib")
"""Names of the figures, which differ between equal runs."""
_PEAKS = ("rss", "cuda")


class Usage:
    """Time, throughput and memory of this process, summed over all starts of a run.

    Args:
        device: The device that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._totals = dict.fromkeys(("wall", "cpu", "steps", "waiting", "samples", *_PEAKS), 0.0)
        self._mark = (time.perf_counter(), _cpu_seconds())

    @contextmanager
    def step(self, samples: int) -> Iterator[None]:
        """Context that counts an optimiser step on so many samples."""
        start = time.perf_counter()
        yield
        self._totals["steps"] += time.perf_counter() - start
        self._totals["samples"] += samples

    def waiting(self, items: Iterator[Item]) -> Iterator[Item]:
        """Yield items, and count the time until each is there."""
        while True:
            start = time.perf_counter()
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                self._totals["waiting"] += time.perf_counter() - start
            yield item

    def figures(self) -> dict[str, float]:
        """Return the figures so far.

        Returns:
            Seconds of the run, and of its CPUs with the workers that have ended; samples per second of training;
            the share of that time spent waiting for data; the largest resident memory, and the largest CUDA memory on
            a GPU, in MiB.
        """
        totals = self.state_dict()
        trained = totals["steps"] + totals["waiting"]
        figures = {"wall_seconds": totals["wall"], "cpu_seconds": totals["cpu"]}
        if trained:
            figures |= {"samples_per_second": totals["samples"] / trained, "data_wait": totals["waiting"] / trained}
        figures |= {f"peak_{name}_mib": totals[name] / 2**20 for name in _PEAKS if totals[name]}
        return {name: float(f"{value:.6g}") for name, value in figures.items()}

    def state_dict(self) -> dict[str, float]:
        """Return the totals."""
        now = time.perf_counter(), _cpu_seconds()
        for name, start, end in zip(("wall", "cpu"), self._mark, now):
            self._totals[name] += end - start
        self._mark = now
        self._totals["rss"] = max(self._totals["rss"], _peak_rss())
        if self._device.type == "cuda":
            self._totals["cuda"] = max(self._totals["cuda"], float(torch.cuda.max_memory_allocated(self._device)))
        return dict(self._totals)

    def load_state_dict(self, totals: Mapping[str, float]) -> None:
        """Add the totals of an earlier start."""
        for name, value in totals.items():
            self._totals[name] = max(self._totals[name], value) if name in _PEAKS else self._totals[name] + value


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _peak_rss() -> float:
    """Return the largest resident memory of this process in bytes; 0 where the system does not report it."""
    try:
        import resource
    except ModuleNotFoundError:
        return 0.0
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else 1024 * peak)
