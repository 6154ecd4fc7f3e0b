from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from mmod.data.synthetic.crowds import CLASSES, DIFFICULTIES, compose_crowds
from mmod.data.synthetic.handwriting import load_sources

TINY = DIFFICULTIES["tiny"]
FEW = {"train": 12, "val": 12, "test": 12}


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
