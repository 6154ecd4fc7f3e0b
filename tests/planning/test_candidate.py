"""Candidates and their training configs, and the kinds of training and of studies that they are for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from mmod.analysis.table import DENSE
from mmod.planning.candidate import Candidate
from mmod.studies.kind import StudyKind, study_kind
from mmod.studies.kind_configs import CONFIGS as STUDY_CONFIGS
from mmod.studies.runs import run_config_of
from mmod.training.kinds import KINDS
from tests.kit.image_study import config as image_config


def test_a_candidate_changes_the_config_it_is_trained_by_and_nothing_else(tmp_path: Path) -> None:
    dense = image_config(tmp_path, epochs=2)
    start = dataclasses.replace(dense.model, checkpoint="runs/dense")
    tuned = dataclasses.replace(dense, model=start, epochs=3)
    merge = {"kind": "merge", "r": 2}
    routing = {"router": "random", "capacity": 0.5}
    assert run_config_of(Candidate(DENSE), tuned) is tuned
    both = run_config_of(Candidate("both", methods=({"kind": "experts"},), routing=routing), tuned)
    assert (both.methods, both.routing, both.model) == ([{"kind": "experts"}], routing, start)
    small = run_config_of(Candidate("small", methods=(merge,), image_size=16), tuned)
    assert (small.data.image_size, small.model.args["img_size"], small.methods) == (16, 16, [merge])
    changes = {"epochs": 5, "model": {"args": {"depth": 2}}}
    scratch = run_config_of(Candidate("scratch", changes=changes), tuned.started_from(None))
    assert (scratch.epochs, scratch.model.checkpoint) == (5, None)
    assert scratch.model.args == {**dense.model.args, "depth": 2}
    assert [Candidate("a", **fields).is_baseline for fields in _CHANGES] == [True, False, True, False]


_CHANGES: list[dict[str, Any]] = [
    {},
    {"routing": {"router": "random"}},
    {"methods": ({"kind": "merge", "r": 2},)},
    # Only methods that replace weights are trained from scratch, and their parts are chosen.
    {"methods": ({"kind": "recursions"},), "from_scratch": True},
]


def test_what_chance_keeps_is_known_by_its_routing_its_method_or_its_name() -> None:
    drawn: list[dict[str, Any]] = [
        {"name": "random"},
        {"name": "random-0.5", "series": "random"},
        {"name": "a", "routing": {"preset": "gradual", "router": "random"}},
        {"name": "a", "routing": {"router": {"name": "random", "seed": 3}}},
        {"name": "a", "routing": {"image": {"router": "random"}, "text": {"router": "random"}}},
        {"name": "a", "methods": ({"kind": "channels", "divisor": 4, "chosen": "random"},)},
    ]
    assert all(Candidate(**fields).at_random for fields in drawn)
    chosen: list[dict[str, Any]] = [
        {"routing": {"router": "stride"}},
        {"routing": {"router": {"name": "linear"}}},
        {"methods": ({"kind": "merge", "r": 2},), "series": "merge"},
        {"control": "random"},
    ]
    assert not any(Candidate("a", **fields).at_random for fields in chosen)


def test_a_method_of_another_package_is_printed_by_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmod.methods import METHODS, Merge

    monkeypatch.setattr(Merge, "__module__", "another.package")
    assert METHODS["merge"] is Merge
    candidate = Candidate("ToMe", methods=({"kind": "merge", "r": 8},))
    assert candidate.code("image", True) == 'mmod.apply_(model, {"kind": "merge", "r": 8})'


def test_each_kind_of_study_has_a_config() -> None:
    for name, config in STUDY_CONFIGS.items():
        assert get_args(get_type_hints(config)["kind"]) == (name,)
        assert isinstance(study_kind(name), StudyKind)
        assert ("image" if name == "features" else name) in KINDS


def test_a_preset_that_is_no_mapping_is_named_as_one() -> None:
    preset: Any = "pixelprune"
    with pytest.raises(TypeError, match=r'such as \{"preset": "pixelprune"\}, got \'pixelprune\''):
        Candidate("pp", routing=preset)
