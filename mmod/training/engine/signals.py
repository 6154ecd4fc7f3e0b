"""SIGTERM and SIGINT end a run after the step that is being done, with a checkpoint."""

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

__all__ = ["StopRequest", "stop_signals"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """The first signal that asked to stop, in any of the processes that train together."""

    def __init__(self) -> None:
        self._number = 0
        # Beside the group that trains, so that no step waits for a GPU.
        self._group: Any = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def note(self, number: int, frame: FrameType | None = None) -> None:
        """Take note of a signal; the next one ends the process as if nobody listened.

        Args:
            number: The signal's number.
            frame: Unused: what Python calls a handler with.
        """
        self._number = number
        for heard in _SIGNALS:
            signal.signal(heard, signal.SIG_DFL)

    def agreed(self) -> bool:
        """Return whether any process was asked to stop; all processes must ask after the same step."""
        if self._group is not None:
            number = torch.tensor(self._number)
            dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self._group)
            self._number = int(number)
        return self._number > 0

    def leave(self, folder: str | Path, step: int, *, loud: bool) -> None:
        """End the program with the exit code of the signal.

        Args:
            folder: The run folder.
            step: Steps done, all of them saved.
            loud: Whether this process says so.

        Raises:
            SystemExit: Always.
        """
        if loud:
            name = signal.Signals(self._number).name
            print(f"{folder}: {name} after step {step}, which is saved; the same command goes on", file=sys.stderr)
        raise SystemExit(128 + self._number)


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Listen to SIGTERM and SIGINT in place of those who did so before.

    Yields:
        What was heard. Outside the main thread, which alone may listen, nothing is.
    """
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
