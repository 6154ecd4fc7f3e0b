"""Signals that ask a program to stop: of Ctrl-C, of a closed terminal, and of schedulers."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import ClassVar, NoReturn, TypeVar

# Slurm's `--signal` may name any; a closed terminal sends HUP. Not all systems have all.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
_DEFAULT = (signal.SIG_DFL, signal.default_int_handler)


class Stop:
    """The first stop signal that reaches this process.

    Attributes:
        impatient: A second SIGINT or SIGTERM ends the process at once. Others may come twice: a terminal that is closed
            sends SIGHUP, and so does its shell.
        number: The signal; 0 for none yet.
    """

    impatient: ClassVar[bool] = True

    def __init__(self) -> None:
        self.number = 0
        self._process = os.getpid()

    def note(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal."""
        # Processes that this one forked, such as a loader's, have the handler too and end with their parent.
        # Only the first signal counts: a second one of the same shutdown must not change the exit code.
        if not self.number or os.getpid() != self._process:
            self.number = number
        elif self.impatient and number in (signal.SIGINT, signal.SIGTERM):
            # The default handler, then the signal again: the process ends as if it had never been caught.
            signal.signal(number, signal.SIG_DFL)
            # The interrupted code may be printing, and its buffer is locked.
            line = f"\n{signal_name(number)} again: ended at once, nothing was saved since the last checkpoint\n"
            os.write(2, line.encode())
            signal.raise_signal(number)


def signal_name(number: int) -> str:
    """Return the name of a signal."""
    return signal.Signals(number).name


def exit_after(number: int, line: str) -> NoReturn:
    """Print a line, unless it is empty, and exit with code 128 + signal."""
    # A closed terminal cannot be written to.
    with contextlib.suppress(OSError):
        if line:
            # With its end at once: processes that end together share the terminal.
            sys.stderr.write(f"{line}\n")
    raise SystemExit(128 + number)


AnyStop = TypeVar("AnyStop", bound=Stop)


@contextmanager
def heeding(stop: AnyStop) -> Iterator[AnyStop]:
    """Context manager in which `stop` records stop signals; outside of the main thread it records none.

    It leaves alone signals that are ignored, as under nohup, and signals that a scheduler's library handles, such as
    submitit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    # A process that was forked in such a context has the handler of its parent.
    notes = [number for number, handler in before.items() if isinstance(getattr(handler, "__self__", None), Stop)]
    ours = [*notes, *(number for number, handler in before.items() if handler in _DEFAULT)]
    for number in ours:
        signal.signal(number, stop.note)
    try:
        yield stop
    finally:
        for number in ours:
            signal.signal(number, before[number])
