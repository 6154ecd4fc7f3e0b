"""SIGTERM and SIGINT end a run after the current step, with a checkpoint."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """The first stop signal in any of the processes that train together."""

    def __init__(self) -> None:
        self._number = 0
        # A separate group, so that no step waits for a GPU.
        self._group: Any = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def note(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal; the next one ends the process at once."""
        self._number = number
        for handled in _SIGNALS:
            signal.signal(handled, signal.SIG_DFL)

    def agreed(self) -> bool:
        """Return whether any process was asked to stop; collective over processes."""
        if self._group is not None:
            number = torch.tensor(self._number)
            dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self._group)
            self._number = int(number)
        return self._number > 0

    def leave(self, folder: str | Path, step: int, *, loud: bool) -> None:
        """Exit with code 128 + signal after `step` saved steps; print a message if `loud`."""
        if loud:
            name = signal.Signals(self._number).name
            print(f"{folder}: {name} after step {step}, which is saved; the same command goes on", file=sys.stderr)
        raise SystemExit(128 + self._number)


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Context that handles SIGTERM and SIGINT; outside the main thread it handles nothing."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.note) for number in _SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
