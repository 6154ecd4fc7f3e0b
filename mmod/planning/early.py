"""Comparisons that stop early, for `mmod.advise`: only those that may be advised are evaluated on all samples.

Studies evaluate all candidates on all samples.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise

import numpy as np

from mmod.analysis.statistics import pareto_front, unbeaten
from mmod.analysis.table import DENSE, Look, Measured, Table, evaluated, gap
from mmod.analysis.timing import Times, ratios, relative_times
from mmod.planning.choice import NOISE, reaches

BATCH = "batch"
"""Name of the timed pass that decides."""
SHARES = 3
"""Decimals of a share that is shown in percent, with one."""
COSINES = 4
"""Decimals of a cosine: those of models that hardly differ from the dense one begin with 0.999."""


def look_at(names: Iterable[str], start: int, stop: int) -> list[Look]:
    """Return the evaluation of candidates on the samples from one to another."""
    return [Look(name=name, seed=0, part=range(start, stop), work=stop - start) for name in names]


def near_front(
    table: Table,
    names: Iterable[str],
    figure: str,
    first: int,
    times: Callable[[], tuple[Times[str], float]],
    decimals: int = SHARES,
) -> Iterator[list[Look]]:
    """Yield rounds of a comparison: all candidates on few samples, and on all samples those near the front.

    These are the ones that none as fast clearly beats, and then those of the front that have few samples.

    Args:
        table: Has the dense model on all samples, and gets the rows of each round before more is asked for.
        names: The candidates.
        figure: The outcome that decides who is better.
        first: Number of samples of the first look.
        times: Returns the times of all models once they have run, and `Table.waiting`.
        decimals: Those of the figure, as tables show it.
    """
    yield look_at(names, 0, first)
    table.times, table.waiting = times()
    samples = evaluated(table, DENSE)

    def looks(wanted: Iterable[str]) -> list[Look]:
        few = [name for name in wanted if evaluated(table, name) < samples]
        return list(chain.from_iterable(look_at([name], evaluated(table, name), samples) for name in few))

    ms = milliseconds(table, BATCH)
    leads = {name: _lead(table, figure, name) for name in ms}

    def is_better(one: str, other: str) -> bool:
        # On so few samples, many a mean is better by chance.
        difference = gap(table, figure, one, other)
        return leads[one] > leads[other] and difference is not None and difference.is_clear

    near = unbeaten(ms, is_better, tolerance=1.0)
    requested = looks(near) or looks(front_in(table, figure, decimals=decimals))
    while requested:
        yield requested
        # More samples may have taken from the front what had beaten others on few.
        requested = looks(front_in(table, figure, decimals=decimals))


def unclear_at(table: Table, series: Sequence[Sequence[str]], varying: Container[str], speed: float) -> Iterator[str]:
    """Yield the candidates of which few rounds do not say whether they are the first of their series at a speed.

    Args:
        varying: Candidates whose cost depends on the samples, of which few rounds read few.
    """
    ms = table.times[BATCH]
    for of_series in series:
        for name in of_series:
            spread = ratios(ms[DENSE], ms[name]).shown
            is_sure = reaches(spread.low, speed)
            if reaches(spread.high, speed) and (not is_sure or name in varying):
                yield name
            if is_sure:
                break


def for_speed(
    table: Table,
    series: Sequence[Sequence[str]],
    own: Sequence[str],
    figure: str,
    first: int,
    speed: float,
    order: Callable[[Table, str], tuple[float, float]],
) -> Iterator[list[Look]]:
    """Yield rounds of a comparison for a wanted speed-up, in which each step leaves fewer candidates.

    The first of each series that reaches the speed is evaluated on few samples, as smaller ones mostly lose more; if
    none reaches it, the fastest of all is. Then the best one, ranked as if all samples were like those that it has,
    gets twice as many, until the best one has all. Unless that clearly loses, the next smaller one of its series is
    evaluated too, and so is that of each tie.

    Args:
        table: Has the dense model on all samples and the times of all, and gets the rows of each round before more is
            asked for.
        series: Names of candidates by series, the largest first.
        own: The user's models, of a series or controls, which are evaluated on few samples in any case.
        figure: The outcome that decides who is better.
        first: Number of samples of the first look.
        speed: The speed-up that is wanted.
        order: Ranks a candidate by its rows in a table: the answer has the least value, see `AdviceRow.order`.
    """
    speedups = _speedups(table)
    reaching = [next((name for name in of_series if reaches(speedups[name], speed)), None) for of_series in series]
    chosen = [name for name in reaching if name is not None]
    chosen = chosen or sorted(chain(*series), key=speedups.__getitem__)[-1:]
    samples = evaluated(table, DENSE)

    def rank(name: str) -> tuple[float, float]:
        return order(_repeated(table, name, samples), name)

    yield look_at(dict.fromkeys([*chosen, *own]), 0, first)
    ranks = {name: rank(name) for name in chosen}
    while ranks:
        answer = min(ranks, key=ranks.__getitem__)
        few = evaluated(table, answer)
        if few < samples:
            # Twice as many each time: what was lucky on few is left before it costs all.
            yield look_at([answer], few, min(2 * few, samples))
            ranks[answer] = rank(answer)
            continue
        difference = gap(table, figure, answer, DENSE)
        if difference is not None and difference.high < 0:
            # It clearly loses, and so does what is smaller.
            return
        loss, _ = ranks[answer]
        tied = {name for name, (worst, _) in ranks.items() if worst == loss}
        followers = [smaller for larger, smaller in chain.from_iterable(map(pairwise, series)) if larger in tied]
        smaller = [name for name in followers if name not in ranks and reaches(speedups[name], speed)]
        if not smaller:
            return
        yield look_at(smaller, 0, first)
        ranks |= {name: rank(name) for name in smaller}


def _repeated(table: Table, name: str, samples: int) -> Table:
    """Return the rows of a candidate and the dense model if all samples were like those that the candidate has.

    Intervals over few samples are wide: so they can be compared with those over all. The samples are repeated whole, so
    that the mean is theirs, and no candidate looks worse than on these alone.
    """
    repeated = Table(times=table.times)
    few = evaluated(table, name)
    times = -(-samples // few)
    for one in (DENSE, name):
        columns = table.runs[one][0].outcomes
        outcomes = {column: np.concatenate([values[:few]] * times) for column, values in columns.items()}
        repeated.add(one, 0, Measured({}, samples=times * few, outcomes=outcomes))
    return repeated


def _speedups(table: Table) -> dict[str, float]:
    """Return the speed-ups of batches as tables show them."""
    ms = milliseconds(table, BATCH)
    return {name: round(ms[DENSE] / own, 2) for name, own in ms.items()}


def milliseconds(table: Table, of: str) -> dict[str, float]:
    """Return the milliseconds of every candidate in a pass, as compared with the dense model round by round."""
    return {name: ms for name, (ms, _) in relative_times(table.times[of], DENSE).items()}


def front_in(table: Table, figure: str, leave_out: Container[str] = (), decimals: int = SHARES) -> list[str]:
    """Return the candidates on the Pareto front of a figure and the time of a pass.

    Args:
        leave_out: Candidates that are as if they had not been measured.
        decimals: Those of the figure, as tables show it.
    """
    speedups = {name: speedup for name, speedup in _speedups(table).items() if name not in leave_out}
    return shown_front(speedups, {name: _lead(table, figure, name) for name in speedups}, decimals)


def _lead(table: Table, figure: str, name: str) -> float:
    """Return the mean difference of a candidate's figure to the dense model's, on the samples of the candidate.

    The dense model has all samples, and others may be harder than the first: means of unequal samples say nothing.
    """
    own_N = table.runs[name][0].outcomes[figure]
    dense_N = table.runs[DENSE][0].outcomes[figure]
    return float(np.mean(own_N - dense_N[: len(own_N)]))


def shown_front(speedups: Mapping[str, float], scores: Mapping[str, float], decimals: int = SHARES) -> list[str]:
    """Return the names on the Pareto front of figures as tables show them: no row that looks beaten is on it.

    What is hardly faster than the dense model is of no use, whatever it scores.
    """
    shown = {name: round(speedup, 2) for name, speedup in speedups.items()}
    costs = {name: -speedup for name, speedup in shown.items() if name == DENSE or speedup >= NOISE}
    return pareto_front(costs, {name: round(scores[name], decimals) for name in costs})
