from __future__ import annotations

import json
import tarfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

from mmod.data.synthetic.handwriting import load_sources
from mmod.data.synthetic.scenes import DIFFICULTIES, SCENES, all_contents, compose_pairs

TINY = DIFFICULTIES["tiny"]


def test_builds_tell_open_clip_their_sizes(tmp_path: Path) -> None:
    SCENES.build(tmp_path / "a", TINY)
    sizes = json.loads((tmp_path / "a/sizes.json").read_text())
    assert sizes["train-00003.tar"] == 64
    assert sum(sizes.values()) == 256 + 64 + 64
    with tarfile.open(tmp_path / "a/val-00000.tar") as tar:
        names = tar.getnames()
        record = json.load(tar.extractfile("000000000.json"))  # type: ignore[arg-type]
        text = tar.extractfile("000000000.txt").read().decode()  # type: ignore[union-attr]
    assert sorted(names[:3]) == ["000000000.json", "000000000.png", "000000000.txt"]
    assert record["caption"] == text
    assert (record["width"], record["height"], record["status"]) == (48, 48, "success")


def test_captions_tell_scenes_apart_and_none_comes_twice_where_pairs_are_looked_for() -> None:
    captions = [content.caption for content in all_contents()]
    assert len(set(captions)) == len(captions) == 1600
    for split in ("val", "test"):
        counts = Counter(pair.content.caption for pair in compose_pairs(TINY, split))
        assert set(counts.values()) == {1}


def test_scenes_show_what_captions_say() -> None:
    sources = load_sources()
    for pair in compose_pairs(replace(TINY, clutter=0), "train"):
        assert tuple(int(sources.labels[source]) for source in pair.sources) == pair.content.digits
        (left, top, right, bottom), other = pair.boxes
        if pair.content.relation == "left of":
            assert right <= other[0]
        else:
            assert bottom <= other[1]
        for box, size in zip(pair.boxes, pair.content.sizes):
            low, high = TINY.large if size == "large" else TINY.small
            assert low <= box[2] - box[0] == box[3] - box[1] <= high
        outside = pair.image.copy()
        outside[top:bottom, left:right] = 0
        outside[other[1] : other[3], other[0] : other[2]] = 0
        assert not outside.any()


def test_clutter_stands_where_the_caption_says() -> None:
    ink = {"clutter": [], "plain": []}
    for pair in compose_pairs(TINY, "train"):
        ink[pair.content.ground].append(np.count_nonzero(pair.image))
    assert np.mean(ink["clutter"]) > 1.2 * np.mean(ink["plain"])
