from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from mmod.data.synthetic.crowds import CLASSES, CROWDS, DIFFICULTIES, CrowdsConfig, compose_crowds
from mmod.data.synthetic.handwriting import SPLITS, load_sources
from tests.kit.disk import contents

TINY = DIFFICULTIES["tiny"]
FEW = {"train": 12, "val": 12, "test": 12}


def test_builds_are_equal_byte_for_byte_and_differ_by_seed(tmp_path: Path) -> None:
    for name, config in (("a", TINY), ("b", TINY), ("c", replace(TINY, seed=1))):
        CROWDS.build(tmp_path / name, config)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    shards_a, shards_c = contents(tmp_path / "a"), contents(tmp_path / "c")
    assert all(shards_a[name] != shards_c[name] for name in shards_a)


@pytest.mark.parametrize("level", DIFFICULTIES)
def test_labels_are_those_of_the_digits_in_their_boxes_and_nowhere_else(level: str) -> None:
    sources = load_sources()
    config = replace(DIFFICULTIES[level], clutter=0, scenes=FEW)
    for scene in compose_crowds(config, "train"):
        fewest, most = config.digits
        assert fewest <= len(scene.boxes) == len(scene.sources) <= most
        left = scene.image.copy(), scene.labels.copy()
        for source, (x1, y1, x2, y2) in zip(scene.sources, scene.boxes):
            image, labels = scene.image[y1:y2, x1:x2], scene.labels[y1:y2, x1:x2]
            assert np.array_equal(labels > 0, image >= 255 * config.ink)
            assert set(np.unique(labels)) == {0, int(sources.labels[source]) + 1}
            for background in left:
                background[y1:y2, x1:x2] = 0
        assert not any(background.any() for background in left)
        for (x1, y1, x2, y2), (x3, y3, x4, y4) in combinations(scene.boxes, 2):
            assert min(x2, x4) <= max(x1, x3) or min(y2, y4) <= max(y1, y3)


def test_clutter_changes_the_image_and_no_label() -> None:
    scenes = list(compose_crowds(replace(TINY, scenes=FEW), "val"))
    assert any((scene.image[scene.labels == 0] > 255 * TINY.contrast[0]).any() for scene in scenes)
    assert max(int(scene.labels.max()) for scene in scenes) < CLASSES


def test_no_handwriting_crosses_splits_not_even_as_clutter() -> None:
    splits = load_sources().splits
    for split in SPLITS:
        scenes = compose_crowds(replace(TINY, scenes=FEW), split)
        used = {source for scene in scenes for source in (*scene.sources, *scene.clutter)}
        assert used <= set(splits[split].tolist())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"digit_size": (18, 12)}, "digit_size"),
        ({"digits": (2, 9)}, "fill at most half of canvas=40"),
        ({"digits": (3, 2)}, "digits"),
        ({"ink": 0.0}, "ink must be .* got 0.0"),
        ({"contrast": (0.5, 1.5)}, "contrast"),
        ({"scenes": {"train": 5}}, "scenes"),
        ({"grid": 0}, "grid must be .* got 0"),
    ],
)
def test_parameters_out_of_range_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CrowdsConfig(**change)
