"""Jobs, one by one in this process or in parallel processes, with one progress bar over all of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.queues import SimpleQueue
from typing import NoReturn, TypedDict, TypeVar

import torch

from mmod.io.environment import timing_threads
from mmod.io.files import LockedError
from mmod.io.progress import Bar, progress_bar, say, staged
from mmod.io.stop import Stop, exit_after, heeding, signal_name

AnyJob = TypeVar("AnyJob", bound="Job")
Result = TypeVar("Result")
Callback = Callable[[float], None]
"""Receives the progress of a job, from 0 to 1."""
# Of a worker: the number of its job, the share of it that is done, the process, and its CPU seconds.
_Report = tuple[int, float, int, float]
# Seconds in which nothing is computed that is worth an estimate.
_AT_ONCE = 0.2
# Seconds before the next job, where another program does one.
_PAUSE = 1.0


@dataclass(frozen=True)
class Job:
    """One training, evaluation or measurement."""

    name: str
    seed: int
    work: float = 1.0  # Expected duration, in any unit that all jobs share.
    starts_from: tuple[str, int] | None = None  # Name and seed of the job that must have ended before.

    def __str__(self) -> str:
        return f"{self.name}, seed {self.seed}"


class Machine(TypedDict):
    """What jobs run on, and the CPU seconds that they took."""

    torch: str
    threads: int
    cores: int | None
    cpu_seconds: float


@dataclass
class Runner:
    """Does jobs one by one in this process, or several at once in processes of one thread."""

    processes: int = 1
    progress: bool = True
    title: str = "study"
    cpu: dict[int, float] = field(default_factory=dict)  # Seconds used so far by process id.
    began: float = field(default_factory=time.process_time)  # Of this process: what it did before is not counted.
    put_off: list[Job] = field(default_factory=list)  # Jobs that another program was met at.

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds that this process and its workers have used so far."""
        # Workers report theirs; that of this process is read now.
        return sum((self.cpu | {os.getpid(): time.process_time() - self.began}).values())

    @property
    def facts(self) -> Machine:
        """The machine, and the CPU time so far, for a study's record."""
        threads = timing_threads()
        cores = os.cpu_count()
        return {"torch": torch.__version__, "threads": threads, "cores": cores, "cpu_seconds": self.cpu_seconds}

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if self.progress:
            say(line)

    def run(self, jobs: Sequence[AnyJob], do: Callable[[AnyJob, Callback], Result]) -> Iterator[tuple[AnyJob, Result]]:
        """Do the jobs by `do`, which other processes get pickled, and yield every finished job with its result.

        Where another program does a job, `do` raises a LockedError: it is done again after the others.
        """
        layout = staged(self.title)
        work = sum(job.work for job in jobs)
        # One bar over all: its unit is expected work, since jobs differ in length.
        # What follows the last job says that all are done.
        with progress_bar(total=work, bar_format=layout, shown=self.progress, leave=False) as drawn:
            bar = _JobBar(jobs, drawn)
            if self.processes > 1:
                yield from self._side_by_side(jobs, do, bar)
                return
            waiting = list(range(len(jobs)))
            while waiting:
                index = _ready(jobs, waiting)[0]
                waiting.remove(index)
                bar.begin(index)
                try:
                    result = do(jobs[index], partial(bar.update, index))
                except LockedError as error:
                    waiting.append(index)
                    self._put_off(jobs[index], error)
                    continue
                bar.update(index, 1.0)
                yield jobs[index], result

    def _side_by_side(
        self, jobs: Sequence[AnyJob], do: Callable[[AnyJob, Callback], Result], bar: _JobBar
    ) -> Iterator[tuple[AnyJob, Result]]:
        # Spawned: a forked process of a program that has used torch's threads may hang.
        context = multiprocessing.get_context("spawn")
        reports: SimpleQueue[_Report] = context.SimpleQueue()
        before = set(multiprocessing.active_children())
        pool = ProcessPoolExecutor(self.processes, context, _start_worker, (reports,))

        running: dict[Future[Result], int] = {}
        waiting = list(range(len(jobs)))
        try:
            with heeding(Stop()) as stop:
                while waiting or running:
                    ready = _ready(jobs, waiting, running.values())
                    for index in ready[: self.processes - len(running)]:
                        waiting.remove(index)
                        running[pool.submit(_work, do, jobs[index], index)] = index
                        bar.begin(index)
                    # With a time limit, because reports and signals arrive while no job ends.
                    done, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
                    self._read_reports(reports, bar)
                    if stop.number:
                        self._pass_on(stop.number, pool, before)
                    for future in done:
                        index = running.pop(future)
                        try:
                            result = future.result()
                        except LockedError as error:
                            waiting.append(index)
                            self._put_off(jobs[index], error)
                            continue
                        bar.update(index, 1.0)
                        yield jobs[index], result
                # As the last result was taken, which may wait for another program.
                if stop.number:
                    self._pass_on(stop.number, pool, before)
        except BaseException:
            # Jobs can be resumed, so the others are not waited for.
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - before:
                process.terminate()
            raise
        pool.shutdown()

    def _put_off(self, job: Job, error: LockedError) -> None:
        """Say once which lock keeps a job waiting, and give it a moment."""
        if job not in self.put_off:
            self.say(f"{job}: {error}. Until then others go first")
            self.put_off.append(job)
        time.sleep(_PAUSE)

    def _pass_on(self, number: int, pool: ProcessPoolExecutor, before: set[BaseProcess]) -> NoReturn:
        """Pass a stop signal on to the workers, the processes that were not there before, and exit after them.

        Their runs save.
        """
        for worker in set(multiprocessing.active_children()) - before:
            if worker.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(worker.pid, number)
        pool.shutdown(cancel_futures=True)
        exit_after(number, f"{self.title}: {signal_name(number)}; runs are saved, and the same command goes on")

    def _read_reports(self, reports: SimpleQueue[_Report], bar: _JobBar) -> None:
        while not reports.empty():
            index, share, process, seconds = reports.get()
            self.cpu[process] = seconds
            bar.update(index, share)


