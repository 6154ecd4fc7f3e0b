"""The table of a comparison: `compare` fills it, and all else is read from it, such as differences with intervals.

Axes: N samples, S weightings of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from statistics import mean, stdev
from typing import Any, Generic, NamedTuple

import numpy as np
from typing_extensions import TypeVar

from mmod.analysis.statistics import (
    FEWEST,
    ROUNDING,
    Estimate,
    Resampling,
    change_of,
    difference,
    estimate_of,
    share_of,
)
from mmod.analysis.timing import SCATTER, ratios, timing_caution
from mmod.io.jobs import AnyJob, Callback, Job, Runner
from mmod.io.store import Store

# What a job reads of the samples.
Part = TypeVar("Part", default=range)
DENSE = "dense"
"""Name of the candidate that all others are compared with."""
_DRAWS = 2000
Weigh = Callable[[Mapping[str, np.ndarray], np.ndarray], np.ndarray]
"""From outcomes of samples by column, (N, ...) each, and weightings of the samples (S, N), each with sum 1, to a figure
under each of them (S,)."""
Partners = Mapping[str, str | None]
"""The candidate that each candidate is compared with, by name."""


class Measured(NamedTuple):
    """The rows of one candidate and seed.

    Attributes:
        figures: Figures of all samples together, by name.
        kept: Mean kept share of tokens by module that decides.
        samples: Number of samples.
        skipped: Number of samples that could not be read.
        outcomes: Columns of the samples (N, ...), where these are compared one by one. The mean of a column with the
            name of a figure is that figure as a share; figures are in percent.
        text: The figures as a line for the terminal.
    """

    figures: Mapping[str, float]
    kept: Mapping[str, float] = {}
    samples: int = 0
    skipped: int = 0
    outcomes: Mapping[str, np.ndarray] = {}
    text: str = ""


@dataclass
class Table:
    """What was measured of candidates.

    Figures that samples have outcomes of are paired by sample, all others by seed: so are models that were trained with
    several seeds, which differ in more than their samples.

    Attributes:
        runs: Rows by candidate and seed.
        times: Milliseconds of a sample by pass, candidate and round, measured in turns.
        costs: FLOPs and memory of a sample, by candidate.
        rates: The best factor of the learning rate by candidate, where several were tried.
        weigh: Figures that are no means of a column, and how they follow from the outcomes of weighted samples.
        waiting: Seconds that timed rounds took for each second of computing, see `times_once`.
    """

    runs: dict[str, dict[int, Measured]] = field(default_factory=dict)
    times: dict[Any, dict[str, list[float]]] = field(default_factory=dict)
    costs: dict[str, dict[str, float]] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    weigh: Mapping[str, Weigh] = field(default_factory=dict)
    waiting: float = 1.0

    def add(self, name: str, seed: int, rows: Measured) -> None:
        """Add the rows of a candidate and seed; outcomes and kept shares join those of samples before."""
        by_seed = self.runs.setdefault(name, {})
        before = by_seed.get(seed)
        if before is not None and rows.outcomes:
            joined = {
                column: np.concatenate([before.outcomes[column], values]) for column, values in rows.outcomes.items()
            }
            samples = before.samples + rows.samples
            kept = {}
            for place, share in rows.kept.items():
                kept[place] = (before.samples * before.kept[place] + rows.samples * share) / samples
            rows = rows._replace(samples=samples, outcomes=joined, kept=kept)
        by_seed[seed] = rows

    def figures(self, name: str) -> dict[int, Mapping[str, float]]:
        """Return all figures of a candidate by seed."""
        return {seed: rows.figures for seed, rows in sorted(self.runs[name].items())}

    def add_rounds(self, times: Mapping[Any, Mapping[str, list[float]]]) -> None:
        """Append further rounds of the dense model and of some candidates to those of all."""
        for of, by_name in times.items():
            for name, ms in by_name.items():
                self.times[of][name] = [*self.times[of][name], *ms]

    def scatters(self, name: str) -> bool:
        """Return whether the speed-ups of a candidate scatter from round to round, in any pass."""
        return any(ratios(ms[DENSE], ms[name]).scatter > SCATTER for ms in self.times.values())

    @property
    def caution(self) -> str:
        """A sentence on what makes its speed-ups uncertain, see `timing_caution`; empty for nothing."""
        return timing_caution(self.times, self.waiting, DENSE)


@dataclass(frozen=True, kw_only=True)
class Look(Job, Generic[Part]):
    """The evaluation of a candidate on a part of the samples."""

    part: Part

    def __str__(self) -> str:
        return self.name


def compare(
    table: Table,
    rounds: Iterable[Sequence[AnyJob]],
    measure: Callable[[AnyJob, Callback], Measured | None],
    runner: Runner,
) -> Iterator[AnyJob]:
    """Do jobs, each with a candidate, a seed and perhaps a part of the samples, and yield it once its rows are there.

    A stopped comparison resumes if `measure` keeps rows in a store, see `rows_once`, or in the folder of a run. The
    jobs of candidates that a training config describes are those of a `mmod.studies.runs.Comparison`; others are models
    in memory, of which the rows so far may decide who is measured next.

    Args:
        table: Gets the rows of every job.
        rounds: Jobs that are done together. Rounds may be made by a rule that reads the table before it asks for more,
            and so stops early.
        measure: Returns the rows of a job; None of one that others start from, and nothing is compared with.
    """
    for jobs in rounds:
        for job, rows in runner.run(jobs, measure):
            if rows is not None:
                table.add(job.name, job.seed, rows)
                yield job


def fill(
    table: Table,
    rounds: Iterable[Sequence[AnyJob]],
    measure: Callable[[AnyJob, Callback], Measured | None],
    runner: Runner,
) -> None:
    """Do all jobs, see `compare`."""
    for _ in compare(table, rounds, measure, runner):
        pass


def rows_once(store: Store, identity: Mapping[str, object], measure: Callable[[], Measured]) -> Measured:
    """Return rows from a store, and measure them if they are not there."""
    return Measured(**store.once(identity, lambda: measure()._asdict()))


def evaluated(table: Table, name: str) -> int:
    """Return the number of samples of a candidate; 0 before it is measured."""
    if name not in table.runs:
        return 0
    return _rows(table, name).samples


def by_seed(table: Table, figure: str, name: str) -> dict[int, float]:
    """Return a figure of a candidate by seed; none before it is measured."""
    return {seed: _value(rows, figure) for seed, rows in sorted(table.runs.get(name, {}).items())}


def mean_of(table: Table, figure: str, name: str) -> float:
    """Return the mean over seeds of a candidate's figure."""
    return mean(by_seed(table, figure, name).values())


