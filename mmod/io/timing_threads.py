"""CPU threads that models are timed on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def timing_threads() -> int:
    """Return the threads that models are timed on: one, whose time other work hardly changes, or the user's number."""
    return torch.get_num_threads() if os.environ.get("OMP_NUM_THREADS") else 1


@contextmanager
def on_timing_threads() -> Iterator[None]:
    """Run on the threads of `timing_threads` within the context, for all code of this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(timing_threads())
    try:
        yield
    finally:
        torch.set_num_threads(before)
