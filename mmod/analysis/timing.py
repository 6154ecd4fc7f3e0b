"""Interleaved timing, and times of candidates, measured once on a machine.

Functions take turns in random order, so that drift of the machine affects all alike.
"""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from mmod.io.environment import on_timing_threads
from mmod.io.jobs import Callback
from mmod.io.store import Store

Name = TypeVar("Name", bound=Hashable)
T = TypeVar("T")
Timed = TypeVar("Timed")
"""Names what a timed pass reads, such as the kind of its samples and their number."""


# Seconds for each second of computing, above which other processes took the core too often.
_WAITING = 1.25
# Distance of the quartiles of a speed-up, as a share of it, above which rounds do not repeat each other.
SCATTER = 0.1
# A round that is shorter says nothing of how busy the machine is.
_SHORTEST = 0.05


class Reading(NamedTuple):
    """What is timed of a model: in each round it reads the next draw of samples, and after the last the first again.

    How many tokens a model keeps may depend on the samples: its time on one draw may differ from that on another.

    Attributes:
        draws: The forward passes over each draw.
        samples: Number of samples of a draw.
    """

    draws: Sequence[Callable[[], object]]
    samples: int


def reading_of(read: Callable[[T], object], draws: Iterable[Sequence[T]], samples: int) -> Reading:
    """Return the passes over draws of batches, from a pass over one batch; see `Reading`."""

    def read_all(batches: Sequence[T]) -> None:
        for batch in batches:
            read(batch)

    return Reading([partial(read_all, batches) for batches in draws], samples)


DRAWS = 10
"""Draws of samples that are timed, where there are so many."""
# Rounds of what the first ones name, where they are uncertain.
_FURTHER = 10
PASSES = 8
"""Passes that one timed reading of a small batch has at most: more take longer than the evaluation and tell no more."""
Readings = Mapping[str, Mapping[Timed, Reading]]
"""The passes of each candidate by name."""
Times = dict[Timed, dict[str, list[float]]]
"""Milliseconds of a sample by pass, candidate and round."""


@dataclass(frozen=True)
class Spread:
    """A median with its lower and upper quartile."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Summarise values by `statistics.quantiles`, inclusive."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    @property
    def scatter(self) -> float:
        """The distance of the quartiles, as a share of the median."""
        return (self.high - self.low) / self.median

    @property
    def shown(self) -> Spread:
        """The speed-up as tables print it: rules by it hold for whoever reads them."""
        return Spread(round(self.median, 2), round(self.low, 2), round(self.high, 2))

    def __format__(self, form: str) -> str:
        """Return the median, and in brackets the quartiles if the format starts with one and they differ."""
        number = form.lstrip("[")
        median = f"{self.median:{number}}"
        if number == form or self.low == self.high:
            return median
        return f"{median} [{self.low:{number}}, {self.high:{number}}]"


def ratios(numerator: list[float], denominator: list[float]) -> Spread:
    """Summarise the ratios of two functions' times, round by round."""
    return Spread.of([top / bottom for top, bottom in zip(numerator, denominator)])


def relative_times(times: Mapping[Name, list[float]], base: Name) -> dict[Name, tuple[float, float]]:
    """Return milliseconds and speed-up over the function `base`, by name, from times by round.

    The speed-up is the median over rounds, since the load of the machine hardly changes within a round. Milliseconds
    are the median of the base divided by it, so that both agree.

    Example:
        >>> relative_times({"dense": [4.0, 8.0, 4.0], "a": [2.0, 4.0, 9.0]}, "dense")
        {'dense': (4.0, 1.0), 'a': (2.0, 2.0)}
    """
    speedups = {name: ratios(times[base], values).median for name, values in times.items()}
    base_time = statistics.median(times[base])
    return {name: (base_time / speedup, speedup) for name, speedup in speedups.items()}


def further_rounds(rounds: int) -> range:
    """Return the numbers of the rounds that follow the first ones, for what these name where they are uncertain."""
    return range(rounds, rounds + _FURTHER)


def say_kept(named: str) -> str:
    """Say behind a caution on times that are kept in a folder how others are measured, from how a folder is named."""
    return f"Use a new folder ({named}): this one keeps its times."


def timing_caution(times: Times[Timed], waiting: float, base: str) -> str:
    """Return a sentence on what makes speed-ups over the candidate `base` uncertain; empty for nothing.

    Example:
        >>> timing_caution({"batch": {"dense": [4.0, 4.1, 4.0], "a": [2.0, 2.0, 2.1]}}, 1.0, "dense")
        ''
    """
    spreads = []
    for ms in times.values():
        # One round alone has no scatter.
        spreads += [ratios(ms[base], values) for name, values in ms.items() if name != base and len(values) > 1]
    reasons = []
    if waiting > _WAITING:
        reasons.append(f"the machine was busy, and passes took {waiting:.1f} times their CPU time")
    scatter = 0.0
    if spreads:
        scatter = statistics.median(spread.scatter for spread in spreads)
    if scatter > SCATTER:
        reasons.append(f"rounds scatter, with quartiles {100 * scatter:.0f} % apart on average")
    if not reasons:
        return ""
    return f"Speeds are uncertain: {'; '.join(reasons)}. Measure again on an idle machine."