def interval_of(table: Table, figure: str, name: str) -> Estimate:
    """Return the mean of an outcome, with its interval over samples."""
    outcome_N = _outcomes(table, name)[figure]
    if {0, 1}.issuperset(outcome_N) or _are_equal_shares(outcome_N):
        return share_of(outcome_N)
    return _bootstrapped(outcome_N)


def gap(table: Table, figure: str, name: str, other: str | None) -> Estimate | None:
    """Return the difference of a candidate's figure to another's, with its interval.

    Returns:
        None without another candidate, or where it shares no seed or sample yet.

    Example:
        >>> table = Table()
        >>> for name, values in {"dense": [95.0, 94.0, 96.0], "a": [94.0, 93.2, 94.8]}.items():
        ...     for seed, value in enumerate(values):
        ...         table.add(name, seed, Measured({"top1": value}))
        >>> print(gap(table, "top1", "a", "dense"), gap(table, "top1", "a", None))
        -1.0 [-1.5, -0.5] None
        >>> table.add("b", 0, Measured({}, outcomes={"right": np.ones(64)}))
        >>> table.add("c", 0, Measured({}, outcomes={"right": np.eye(1, 64, 3)[0]}))
        >>> print(interval_of(table, "right", "b"), gap(table, "right", "c", "b"))
        1.0 [0.9, 1.0] -1.0 [-1.0, -0.9]
    """
    if other is None or other == name or other not in table.runs:
        return None
    if not paired_by_sample(table, figure, (name, other)):
        values = by_seed(table, figure, name)
        others = by_seed(table, figure, other)
        if not set(values) & set(others):
            return None
        return difference(values, others)
    one_outcomes = _outcomes(table, name)
    other_outcomes = _outcomes(table, other)
    # Candidates may be evaluated on the first samples alone.
    count = min(sample_count(one_outcomes), sample_count(other_outcomes))
    if not count:
        return None
    if figure not in one_outcomes:
        weigh = table.weigh[figure]
        one_columns = {column: value_N[:count] for column, value_N in one_outcomes.items()}
        other_columns = {column: value_N[:count] for column, value_N in other_outcomes.items()}

        def weighed_gap(weight_SN: np.ndarray) -> np.ndarray:
            return weigh(one_columns, weight_SN) - weigh(other_columns, weight_SN)

        return _resampling(count, _DRAWS).of(weighed_gap)
    change = _change(one_outcomes[figure][:count], other_outcomes[figure][:count])
    # Outcomes are shares, and figures of their names in percent.
    is_in_percent = figure in _rows(table, name).figures
    if not is_in_percent:
        return change
    return dataclasses.replace(100 * change, seeds=1)


def gain(table: Table, figure: str, before: str, name: str) -> Estimate | None:
    """Return by how much a figure of a candidate exceeds another one of the same runs, with its interval.

    None where the candidate does not have both.
    """
    earlier = {seed: row[before] for seed, row in table.figures(name).items() if before in row}
    if not earlier:
        return None
    outcomes = _outcomes(table, name)
    if len(earlier) > 1 or figure not in outcomes or before not in outcomes:
        return difference(by_seed(table, figure, name), earlier)
    change = _change(outcomes[figure], outcomes[before])
    return dataclasses.replace(100 * change, seeds=1)


