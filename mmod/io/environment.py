"""What times depend on: the machine, the versions, and the threads that models are timed on."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mmod.version import __version__


def choose_device(device: str | torch.device = "auto") -> torch.device:
    """Return a device by its name; "auto" is the GPU if there is one.

    Raises:
        TypeError: Neither a name nor a device.
        ValueError: A name that torch does not know, or a GPU that it does not see.
    """
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"device must be a text or a device, got {device!r}")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or another torch device, got {device!r}") from error
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        gpus = torch.cuda.device_count() or "no GPU"
        raise ValueError(f"device {str(chosen)!r} was asked for and torch sees {gpus}; use 'cpu' or 'auto'")
    return chosen


def environment(device: str = "cpu") -> dict[str, object]:
    """Return what a measurement depends on: versions, processor or GPU, and threads.

    Raises:
        ValueError: A GPU is requested and torch sees none.
    """
    machine: dict[str, object] = {"mmod": __version__, "torch": str(torch.__version__)}
    machine |= {"python": platform.python_version(), "device": device}
    if choose_device(device).type == "cuda":
        return {**machine, "gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return {**machine, "processor": _processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def timing_threads() -> int:
    """Return the threads that models are timed on: one, whose time other work hardly changes, or the user's number."""
    if not os.environ.get("OMP_NUM_THREADS"):
        return 1
    return torch.get_num_threads()


@contextmanager
def on_timing_threads() -> Iterator[None]:
    """Run on the threads of `timing_threads` within the context, for all code of this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(timing_threads())
    try:
        yield
    finally:
        torch.set_num_threads(before)
