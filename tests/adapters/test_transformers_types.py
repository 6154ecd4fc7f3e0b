"""The count of image-text-to-text types in the docs."""

from __future__ import annotations

import json

import pytest

import mmod
from scripts import vlm_types
from tests.kit.vlm_types import FAMILIES
from tests.kit.vlm_zoo import JOINT, OTHERS, make_joint

ROWS = json.loads(vlm_types.RESULTS.read_text())["types"]["rows"]
PUBLISHED = {part: types.replace("`", "").split(", ") for part, _, types in ROWS}


def test_docs_count_every_type_that_is_tested() -> None:
    assert PUBLISHED["language model"] == sorted(FAMILIES)
    assert {*OTHERS, *(kind for kind, _ in JOINT.values())} <= set(FAMILIES)
    assert [count for _, count, _ in ROWS] == [len(types) for types in PUBLISHED.values()]


@pytest.mark.parametrize("kind", [*OTHERS, *sorted({kind for kind, _ in JOINT.values()})])
def test_docs_name_the_types_whose_tower_is_routed(kind: str) -> None:
    try:
        mmod.route_(make_joint(kind), vision=vlm_types.KEEP_ALL.replace(blocks=(0,)))
        routed = True
    except ValueError:
        routed = False
    assert routed == (kind in PUBLISHED["vision tower"]), "run python -m scripts.vlm_types"


@pytest.mark.parametrize(("kind", "tower"), [("gemma3", True), ("got_ocr2", False)])
def test_types_are_counted_strictly(kind: str, tower: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert vlm_types.check(kind) == vlm_types.Outcome(language=True, tower=tower)
    monkeypatch.setattr(vlm_types, "KEEP_ALL", mmod.RoutingConfig(router="linear", capacity=0.5))
    assert not vlm_types.check(kind).language
