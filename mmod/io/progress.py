"""Progress bars on a terminal, and plain lines elsewhere."""

from __future__ import annotations

import functools
import math
import sys
import time
import warnings
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

SECONDS = 60
"""Seconds to the first line without a terminal. Each further one comes after twice the time: a log stays short."""
# Seconds between two lines at most: a run of a day shows that it lives.
_MOST = 600
# What tqdm says before it knows the time left.
_UNKNOWN = ", ? left"
_LINE = "{desc}: {n_fmt} of {total_fmt} {unit}, {elapsed} elapsed, {remaining} left{postfix}"

say = tqdm.write
"""Print a line above the bars."""


@functools.cache
def warn_once(message: str, about: object = None) -> None:
    """Warn of what every run of a process would repeat, as of the images that all of them read.

    Args:
        about: What else tells one case from another, where the message does not.
    """
    # Python's own filter starts anew whenever a library changes the filters for a moment.
    warnings.warn(message, stacklevel=3)


def progress_bar(items: Iterable[object] | None = None, *, shown: bool = True, **options: Any) -> Bar:
    """Return a tqdm bar with these options; without a terminal it prints lines without carriage returns.

    A line is printed after 1, 2, 4 and 8 minutes, then every 10, and at the end unless `leave=False`.
    """
    kind = Bar if sys.stderr.isatty() else _Lines
    bar = kind(items, disable=not shown, **options)
    if shown:
        # tqdm's own clock goes on while a machine sleeps, and would count the night into the time left.
        bar._time = time.monotonic
        bar.start_t = bar.last_print_t = bar._time()
        # A terminal may say no size, as in a container: tqdm would draw a bar of no width.
        if bar.ncols is not None and bar.ncols < 1:
            bar.ncols = bar.nrows = None
    return bar


class Bar(tqdm):
    """A bar that `progress_bar` returns, which says no time left before it knows one.

    In its format, `percent` is rounded down: 100 % is said of what is done. It never falls, also where work is found.
    """

    _percent = 0
    # Share of the work from which on a time left is said.
    known_from = 0.0

    @property
    def format_dict(self) -> dict[str, Any]:
        """The values of its format."""
        values = super().format_dict
        if self.total and self.n < self.known_from * self.total:
            values |= {"initial": self.n, "rate": None}
        if self.total:
            self._percent = max(self._percent, math.floor(100 * self.n / self.total))
        return values | {"percent": self._percent}

    def __str__(self) -> str:
        return super().__str__().replace(_UNKNOWN, "")

    def keep_line(self) -> None:
        """Print the bar as it is, above those to come."""
        if not self.disable:
            say(str(self), file=self.fp)


class _Lines(Bar):
    """A bar that prints lines."""

    disable: bool
    # No monitor thread: it would refresh a bar that prints lines.
    monitor_interval = 0

    def __init__(self, items: Iterable[object] | None, *, bar_format: str = _LINE, **options: object) -> None:
        self._began = time.monotonic()
        self._due = self._began + SECONDS
        # Without the bar itself, which only a terminal redraws.
        super().__init__(items, bar_format=bar_format.replace("|{bar}| ", ""), **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if time.monotonic() >= self._due:
            self._write()

    def clear(self, nolock: bool = False) -> None:
        """Do nothing: printed lines stay."""

    def keep_line(self) -> None:
        """Print the line as it is, whenever the next is due."""
        if not self.disable:
            self._write()

    def close(self) -> None:
        if self.leave and not self.disable:
            self._write()
        self.disable = True

    def _write(self) -> None:
        now = time.monotonic()
        self._due = now + min(_MOST, max(SECONDS, now - self._began))
        print(self, file=self.fp, flush=True)


def staged(title: str) -> str:
    """Return the layout of a bar over several pieces of work, of which the running one is its description."""
    return f"{title}: {{percent}} % |{{bar}}| {{desc}}, {{remaining}} left"


class Stages:
    """One bar over all stages of a command, by the work of each in a unit that they share; close it by `with`.

    Args:
        title: What stands in front of all stages.
    """

    def __init__(self, title: str, shown: bool = True) -> None:
        self._bar = progress_bar(total=1, bar_format=staged(title), shown=shown, leave=False, miniters=0)
        # Stages differ in speed: the first one says nothing of the others.
        self._bar.known_from = 0.05
        self._stage = ""
        self._begun = self._work = 0.0
        self._rounds = 0

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if not self._bar.disable:
            say(line, file=self._bar.fp)

    def expect(self, work: float) -> None:
        """Set how much work is left, at most."""
        self._bar.total = self._bar.n + work

    def begin(self, stage: str, work: float, rounds: int = 0) -> None:
        """Begin a stage.

        Args:
            stage: Its name.
            work: Its part of the work that is left.
            rounds: Number of its rounds, of which the running one is named.
        """
        self._stage = stage
        self._begun = self._bar.n
        self._work = work
        self._rounds = rounds
        self._bar.total = max(self._bar.total, self._begun + work)
        self.update(0.0)

    def update(self, share: float) -> None:
        """Set the share of the stage's work that is done."""
        name = self._stage
        if self._rounds:
            name += f", round {min(self._rounds, 1 + int(share * self._rounds))} of {self._rounds}"
        self._bar.set_description_str(name, refresh=False)
        self._bar.update(self._begun + share * self._work - self._bar.n)
