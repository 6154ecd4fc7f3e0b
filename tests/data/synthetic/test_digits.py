import json
import signal
from dataclasses import replace

import numpy as np

from mmod.data.synthetic import build
from mmod.data.synthetic.build import MANIFEST
from mmod.data.synthetic.digits import DIFFICULTIES, DIGITS, compose_scenes
from mmod.data.synthetic.handwriting import SPLITS, load_sources
from tests.kit.disk import contents
from tests.kit.processes import run_processes

TINY = DIFFICULTIES["tiny"]


def test_source_splits_are_disjoint_complete_and_stratified():
    sources = load_sources()
    together = np.concatenate([sources.splits[split] for split in SPLITS])
    assert np.array_equal(np.sort(together), np.arange(1797))
    for split, share in (("train", 0.7), ("val", 0.1), ("test", 0.2)):
        counts = np.bincount(sources.labels[sources.splits[split]], minlength=10)
        assert np.all(np.abs(counts / np.bincount(sources.labels) - share) < 0.01)


def test_a_scene_is_its_target_in_its_box_and_little_else():
    sources = load_sources()
    config = replace(TINY, clutter=0)
    labels = []
    for scene in compose_scenes(config, "train"):
        left, top, right, bottom = scene.box
        assert config.digit_size[0] <= right - left == bottom - top <= config.digit_size[1]
        outside = scene.image.copy()
        outside[top:bottom, left:right] = 0
        assert not outside.any()
        assert scene.image.any()
        assert scene.label == sources.labels[scene.target]
        labels.append(scene.label)
    assert np.bincount(labels, minlength=10).min() > 10


def test_more_scenes_leave_the_first_ones_as_they_are():
    few = list(compose_scenes(replace(TINY, scenes={"train": 8, "val": 1, "test": 1}), "train"))
    many = list(compose_scenes(TINY, "train"))
    assert all(np.array_equal(a.image, b.image) and a.label == b.label for a, b in zip(few, many))


def test_digits_lie_on_the_grid():
    places = [scene.box for scene in compose_scenes(replace(TINY, digit_size=(16, 16), grid=4), "test")]
    assert {edge % 4 for box in places for edge in box} == {0}
    assert len(set(places)) > 15


def build_two_shards(folder):
    write, opened = build.open_shard, []

    def dying(*arguments):
        opened.append(arguments)
        if len(opened) == 3:
            signal.raise_signal(signal.SIGKILL)
        return write(*arguments)

    build.open_shard = dying
    DIGITS.build(folder, "tiny")


def test_a_killed_build_leaves_nothing_and_restarts(tmp_path):
    assert run_processes(build_two_shards, tmp_path / "set") == [-signal.SIGKILL]
    assert not (tmp_path / "set").exists()
    DIGITS.build(tmp_path / "set", TINY)
    DIGITS.build(tmp_path / "other", TINY)
    assert contents(tmp_path / "set") == contents(tmp_path / "other")
    assert not (tmp_path / ".set.partial").exists()


def build_tiny(folder):
    DIGITS.build(folder, "tiny")


def test_processes_that_build_at_once_agree(tmp_path):
    assert run_processes(build_tiny, tmp_path / "set", world=2) == [0, 0]
    manifest = json.loads((tmp_path / "set" / MANIFEST).read_text())
    assert len(contents(tmp_path / "set")) == len(manifest["shards"]) + 1
