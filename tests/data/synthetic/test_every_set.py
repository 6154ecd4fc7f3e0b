"""What holds for every synthetic set: the same bytes each time, whole or not at all, no handwriting in two splits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmod.data.synthetic import crowds, digits, questions, scenes
from mmod.data.synthetic.handwriting import SPLITS, load_sources
from tests.kit.disk import contents

COUNTS = {"train": 20, "val": 7, "test": 7}
SETS: dict[str, tuple[Any, Any]] = {
    "digits": (digits.DIGITS, replace(digits.DIFFICULTIES["tiny"], scenes=COUNTS)),
    "crowds": (crowds.CROWDS, replace(crowds.DIFFICULTIES["tiny"], scenes=COUNTS)),
    "scenes": (scenes.SCENES, replace(scenes.DIFFICULTIES["tiny"], scenes=COUNTS)),
    "questions": (questions.QUESTIONS, replace(questions.DIFFICULTIES["tiny"], conversations=COUNTS)),
}
every_set = pytest.mark.parametrize("name", SETS)


@every_set
def test_builds_are_equal_byte_for_byte_and_differ_by_seed(name: str, tmp_path: Path) -> None:
    made, config = SETS[name]
    for folder, its in (("a", config), ("b", config), ("c", replace(config, seed=1))):
        made.build(tmp_path / folder, its)
    first, other = contents(tmp_path / "a"), contents(tmp_path / "c")
    assert first == contents(tmp_path / "b")
    assert all(first[file] != other[file] for file in first if file.endswith(".tar"))


@every_set
def test_a_folder_is_built_once_and_belongs_to_its_parameters(name: str, tmp_path: Path) -> None:
    made, config = SETS[name]
    first = made.build(tmp_path / "set", config)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "set").iterdir()}
    assert made.build(tmp_path / "set", config) == first
    with pytest.raises(FileExistsError, match=rf"clutter: {config.clutter} there, {config.clutter + 1} now"):
        made.build(tmp_path / "set", replace(config, clutter=config.clutter + 1))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "set").iterdir()} == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(FileExistsError, match=r"holds files but no manifest\.json"):
        made.build(tmp_path / "mine", config)
    assert contents(tmp_path / "mine") == {"thesis.txt": b"precious"}
    shard = next((tmp_path / "set").glob("val-*.tar"))
    for damage in (shard.read_bytes()[:-1] + b"x", None):
        shard.unlink() if damage is None else shard.write_bytes(damage)
        with pytest.raises(ValueError, match=rf"{shard.name} is missing or differs"):
            made.build(tmp_path / "set", config)


@every_set
def test_only_the_split_that_is_read_is_drawn(name: str, tmp_path: Path) -> None:
    made, config = SETS[name]
    folder = tmp_path / "set"

    def shards() -> dict[str, bytes]:
        return {file: content for file, content in contents(folder).items() if file.endswith(".tar")}

    made.build(folder, config, splits=("test",))
    before = shards()
    assert {file.partition("-")[0] for file in before} == {"test"}
    made.build(folder, config, splits=("train", "test"))
    assert {file.partition("-")[0] for file in shards()} == {"train", "test"}
    assert before.items() <= shards().items()
    # Split by split or at once, the bytes are the same.
    made.build(folder, config)
    made.build(tmp_path / "whole", config)
    assert contents(folder) == contents(tmp_path / "whole")


@every_set
def test_an_exception_removes_the_partial_build(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mmod.data.synthetic.build.open_shard", fail)
    with pytest.raises(KeyboardInterrupt):
        SETS[name][0].build(tmp_path / "set", SETS[name][1])
    assert [path.name for path in tmp_path.iterdir()] == [".set.lock"]


# The handwriting in each sample of a split, clutter included where it has some.
Used = Callable[[Any, str], Iterable[tuple[int, ...]]]
USED: dict[str, Used] = {
    "digits": lambda config, split: ((s.target, *s.clutter) for s in digits.compose_scenes(config, split)),
    "crowds": lambda config, split: ((*s.sources, *s.clutter) for s in crowds.compose_crowds(config, split)),
    "scenes": lambda config, split: (pair.sources for pair in scenes.compose_pairs(config, split)),
    "questions": lambda config, split: (
        scene.sources for chat in questions.compose_chats(config, split) for scene in chat.scenes
    ),
}


@every_set
def test_no_handwriting_crosses_splits(name: str) -> None:
    splits = load_sources().splits
    for split in SPLITS:
        used = {source for sample in USED[name](SETS[name][1], split) for source in sample}
        assert used
        assert used <= set(splits[split].tolist())


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((name, {"contrast": (0.5, 1.5)}, "contrast") for name in SETS),
    *((name, {"scenes": {"train": 5}}, "scenes") for name in ("digits", "crowds", "scenes")),
    *((name, {"grid": 0}, "grid must be .* got 0") for name in ("digits", "crowds")),
    ("digits", {"digit_size": (20, 10)}, "digit_size"),
    ("digits", {"digit_size": (14, 40)}, "canvas=32"),
    ("digits", {"fragment": (0.0, 0.5)}, "fragment"),
    ("digits", {"clutter": -1}, "clutter must be an integer of at least 0, got -1"),
    ("digits", {"shard_size": 0}, "shard_size must be .* got 0"),
    ("crowds", {"digit_size": (18, 12)}, "digit_size"),
    ("crowds", {"digits": (2, 9)}, "fill at most half of canvas=32"),
    ("crowds", {"digits": (3, 2)}, "digits"),
    ("crowds", {"ink": 0.0}, "ink must be .* got 0.0"),
    ("scenes", {"large": (10, 30)}, "large"),
    ("scenes", {"small": (14, 12)}, "small"),
    ("scenes", {"scenes": {"train": 1, "val": 1601, "test": 1}}, "1600"),
    ("questions", {"large": (12, 22)}, "apart"),
    ("questions", {"digits": (2, 5)}, "digits"),
    ("questions", {"shares": (0.6, 0.5)}, "shares"),
    ("questions", {"conversations": {"train": 10}}, "conversations"),
    ("questions", {"turns": 0}, "turns"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_parameters_out_of_range_are_named(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SETS[name][1], **change)
