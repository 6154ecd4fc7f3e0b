"""Times of candidates: interleaved, and as milliseconds of a sample and speed-ups."""

from __future__ import annotations

import pytest
import torch

from mmod.analysis.timing import Reading
from mmod.compare import times
from mmod.compare.table import DENSE, Table
from mmod.compare.times import sample_times, time_models


def test_all_models_and_passes_are_timed_in_turns() -> None:
    calls: list[tuple[str, int]] = []

    def reading(name: str, size: int) -> Reading:
        return Reading(lambda: calls.append((name, size)), size)

    readings = {name: {("image", size): reading(name, size) for size in (1, 8)} for name in (DENSE, "a", "b")}
    ms = time_models(readings, rounds=3, device=torch.device("cpu"), warmup=1)
    assert set(ms) == {("image", 1), ("image", 8)}
    assert all(set(by_model) == set(readings) for by_model in ms.values())
    assert all(len(by_round) == 3 for by_model in ms.values() for by_round in by_model.values())
    # Every round, and the one before them, calls each pass of each model once.
    everything = sorted((name, size) for name in readings for size in (1, 8))
    assert all(sorted(calls[start : start + 6]) == everything for start in range(0, 24, 6))


def test_times_are_of_a_sample_and_beside_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {("dense", "image"): [4.0, 8.0, 4.0], ("a", "image"): [2.0, 4.0, 9.0]}
    monkeypatch.setattr(times, "interleave", lambda calls, **_: {key: taken[key] for key in calls})
    readings = {"dense": {"image": Reading(lambda: None, 2)}, "a": {"image": Reading(lambda: None, 4)}}
    table = Table()
    figures = sample_times(table, readings, rounds=3, device=torch.device("cpu"))
    # Both in milliseconds of a sample; the speed-up is that of the whole pass, round by round.
    assert table.times["image"]["a"] == [2.0, 4.0, 9.0]
    assert figures == {"image": {"dense": (2.0, 1.0), "a": (0.5, 2.0)}}
