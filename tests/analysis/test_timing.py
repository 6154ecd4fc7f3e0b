"""Times of candidates: interleaved, and as milliseconds of a sample and speed-ups."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mmod.analysis import timing
from mmod.analysis.table import DENSE, Table
from mmod.analysis.timing import Reading, reading_of, sample_times, times_once
from mmod.io.store import STORE, Store


def test_all_models_and_passes_are_timed_in_turns() -> None:
    calls: list[tuple[str, int]] = []

    def reading(name: str, size: int) -> Reading:
        return Reading([lambda: calls.append((name, size))], size)

    readings = {name: {("image", size): reading(name, size) for size in (1, 8)} for name in (DENSE, "a", "b")}
    ms = sample_times(readings, rounds=range(3), device=torch.device("cpu"))
    assert set(ms) == {("image", 1), ("image", 8)}
    assert all(set(by_model) == set(readings) for by_model in ms.values())
    assert all(len(by_round) == 3 for by_model in ms.values() for by_round in by_model.values())
    # Every round, and the one before them, calls each pass of each model once.
    everything = sorted((name, size) for name in readings for size in (1, 8))
    assert all(sorted(calls[start : start + 6]) == everything for start in range(0, 24, 6))


@pytest.mark.parametrize("first", [0, 1, 4])
def test_each_round_reads_the_next_draw(first: int) -> None:
    read: list[int] = []
    reading = reading_of(read.append, [[0, 1], [2, 3], [4, 5]], samples=2)
    sample_times({DENSE: {"image": reading}}, rounds=range(first, first + 4), device=torch.device("cpu"), warmup=0)
    draws = [number % 3 for number in range(first, first + 4)]
    assert read == [2 * draw + position for draw in draws for position in (0, 1)]


def test_times_are_of_a_sample_and_each_round_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {("dense", ("image", 2)): [4.0, 8.0, 4.0], ("a", ("image", 2)): [2.0, 4.0, 9.0]}
    made: list[str] = []

    def interleave(calls: Any, *, rounds: int, warmup: int, seed: int, **_: Any) -> Any:
        if seed in killed:
            raise KeyboardInterrupt
        measured.append((seed, warmup))
        return {key: [taken[key][seed]] for key in calls}

    def readings() -> dict[str, dict[tuple[str, int], Reading]]:
        made.append("")
        return {"dense": {("image", 2): Reading([lambda: None], 2)}, "a": {("image", 2): Reading([lambda: None], 4)}}

    def timed(rounds: int = 3, **identity: str) -> timing.Times[tuple[str, int]]:
        store = Store(tmp_path / STORE)
        times, waiting = times_once(store, identity, readings, torch.device("meta"), rounds=range(rounds))
        assert waiting == 1
        return times

    monkeypatch.setattr(timing, "interleave", interleave)
    killed, measured = {1}, list[tuple[int, int]]()
    with pytest.raises(KeyboardInterrupt):
        timed(models="both")
    killed.clear()
    expected = {("image", 2): {"dense": [2.0, 4.0, 2.0], "a": [0.5, 1.0, 2.25]}}
    assert timed(models="both") == timed(models="both") == expected
    # The first round was kept; each call warms up once, before its first round, unless it times a CPU.
    assert measured == [(0, 1), (1, 1), (2, 0)]
    assert len(made) == 2
    assert timed(rounds=1, models="both") == {("image", 2): {"dense": [2.0], "a": [0.5]}}
    # Times beside other candidates are of other turns.
    assert timed(models="others") == expected
    assert len(made) == 3


@pytest.mark.parametrize("waiting", [1.0, 1.9])
@pytest.mark.parametrize("scatter", [0.0, 0.05, 0.4])
def test_a_busy_machine_and_rounds_that_scatter_are_told(waiting: float, scatter: float) -> None:
    rounds = [2.0, 2.0 * (1 - scatter), 2.0, 2.0 * (1 + scatter), 2.0 * (1 - scatter), 2.0 * (1 + scatter)]
    caution = timing.timing_caution({"batch": {DENSE: [4.0] * 6, "a": rounds}}, waiting, DENSE)
    assert ("the machine was busy, and passes took 1.9 times" in caution) == (waiting > 1.25)
    assert ("rounds scatter" in caution) == (scatter > 0.1)
    assert bool(caution) == (waiting > 1.25 or scatter > 0.1)
    table = Table(times={"batch": {DENSE: [4.0] * 6, "a": [2.0] * 6}, "alone": {DENSE: [4.0] * 6, "a": rounds}})
    assert table.scatters("a") == (scatter > 0.1)


def test_a_pass_that_waits_is_no_pass_that_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of several threads it is not known.
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    readings = {DENSE: {"batch": Reading([lambda: time.sleep(0.06)], 1)}}
    store = Store(tmp_path / STORE)
    first = times_once(store, {}, lambda: readings, torch.device("cpu"), rounds=range(2))
    assert first[1] > 1.25
    # The rounds keep it: what is read again is as uncertain.
    assert times_once(Store(tmp_path / STORE), {}, lambda: readings, torch.device("cpu"), rounds=range(2)) == first