def _ready(jobs: Sequence[Job], waiting: Sequence[int], running: Iterable[int] = ()) -> list[int]:
    """Return the waiting jobs that start from none which waits or runs."""
    unfinished = {(jobs[index].name, jobs[index].seed) for index in (*waiting, *running)}
    return [index for index in waiting if jobs[index].starts_from not in unfinished]


class _JobBar:
    """A bar over all jobs, weighed by their work; what was done by an earlier call does not count for the time left."""

    def __init__(self, jobs: Sequence[Job], bar: Bar) -> None:
        self.jobs = jobs
        self.bar = bar
        self.shares: dict[int, float] = {}
        self.begun: dict[int, float] = {}

    def begin(self, index: int) -> None:
        """Name the job that begins."""
        self.begun[index] = time.monotonic()
        self.bar.set_description_str(str(self.jobs[index]))

    def update(self, index: int, share: float) -> None:
        """Record the progress of a job."""
        if self.bar.disable:
            return
        before = self.shares.get(index, 0.0)
        done = self.jobs[index].work * max(0.0, share - before)
        # Sums of shares may end a rounding error above the total.
        done = min(done, self.bar.total - self.bar.n)
        # A job starts with what it reports first, and one that ends at once was read.
        is_old = index not in self.shares and (share < 1 or time.monotonic() - self.begun[index] < _AT_ONCE)
        self.shares[index] = max(share, before)
        if is_old:
            self.bar.n += done
            self.bar.last_print_n += done
            self.bar.initial += done
        else:
            self.bar.update(done)


# Of a worker: what takes its reports to the parent.
_reports: SimpleQueue[_Report]


def _start_worker(reports: SimpleQueue[_Report]) -> None:
    global _reports
    _reports = reports
    # The parent passes on a signal that a terminal, or a scheduler, may have sent to all processes.
    Stop.impatient = False
    # Outside of training a worker ends without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Leave no job behind when the parent is killed; it goes on from its last checkpoint."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(do: Callable[[AnyJob, Callback], Result], job: AnyJob, index: int) -> Result:
    def callback(share: float) -> None:
        _reports.put((index, share, os.getpid(), time.process_time()))

    result = do(job, callback)
    callback(1.0)
    return result
