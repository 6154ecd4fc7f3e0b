"""The count of image-text-to-text types in the docs, and which of them stand for the layers of all."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

import mmod
from mmod.adapters import find_stacks
from mmod.adapters.transformers.families import (
    branch_ends,
    layer_projections,
    parameters_of,
    reads_positions,
    shares_keys,
)
from scripts import vlm_types
from tests.kit.vlm_types import FAMILIES
from tests.kit.vlm_zoo import APART, JOINT, OTHERS, make_joint

ROWS = json.loads(vlm_types.RESULTS.read_text())["types"]["rows"]
PUBLISHED = {part: types.replace("`", "").split(", ") for part, _, types in ROWS}


def test_docs_count_every_type_that_is_tested() -> None:
    assert PUBLISHED["language model"] == sorted(FAMILIES)
    assert {*OTHERS, *(kind for kind, _ in JOINT.values())} <= set(FAMILIES)
    assert [count for _, count, _ in ROWS] == [len(types) for types in PUBLISHED.values()]


def ways_of(model: Any) -> set[Any]:
    """Return what mmod reads of a model's decoder layers, once for layers that are alike."""
    ways: set[Any] = set()
    for layer in find_stacks(model)["language"].blocks:
        way = [frozenset(parameters_of(layer)), frozenset(layer._modules), branch_ends(layer), reads_positions(layer)]
        if "self_attn" in layer._modules:
            way += [layer_projections(layer), shares_keys(layer.self_attn)]
        ways.add(tuple(way))
    return ways


def test_docs_name_the_types_whose_tower_is_routed_and_layers_of_all_are_like_those_in_every_test() -> None:
    ways = {name: ways_of(make_joint(name)) for name in JOINT}
    towers = []
    for kind in (*OTHERS, *sorted({kind for kind, _ in JOINT.values()})):
        model = make_joint(kind)
        ways[kind] = ways_of(model)
        with contextlib.suppress(ValueError):
            mmod.route_(model, image=vlm_types.KEEP_ALL.replace(blocks=(0,)))
            towers.append(kind)
    named = [kind for kind in ways if kind in PUBLISHED["vision tower"]]
    assert sorted(towers) == sorted(named), "run python -m scripts.vlm_types"
    known = set().union(*(ways[name] for name in (*JOINT, *APART)))
    strange = [kind for kind in OTHERS if not ways[kind] <= known]
    assert not strange, "mmod takes a way of its own through their layers: name them in APART"


@pytest.mark.parametrize(("kind", "tower"), [("gemma3", True), ("got_ocr2", False)])
def test_types_are_counted_strictly(kind: str, tower: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert vlm_types.check(kind) == vlm_types.Outcome(language=True, tower=tower)
    monkeypatch.setattr(vlm_types, "KEEP_ALL", mmod.RoutingConfig(router="linear", capacity=0.5))
    assert not vlm_types.check(kind).language
