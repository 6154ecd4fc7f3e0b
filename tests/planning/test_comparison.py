"""What comparisons share: candidates and their training configs, interleaved times, who is as fast."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmod.lazy import import_path
from mmod.planning.candidate import DENSE, Candidate
from mmod.planning.comparison import Reading, SampleScores, as_fast, time_models, unbeaten
from mmod.studies.command import CONFIGS as STUDY_CONFIGS
from mmod.studies.command import STUDIES
from mmod.studies.study import Study
from mmod.training.engine.config import RunConfig
from mmod.training.table import KINDS
from tests.kit.image_study import config as image_config


def test_all_models_and_passes_are_timed_in_turns() -> None:
    calls: list[tuple[str, int]] = []

    def reading(name: str, size: int) -> Reading:
        return Reading(lambda: calls.append((name, size)), size)

    readings = {name: {("image", size): reading(name, size) for size in (1, 8)} for name in (DENSE, "a", "b")}
    times = time_models(readings, rounds=3, device=torch.device("cpu"), warmup=1)
    assert set(times) == {("image", 1), ("image", 8)}
    assert all(set(by_model) == set(readings) for by_model in times.values())
    assert all(len(by_round) == 3 for by_model in times.values() for by_round in by_model.values())
    # Every round, and the one before them, calls each pass of each model once.
    everything = sorted((name, size) for name in readings for size in (1, 8))
    assert all(sorted(calls[start : start + 6]) == everything for start in range(0, 24, 6))


@given(st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1))
def test_the_unbeaten_are_the_pareto_front(models: dict[str, tuple[int, int]]) -> None:
    ms = {name: float(time) for name, (time, _) in models.items()}

    def is_better(one: str, other: str) -> bool:
        return models[one][1] > models[other][1]

    front = unbeaten(ms, is_better, tolerance=1.0)
    for name, (time, score) in models.items():
        beaten = any(fast <= time and high > score for fast, high in models.values())
        assert (name in front) == (not beaten)
    assert front


def test_times_within_two_percent_are_as_fast() -> None:
    ms = {"a": 1.0, "near": 1.02, "slow": 1.03}
    assert as_fast(ms, "a") == ["near"]
    assert as_fast(ms, "a", tolerance=1.0) == []
    assert as_fast(ms, "slow") == ["a", "near"]


def test_a_candidate_changes_the_config_it_is_trained_by_and_nothing_else(tmp_path: Path) -> None:
    dense = image_config(tmp_path, epochs=2)
    start = dataclasses.replace(dense.model, checkpoint="runs/dense")
    tuned = dataclasses.replace(dense, model=start, epochs=3)
    merge = {"kind": "merge", "r": 2}
    routing = {"router": "random", "capacity": 0.5}
    assert Candidate(DENSE).configure(dense, tuned) is tuned
    both = Candidate("both", methods=({"kind": "experts"},), routing=routing).configure(dense, tuned)
    assert (both.methods, both.routing, both.model) == ([{"kind": "experts"}], routing, start)
    small = Candidate("small", methods=(merge,), image_size=16).configure(dense, tuned)
    assert (small.data.image_size, small.model.args["img_size"], small.methods) == (16, 16, [merge])
    changes = {"epochs": 5, "model": {"args": {"depth": 2}}}
    scratch = Candidate("scratch", from_scratch=True, changes=changes).configure(tuned, tuned)
    assert (scratch.epochs, scratch.model.checkpoint) == (5, None)
    assert scratch.model.args == {**dense.model.args, "depth": 2}
    assert [Candidate("a", **fields).is_routed for fields in _ROUTED] == [False, True, False, True]


_ROUTED: list[dict[str, Any]] = [
    {},
    {"routing": {"router": "random"}},
    {"methods": ({"kind": "merge", "r": 2},)},
    # Only methods that replace weights are trained from scratch, and their parts are chosen.
    {"methods": ({"kind": "recursions"},), "from_scratch": True},
]


def test_a_method_of_another_package_is_printed_by_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmod.methods import METHODS, Merge

    monkeypatch.setattr(Merge, "__module__", "another.package")
    assert METHODS["merge"] is Merge
    candidate = Candidate("ToMe", methods=({"kind": "merge", "r": 8},))
    assert candidate.code("image", 12) == "mmod.apply_(model, {'kind': 'merge', 'r': 8})"


def test_each_kind_is_a_frozen_object_that_inherits_nothing() -> None:
    for row in KINDS.values():
        kind = import_path(row.kind)
        assert kind.__bases__ == (object,)
        assert [field.name for field in dataclasses.fields(kind)] == ["config"]
        assert issubclass(import_path(row.config), RunConfig)


def test_each_kind_of_study_has_a_config() -> None:
    assert STUDIES.keys() == STUDY_CONFIGS.keys()
    assert all(issubclass(import_path(path), Study) for path in STUDIES.values())


@given(st.lists(st.floats(0, 1), min_size=2, max_size=20), st.data())
def test_samples_are_paired_as_far_as_both_are_judged(scores: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(scores)))
    changed = data.draw(st.lists(st.floats(0, 1), min_size=count, max_size=count))
    judged = SampleScores({DENSE: np.array(scores), "a": np.array(changed), "none": np.zeros(0)})
    gap = judged.gap("a", DENSE)
    assert gap is not None
    assert gap.value == pytest.approx(sum(changed) / count - sum(scores[:count]) / count, abs=1e-9)
    assert gap.low <= gap.value + 1e-9
    assert gap.value - 1e-9 <= gap.high
    assert judged.gap("none", DENSE) is None
    assert judged.best([DENSE, "a"]) == max([DENSE, "a"], key=judged.mean)
