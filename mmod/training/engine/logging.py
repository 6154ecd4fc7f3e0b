"""Running means, time, throughput and memory of a run, and its CSV files and TensorBoard logs."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from mmod.io.progress import say
from mmod.lazy import name_missing_extra
from mmod.training.engine.distributed import sum_over_processes

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def note(line: str) -> None:
    """Print a line above the bars, which are on the standard error stream."""
    say(line, file=sys.stderr)


def note_resumed(folder: Path, step: int, steps: int) -> None:
    """Print that a run resumes after so many of its steps."""
    note(f"{folder}: resumed at step {step} of {steps}")


class Meters:
    """Running means over samples that stay on the device until they are read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Sum of the values, and their count, by name.
        self._sums: dict[str, Tensor] = {}

    def update(self, values: Mapping[str, Tensor], count: int) -> None:
        """Add the means, scalars by name, of a batch of `count` samples."""
        for name, value in values.items():
            # In float64 on the device: an epoch's sum loses digits in float32, and reading each value would wait for
            # the GPU.
            value = value.detach().double()
            sums = torch.stack([value * count, torch.full_like(value, count)])
            if name in self._sums:
                sums = self._sums[name] + sums
            self._sums[name] = sums

    def means(self) -> dict[str, float]:
        """Return the means so far."""
        return {name: total / count for name, (total, count) in self.state_dict().items()}

    def gather(self, keep: bool) -> None:
        """Replace the sums by those over all processes if `keep`, otherwise by zero, so that nothing counts twice."""
        for name, sums in self._sums.items():
            total = sum_over_processes(sums)
            if not keep:
                total = torch.zeros_like(total)
            self._sums[name] = total

    def state_dict(self) -> dict[str, list[float]]:
        """Return sums and counts as plain numbers."""
        return {name: sums.tolist() for name, sums in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restore sums and counts."""
        self._sums = {
            name: torch.tensor(sums, dtype=torch.float64, device=self._device) for name, sums in state.items()
        }


class TensorBoard:
    """TensorBoard's writer; a no-op without a folder. What an interrupted run wrote after `step` is hidden."""

    def __init__(self, folder: Path | None, step: int) -> None:
        self._writer: SummaryWriter | None = None
        self._open: Callable[[], SummaryWriter] | None = None
        if folder is not None:
            with name_missing_extra():
                from torch.utils.tensorboard import SummaryWriter
            # Opened with the first figures: a start that fails leaves no file behind.
            self._open = functools.partial(SummaryWriter, str(folder), purge_step=step)

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Write scalars by name."""
        if self._writer is None and self._open is not None:
            self._writer = self._open()
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the files."""
        if self._writer is not None:
            self._writer.close()


Item = TypeVar("Item")

_PEAKS = ("rss", "cuda")


class Usage:
    """Time, throughput and memory of this process, summed over all starts of a run."""

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
            # Also at the end: waiting for the last batch is waiting.
            finally:
                self._totals["waiting"] += time.perf_counter() - start
            yield item

    def figures(self) -> dict[str, float]:
        """Return the figures so far; times in seconds, memory in MiB.

        CPU time includes workers that have ended; `data_wait` is the share of training time spent waiting for data.
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
        # The mark moves with each reading, so that no second counts twice.
        for name, start, end in zip(("wall", "cpu"), self._mark, now):
            self._totals[name] += end - start
        self._mark = now
        self._totals["rss"] = max(self._totals["rss"], _peak_rss())
        if self._device.type == "cuda":
            peak = float(torch.cuda.max_memory_allocated(self._device))
            self._totals["cuda"] = max(self._totals["cuda"], peak)
        return dict(self._totals)

    def load_state_dict(self, totals: Mapping[str, float]) -> None:
        """Add the totals of an earlier start."""
        for name, value in totals.items():
            # Of several starts the highest peak counts, and the sum of the times.
            if name in _PEAKS:
                self._totals[name] = max(self._totals[name], value)
            else:
                self._totals[name] += value


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _peak_rss() -> float:
    """Return the largest resident memory of this process in bytes; 0 where the system does not report it."""
    try:
        import resource
    except ModuleNotFoundError:
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    if sys.platform != "darwin":
        peak *= 1024
    return float(peak)