def interleave(
    functions: Mapping[Name, Callable[[], object]],
    *,
    seconds: float,
    rounds: int,
    device: torch.device,
    warmup: int = 2,
    seed: int = 0,
    prepare: Callable[[], object] | None = None,
    callback: Callback = lambda share: None,
) -> dict[Name, list[float]]:
    """Return milliseconds of every call by name and round: every round calls all functions once, in random order.

    There are at least `rounds` rounds and `seconds` seconds of them, after `warmup` rounds. `prepare` runs before
    every timed call, outside the time. A GPU is timed by events, a single CPU thread by its CPU time, more threads
    by wall time. `callback` receives the share of these calls that is done.
    """
    order = list(functions)
    shuffle = random.Random(seed).shuffle
    timer = _time_on_gpu if device.type == "cuda" else _time_on_cpu
    times: dict[Name, list[float]] = {name: [] for name in functions}
    calls = (warmup + rounds) * len(functions)
    done = itertools.count(1)
    with without_garbage_collection():
        for _ in range(warmup):
            for function in functions.values():
                timer(function, prepare)
                callback(next(done) / calls)
        started = time.perf_counter()
        while len(times[order[0]]) < rounds or time.perf_counter() - started < seconds:
            # In another order each round: what slows the machine down slows no function alone.
            shuffle(order)
            for name in order:
                times[name].append(timer(functions[name], prepare))
                callback(min(1.0, next(done) / calls))
    return times


@torch.no_grad()
def sample_times(
    readings: Readings[Timed],
    *,
    rounds: range,
    device: torch.device,
    warmup: int = 1,
    callback: Callback = lambda share: None,
) -> Times[Timed]:
    """Time all passes of all candidates in turns; see `interleave`. The number of a round says which draw is read."""
    by_pass: Times[Timed] = {}

    def told(done: int, share: float) -> None:
        callback((done + share) / len(rounds))

    for done, number in enumerate(rounds):
        calls: dict[tuple[str, Timed], Callable[[], object]] = {}
        for name, passes in readings.items():
            calls |= {(name, of): reading.draws[number % len(reading.draws)] for of, reading in passes.items()}
        times = interleave(
            calls,
            seconds=0,
            rounds=1,
            device=device,
            warmup=0 if done else warmup,
            seed=number,
            callback=partial(told, done),
        )
        for (name, of), ms in times.items():
            samples = readings[name][of].samples
            by_pass.setdefault(of, {}).setdefault(name, []).extend(total / samples for total in ms)
    return by_pass


def times_once(
    store: Store,
    identity: Mapping[str, object],
    readings: Callable[[], Readings[Timed]],
    device: torch.device,
    *,
    rounds: range,
    callback: Callback = lambda share: None,
) -> tuple[Times[Timed], float]:
    """Return times from the store of this machine, and measure the rounds that are not there.

    Each round is kept at once: speed-ups compare times of one round, which may be of an earlier call.

    Args:
        identity: Stands for all candidates and passes: times beside other ones are of other turns.
        readings: Makes the models and their passes.
        rounds: The numbers of the rounds, see `sample_times`.
        callback: Receives the share of all rounds that is done.

    Returns:
        The times, and a median over rounds: the seconds that a round took for each second of computing on the CPU
        thread. It is 1 on an idle machine, on a GPU, and with more threads.
    """
    by_pass: Times[Timed] = {}
    waiting = []
    ready: Readings[Timed] | None = None

    def told(done: int, share: float) -> None:
        callback((done + share) / len(rounds))

    # The store knows times by the threads that they were measured on.
    with on_timing_threads():
        for done, number in enumerate(rounds):
            key = {"work": "timed round", **identity, "round": number}
            found: Mapping[str, Any] | None = store.get(key, timed_on=str(device))
            if found is None:
                unmeasured = 0
                if ready is None:
                    ready = readings()
                    # A CPU compiles and chooses no kernels, and one slow round moves no median.
                    unmeasured = int(device.type != "cpu")
                started = time.perf_counter()
                computed = time.thread_time()
                one = range(number, number + 1)
                measured = sample_times(
                    ready, rounds=one, device=device, warmup=unmeasured, callback=partial(told, done)
                )
                seconds = time.perf_counter() - started
                computed = time.thread_time() - computed
                is_told = device.type == "cpu" and torch.get_num_threads() == 1 and seconds > _SHORTEST
                ratio = seconds / computed if is_told else 1.0
                record = {"times": list(measured.items()), "waiting": ratio}
                found = store.once(key, partial(dict, record), timed_on=str(device))
            waiting.append(found["waiting"])
            for of, by_name in found["times"]:
                # JSON has no tuples.
                if isinstance(of, list):
                    of = tuple(of)
                of_pass = by_pass.setdefault(of, {})
                for name, ms in by_name.items():
                    of_pass.setdefault(name, []).extend(ms)
            told(done, 1.0)
    return by_pass, statistics.median(waiting)


def _time_on_cpu(function: Callable[[], object], prepare: Callable[[], object] | None) -> float:
    # CPU time of the thread excludes other processes.
    # With several threads it would leave out the work of the others.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    if prepare is not None:
        prepare()
    started = clock()
    function()
    return (clock() - started) * 1e3


def _time_on_gpu(function: Callable[[], object], prepare: Callable[[], object] | None) -> float:
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    if prepare is not None:
        # Not synchronized: the host queues the timed call while the GPU is busy, so launches cost no time.
        prepare()
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Context in which Python looks for no garbage, which takes time and frees memory of others."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
