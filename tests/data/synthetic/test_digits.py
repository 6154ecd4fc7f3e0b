import json
import signal
import tarfile
from dataclasses import replace

import numpy as np
import pytest

from mmod.data.synthetic import build
from mmod.data.synthetic.build import MANIFEST
from mmod.data.synthetic.digits import DIFFICULTIES, DIGITS, DigitsConfig, compose_scenes
from mmod.data.synthetic.handwriting import SPLITS, load_sources
from tests.kit.disk import contents
from tests.kit.processes import run_processes

TINY = DIFFICULTIES["tiny"]


def test_builds_are_equal_byte_for_byte_and_differ_by_seed(tmp_path):
    for name, config in (("a", TINY), ("b", TINY), ("c", replace(TINY, seed=1))):
        DIGITS.build(tmp_path / name, config)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    shards_a, shards_c = contents(tmp_path / "a"), contents(tmp_path / "c")
    assert all(shards_a[name] != shards_c[name] for name in shards_a)


def test_source_splits_are_disjoint_complete_and_stratified():
    sources = load_sources()
    together = np.concatenate([sources.splits[split] for split in SPLITS])
    assert np.array_equal(np.sort(together), np.arange(1797))
    for split, share in (("train", 0.7), ("val", 0.1), ("test", 0.2)):
        counts = np.bincount(sources.labels[sources.splits[split]], minlength=10)
        assert np.all(np.abs(counts / np.bincount(sources.labels) - share) < 0.01)


def test_sources_are_loaded_once_and_nobody_changes_them():
    sources = load_sources(3)
    assert load_sources(3) is sources
    assert not np.array_equal(load_sources(4).splits["train"], sources.splits["train"])
    for array in (sources.images, sources.labels, *sources.splits.values()):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_no_source_image_crosses_splits_not_even_as_clutter(tmp_path):
    DIGITS.build(tmp_path / "set", TINY)
    used: dict[str, set[int]] = {split: set() for split in SPLITS}
    for path in (tmp_path / "set").glob("*.tar"):
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name.endswith(".json"):
                    made = json.load(tar.extractfile(member))
                    used[path.name.split("-")[0]] |= {made["target"], *made["clutter"]}
    splits = load_sources().splits
    for split in SPLITS:
        assert used[split]
        assert used[split] <= set(splits[split].tolist())


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


def test_most_of_a_default_scene_is_background():
    config = replace(DIFFICULTIES["default"], scenes={"train": 64, "val": 1, "test": 1})
    images = np.stack([scene.image for scene in compose_scenes(config, "train")])
    patches = images.reshape(64, 8, 4, 8, 4).max(axis=(2, 4))
    box = config.digit_size[1] ** 2 / config.canvas**2
    assert box < 0.35
    assert (patches == 0).mean() > 0.3


def test_more_scenes_leave_the_first_ones_as_they_are():
    few = list(compose_scenes(replace(TINY, scenes={"train": 8, "val": 1, "test": 1}), "train"))
    many = list(compose_scenes(TINY, "train"))
    assert all(np.array_equal(a.image, b.image) and a.label == b.label for a, b in zip(few, many))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"digit_size": (20, 10)}, "digit_size"),
        ({"digit_size": (14, 40)}, "canvas=32"),
        ({"fragment": (0.0, 0.5)}, "fragment"),
        ({"contrast": (0.5, 1.5)}, "contrast"),
        ({"scenes": {"train": 5}}, "scenes"),
        ({"clutter": -1}, "clutter must be an integer of at least 0, got -1"),
        ({"shard_size": 0}, "shard_size must be .* got 0"),
        ({"grid": 0}, "grid must be .* got 0"),
    ],
)
def test_parameters_out_of_range_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        DigitsConfig(**change)


def test_digits_lie_on_the_grid():
    places = [scene.box for scene in compose_scenes(replace(TINY, digit_size=(16, 16), grid=4), "test")]
    assert {edge % 4 for box in places for edge in box} == {0}
    assert len(set(places)) > 15


def test_the_same_parameters_build_once(tmp_path):
    first = DIGITS.build(tmp_path / "set", TINY)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "set").iterdir()}
    assert DIGITS.build(tmp_path / "set", TINY) == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "set").iterdir()} == before


def test_other_parameters_and_foreign_files_are_refused(tmp_path):
    DIGITS.build(tmp_path / "set", TINY)
    before = contents(tmp_path / "set")
    with pytest.raises(FileExistsError, match="clutter: 4 there, 5 now"):
        DIGITS.build(tmp_path / "set", replace(TINY, clutter=5))
    assert contents(tmp_path / "set") == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(FileExistsError, match=r"holds files but no manifest\.json"):
        DIGITS.build(tmp_path / "mine", TINY)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize("damage", ["change", "delete"])
def test_a_damaged_build_is_an_error(tmp_path, damage):
    DIGITS.build(tmp_path / "set", TINY)
    shard = tmp_path / "set" / "val-000000.tar"
    if damage == "delete":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match=r"val-000000\.tar is missing or differs"):
        DIGITS.build(tmp_path / "set", TINY)


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


def test_an_exception_removes_the_partial_build(tmp_path, monkeypatch):
    def fail(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("mmod.data.synthetic.build.open_shard", fail)
    with pytest.raises(KeyboardInterrupt):
        DIGITS.build(tmp_path / "set", TINY)
    assert [path.name for path in tmp_path.iterdir()] == [".set.lock"]


def build_tiny(folder):
    DIGITS.build(folder, "tiny")


def test_processes_that_build_at_once_agree(tmp_path):
    assert run_processes(build_tiny, tmp_path / "set", world=2) == [0, 0]
    manifest = json.loads((tmp_path / "set" / MANIFEST).read_text())
    assert len(contents(tmp_path / "set")) == len(manifest["shards"]) + 1
