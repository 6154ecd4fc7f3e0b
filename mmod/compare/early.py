"""A comparison that stops early: most candidates are evaluated on few samples alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from mmod.analysis.timing import relative_times
from mmod.compare.table import DENSE, Measured, Table, evaluated, mean_of, measure_jobs, unbeaten
from mmod.io.jobs import Callback, Job, Runner

BATCH = "batch"
"""Name of the timed pass that decides."""
# A candidate is dropped after the first look if another one is as fast and scores more by this share.
_SLACK = 0.02


def compare_early(
    table: Table,
    names: Iterable[str],
    evaluate: Callable[[str, int, int], Measured],
    time: Callable[[], dict[str, dict[str, list[float]]]],
    figure: str,
    first: int,
    *,
    progress: bool,
) -> None:
    """Evaluate all candidates on few samples, and those near the Pareto front on all that the dense model has.

    Args:
        table: Rows of the dense model; rows of the others and times join them.
        names: The others.
        evaluate: Returns the rows of a candidate by name, from one sample to another.
        time: Returns the milliseconds of all by pass, name and round, which are measured between the two looks; `BATCH`
            decides.
        figure: The outcome that decides who is better.
        first: Samples of the first look.
    """
    total = evaluated(table, DENSE)
    runner = Runner(progress=progress, title="advise", leave=False)

    def look(names: Iterable[str], stop: int) -> None:
        def measure(job: Job[None], callback: Callback) -> Measured:
            return evaluate(job.name, evaluated(table, job.name), stop)

        jobs = [Job(name, 0, None) for name in names if evaluated(table, name) < stop]
        for _ in measure_jobs(table, jobs, measure, runner):
            pass

    look(names, first)
    table.times = time()
    ms = milliseconds(table, BATCH)
    # Evaluated before any gets more samples: a score of more would not compare.
    means = {name: mean_of(table, figure, name) for name in ms}
    near = unbeaten(ms, lambda one, other: means[one] > means[other] + _SLACK, tolerance=1.0)
    while near:
        look(near, total)
        # More samples may have taken from the front what had beaten others on few.
        near = [name for name in front_of(table, figure, ms) if evaluated(table, name) < total]


def milliseconds(table: Table, of: str) -> dict[str, float]:
    """Return the milliseconds of every candidate in a pass, as compared with the dense model round by round."""
    return {name: ms for name, (ms, _) in relative_times(table.times[of], DENSE).items()}


def front_of(table: Table, figure: str, ms: Mapping[str, float]) -> list[str]:
    """Return the candidates than which none that is as fast scores more, or as much in less time."""

    def is_better(one: str, other: str) -> bool:
        gain = mean_of(table, figure, one) - mean_of(table, figure, other)
        return gain > 0 or (gain == 0 and ms[one] < ms[other])

    return unbeaten(ms, is_better, tolerance=1.0)
