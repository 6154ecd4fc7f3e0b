"""The runs of a study or benchmark, one by one or in parallel processes, and the search for their learning rates."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from mmod.io.progress import progress_bar, say
from mmod.studies.config import PlanOptions
from mmod.studies.threads import timing_threads

Config = TypeVar("Config")
Result = TypeVar("Result")
Tick = Callable[[float], None]
"""Receives the progress of a run, from 0 to 1."""


class Search(NamedTuple):
    """How the routing of a run is searched before it starts, and the folder of the search."""

    options: PlanOptions
    folder: Path


@dataclass(frozen=True)
class Job(Generic[Config]):
    """One run: the training or evaluation of a model, or a measurement, which has no config."""

    name: str
    seed: int
    config: Config
    is_tuned: bool = False  # It starts from the dense model's weights.
    is_trained: bool = True
    work: float = 1.0  # Expected duration, in any unit that all runs share.
    search: Search | None = None

    def __str__(self) -> str:
        return self.name if self.config is None else f"{self.name}, seed {self.seed}"


# Does one run and reports its progress.
Do = Callable[[Job[Config], Tick], Result]
# Name of a model, and the factor of its learning rate.
Trial = tuple[str, float]


@dataclass
class Runner:
    """Does the runs of a study or benchmark, one by one in this process or several in processes of one thread."""

    processes: int = 1
    progress: bool = True
    title: str = "study"
    cpu: dict[int, float] = field(default_factory=dict)  # Seconds used so far by process id.

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds that this process and its workers have used so far."""
        return sum((self.cpu | {os.getpid(): time.process_time()}).values())

    @property
    def facts(self) -> dict[str, Any]:
        """The machine, and the CPU time so far, for a study's record."""
        machine = {"torch": torch.__version__, "threads": timing_threads(), "cores": os.cpu_count()}
        return {**machine, "cpu_seconds": self.cpu_seconds}

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if self.progress:
            say(line)

    def run(self, jobs: Sequence[Job[Config]], do: Do[Config, Result]) -> Iterator[tuple[Job[Config], Result]]:
        """Do the runs by `do`, which other processes get pickled, and yield every finished run with its result."""
        layout = f"{self.title}: {{percentage:.0f}} % |{{bar}}| {{desc}}, {{remaining}} left"
        work = sum(job.work for job in jobs)
        with progress_bar(total=work, bar_format=layout, shown=self.progress) as drawn:
            bar = _Bar(jobs, drawn)
            if self.processes > 1:
                yield from self._side_by_side(jobs, do, bar)
                return
            for index, job in enumerate(jobs):
                bar.begin(index)
                result = do(job, partial(bar.update, index))
                bar.update(index, 1.0)
                yield job, result

    def _side_by_side(
        self, jobs: Sequence[Job[Config]], do: Do[Config, Result], bar: _Bar
    ) -> Iterator[tuple[Job[Config], Result]]:
        context = multiprocessing.get_context("spawn")
        reports = context.SimpleQueue()
        before = multiprocessing.active_children()
        pool = ProcessPoolExecutor(self.processes, context, _start_worker, (reports,))
        # All runs of a seed wait for its first, from whose weights they start.
        first = {job.seed: index for index, job in reversed(list(enumerate(jobs)))}
        running: dict[Future[Result], int] = {}
        waiting, finished = list(range(len(jobs))), set[int]()
        try:
            while waiting or running:
                ready = [i for i in waiting if i == first[jobs[i].seed] or first[jobs[i].seed] in finished]
                for index in ready[: self.processes - len(running)]:
                    waiting.remove(index)
                    running[pool.submit(_work, do, jobs[index], index)] = index
                    bar.begin(index)
                done, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
                self._read(reports, bar)
                for future in done:
                    index = running.pop(future)
                    finished.add(index)
                    result = future.result()
                    bar.update(index, 1.0)
                    yield jobs[index], result
        except BaseException:
            # Runs can be resumed, so the others are not waited for.
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - set(before):
                process.terminate()
            raise
        pool.shutdown()

    def _read(self, reports: Any, bar: _Bar) -> None:
        while not reports.empty():
            index, share, process, seconds = reports.get()
            self.cpu[process] = seconds
            bar.update(index, share)


class _Bar:
    """A bar over all runs, weighed by their work."""

    def __init__(self, jobs: Sequence[Job[Any]], bar: Any) -> None:
        self.jobs, self.bar, self.shares = jobs, bar, [0.0] * len(jobs)

    def begin(self, index: int) -> None:
        """Name the run that begins."""
        self.bar.set_description_str(str(self.jobs[index]))

    def update(self, index: int, share: float) -> None:
        """Record the progress of a run."""
        done = self.jobs[index].work * max(0.0, share - self.shares[index])
        # Sums of shares may end a rounding error above the total.
        self.bar.update(min(done, self.bar.total - self.bar.n))
        self.shares[index] = max(share, self.shares[index])


_reports: Any = None


def _start_worker(reports: Any) -> None:
    global _reports
    _reports = reports
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Leave no run behind when the study is killed; it goes on from its last checkpoint."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(do: Do[Config, Result], job: Job[Config], index: int) -> Result:
    def tick(share: float) -> None:
        _reports.put((index, share, os.getpid(), time.process_time()))

    result = do(job, tick)
    tick(1.0)
    return result


def starts_others(first: Job[Any]) -> bool:
    """Return whether the first run of a study trains the dense model that others start from."""
    return first.is_trained and not first.is_tuned


def trials(jobs: Sequence[Job[Any]], rates: Sequence[float], split: str, folder: str) -> dict[Trial, Job[Any]]:
    """Return the runs that try factors of the learning rate, evaluated on a split, for the first seed's models."""
    by_trial = {}
    # A first run that others start from comes before all trials.
    for job in jobs[1:] if starts_others(jobs[0]) else jobs:
        if job.seed == 0 and job.is_trained:
            data = dataclasses.replace(job.config.data, val_split=split)
            for rate in rates:
                output = f"{folder}/{job.name}-{rate:g}"
                config = dataclasses.replace(with_rate(job.config, rate), data=data, output=output)
                by_trial[job.name, rate] = dataclasses.replace(job, config=config)
    return by_trial


def try_rates(
    runner: Runner, by_trial: Mapping[Trial, Job[Any]], do: Do[Any, float], before: Sequence[Job[Any]] = ()
) -> dict[Trial, float]:
    """Return the score of every trial, after runs that the trials start from."""
    scores = {job.config.output: score for job, score in runner.run([*before, *by_trial.values()], do)}
    return {trial: scores[job.config.output] for trial, job in by_trial.items()}


def best_rates(scores: Mapping[Trial, float]) -> dict[str, float]:
    """Return the best factor of every model by name, the first of equal ones."""
    best: dict[str, float] = {}
    for (name, rate), score in scores.items():
        if name not in best or score > scores[name, best[name]]:
            best[name] = rate
    return best


def with_rate(config: Any, rate: float) -> Any:
    """Return a config with its learning rate multiplied."""
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=rate * config.optim.lr))
