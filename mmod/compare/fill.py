"""How a table is filled: jobs give rows of candidates, all are timed in turns, and some get more samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mmod.compare.table import Measured, Table
from mmod.compare.times import Times
from mmod.io.jobs import AnyJob, Callback, Runner
from mmod.io.store import Store


def fill(
    table: Table,
    jobs: Sequence[AnyJob],
    measure: Callable[[AnyJob, Callback], Measured],
    runner: Runner,
    *,
    after: Callable[[AnyJob], None] = lambda job: None,
    time: Callable[[], Times[Any]] = dict,
    more: Callable[[Table], Sequence[AnyJob]] = lambda table: (),
) -> None:
    """Fill a table with the rows of jobs, then with times, then with the rows of further jobs until there are none.

    Args:
        jobs: One for each candidate and seed, by whose name and seed the table knows its rows.
        measure: Returns the rows of a job, once (`measured_once`), so that a stopped comparison resumes; other
            processes get it pickled.
        after: Called with each job once its rows are in the table.
        time: Returns the times of all candidates, measured while nothing else runs.
        more: Returns the jobs that the rows and times so far ask for, such as further samples of good candidates.
    """
    _fill(table, jobs, measure, runner, after)
    table.times = time()
    while jobs := more(table):
        _fill(table, jobs, measure, runner, after)


def _fill(
    table: Table,
    jobs: Sequence[AnyJob],
    measure: Callable[[AnyJob, Callback], Measured],
    runner: Runner,
    after: Callable[[AnyJob], None],
) -> None:
    for job, rows in runner.run(jobs, measure):
        table.add(job.name, job.seed, rows)
        after(job)


def measured_once(store: Store, identity: Mapping[str, object], measure: Callable[[], Measured]) -> Measured:
    """Return rows from a store, and measure them if they are not there."""
    return Measured(**store.once(identity, lambda: measure()._asdict()))
