"""Times of candidates: interleaved, and as milliseconds of a sample and speed-ups."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmod.analysis.timing import Reading
from mmod.compare import times
from mmod.compare.table import DENSE
from mmod.compare.times import sample_times, times_once
from mmod.io.store import STORE, Store


def test_all_models_and_passes_are_timed_in_turns() -> None:
    calls: list[tuple[str, int]] = []

    def reading(name: str, size: int) -> Reading:
        return Reading(lambda: calls.append((name, size)), size)

    readings = {name: {("image", size): reading(name, size) for size in (1, 8)} for name in (DENSE, "a", "b")}
    ms = sample_times(readings, rounds=3, device=torch.device("cpu"), warmup=1)
    assert set(ms) == {("image", 1), ("image", 8)}
    assert all(set(by_model) == set(readings) for by_model in ms.values())
    assert all(len(by_round) == 3 for by_model in ms.values() for by_round in by_model.values())
    # Every round, and the one before them, calls each pass of each model once.
    everything = sorted((name, size) for name in readings for size in (1, 8))
    assert all(sorted(calls[start : start + 6]) == everything for start in range(0, 24, 6))


def test_times_are_of_a_sample_and_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {("dense", ("image", 2)): [4.0, 8.0, 4.0], ("a", ("image", 2)): [2.0, 4.0, 9.0]}
    monkeypatch.setattr(times, "interleave", lambda calls, **_: {key: taken[key] for key in calls})
    made: list[str] = []

    def readings() -> dict[str, dict[tuple[str, int], Reading]]:
        made.append("")
        return {"dense": {("image", 2): Reading(lambda: None, 2)}, "a": {("image", 2): Reading(lambda: None, 4)}}

    def measured(**identity: str) -> times.Times[tuple[str, int]]:
        return times_once(Store(tmp_path / STORE), identity, readings, torch.device("cpu"), rounds=3)

    expected = {("image", 2): {"dense": [2.0, 4.0, 2.0], "a": [0.5, 1.0, 2.25]}}
    assert measured(models="both") == measured(models="both") == expected
    assert len(made) == 1
    # Times beside other candidates are of other turns.
    assert measured(models="others") == expected
    assert len(made) == 2