def paired_by_sample(table: Table, figure: str, names: Iterable[str]) -> bool:
    """Return whether candidates are paired by sample: they have one seed, and outcomes that the figure follows from."""
    # While a study runs, one model may have one seed so far and another model another.
    seeds: set[int] = set()
    for name in names:
        seeds |= set(table.runs[name])
        outcomes = _outcomes(table, name)
        is_known = figure in outcomes or (figure in table.weigh and bool(outcomes))
        if not is_known or len(seeds) > 1:
            return False
    return True


def gaps(table: Table, figure: str, partners: Partners) -> dict[str, Estimate | None]:
    """Return the difference of each candidate to its partner, see `gap`."""
    return {name: gap(table, figure, name, partner) for name, partner in partners.items()}


def best(table: Table, figure: str, names: Iterable[str]) -> str | None:
    """Return the candidate with the best mean: the first of ties, or None without candidates."""
    return max(names, key=lambda name: mean_of(table, figure, name), default=None)


def close_groups(table: Table, figure: str, names: Sequence[str]) -> list[list[str]]:
    """Return groups of candidates without a significant difference, such that each such pair stands in one of them."""
    near: dict[str, set[str]] = {}
    for name in names:
        differences = gaps(table, figure, dict.fromkeys(names, name))
        near[name] = {other for other, value in differences.items() if value is None or not value.is_clear}
    # Each unclear pair that no group holds yet begins one, which takes in all that are near its members.
    groups: list[list[str]] = []
    for one, two in combinations(names, 2):
        if two not in near[one] or any({one, two} <= set(group) for group in groups):
            continue
        group = [one, two]
        for name in names:
            if name not in group and near[name].issuperset(group):
                group.append(name)
        groups.append([name for name in names if name in group])
    return groups


def means_over_seeds(figures: Mapping[int, Mapping[str, float]]) -> dict[str, float | None]:
    """Return the mean `x` and standard deviation `x_std` of every figure by seed; None is that of a single seed."""
    columns: dict[str, float | None] = {}
    for name in dict.fromkeys(chain.from_iterable(figures.values())):
        in_order = [by_name for _, by_name in sorted(figures.items())]
        values = [by_name[name] for by_name in in_order if name in by_name]
        columns[name] = mean(values)
        columns[f"{name}_std"] = stdev(values) if len(values) > 1 else None
    return columns


def _value(rows: Measured, figure: str) -> float:
    if figure in rows.figures:
        return rows.figures[figure]
    return float(rows.outcomes[figure].mean(dtype=np.float64))


def _rows(table: Table, name: str) -> Measured:
    """Return the rows of the seed of a candidate that ended first."""
    return next(iter(table.runs[name].values()))


def mean_outcomes(table: Table, name: str) -> dict[str, np.ndarray]:
    """Return the outcomes of a candidate's samples, means over its seeds."""
    runs = [rows.outcomes for rows in table.runs[name].values()]
    if len(runs) == 1:
        return dict(runs[0])
    means = {}
    for column in runs[0]:
        means[column] = np.mean([outcomes[column] for outcomes in runs], axis=0)
    return means


def _outcomes(table: Table, name: str) -> Mapping[str, np.ndarray]:
    return _rows(table, name).outcomes


def sample_count(outcomes: Mapping[str, np.ndarray]) -> int:
    """Return the number of samples whose outcomes are there, by the score."""
    some_N = next(iter(outcomes.values()))
    return len(some_N)


def _change(outcome_N: np.ndarray, other_N: np.ndarray) -> Estimate:
    """Return the mean change from other outcomes, with an interval that ends where all or none are right."""
    # In single precision a tie, such as -1.25 points, is rounded one way here and another there.
    change_N = np.subtract(outcome_N, other_N, dtype=np.float64)
    if not ({-1, 0, 1}.issuperset(change_N) or _are_equal_shares(abs(change_N))):
        return _bootstrapped(change_N)
    change = change_of(change_N)
    if not {0, 1}.issuperset(other_N):
        return change
    right = share_of(other_N)
    # The interval is symmetric, and would promise more than all to a model that is right on all.
    least = most = right.value
    if 0 < right.value < 1:
        # On other samples the other model may be right more often, so that more can be lost than it has on these.
        least = right.low
        most = right.high
    low = max(change.low, 0.0 - most)
    high = min(change.high, 1 - least)
    return dataclasses.replace(change, low=low, high=high)


def _are_equal_shares(value_N: np.ndarray) -> bool:
    """Return whether several samples have the same share, to rounding: the bootstrap would be sure of it."""
    are_equal = len(value_N) > 1 and float(np.ptp(value_N)) < ROUNDING
    return are_equal and 0 <= value_N[0] <= 1


def _bootstrapped(value_N: np.ndarray) -> Estimate:
    value = float(value_N.mean())
    if len(value_N) < FEWEST:
        return Estimate(value)
    means_SC = _resampling(len(value_N), _DRAWS).means(value_N[:, None])
    return estimate_of(value, means_SC[:, 0])


# The same draws for all differences of a table.
_resampling = functools.lru_cache(maxsize=1)(Resampling)
