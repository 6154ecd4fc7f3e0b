"""Files that an evaluation reads: a further, renamed or longer one is noticed, and a copied folder is the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from mmod.data.config import DataConfig, PairsConfig, TextConfig
from mmod.data.files import Use, check_files, data_files
from mmod.data.readers.conversations import ConversationsConfig


def of_folder(root: Path) -> DataConfig:
    return DataConfig("folder", root=str(root), val_split="val")


SETS: dict[str, Callable[[Path], object]] = {
    "folder": of_folder,
    "maps": lambda root: DataConfig("maps:32", root=str(root), val_split="val", label_patch=8),
    "shards": lambda root: DataConfig(f"shards:{root}/{{split}}/*.jpg", val_split="val"),
    "pairs": lambda root: PairsConfig(train="nowhere.tar", val=f"{root}/val/*.jpg"),
    "text": lambda root: TextConfig(f"{root}/**/*.jpg"),
    "chat": lambda root: ConversationsConfig("nowhere.json", f"{root}/val/a.jpg"),
}


@pytest.mark.parametrize("kind", SETS)
def test_files_are_told_by_names_and_sizes(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "set"
    for name in ("val", "images/val", "labels/val"):
        (root / name).mkdir(parents=True)
        (root / name / "a.jpg").write_bytes(b"1234")
        (root / name / "b.jpg").write_bytes(b"5678")
    data = SETS[kind](root)
    before = data_files(data)
    assert before is not None
    changed = root / ("images/val/a.jpg" if kind == "maps" else "val/a.jpg")
    changed.touch()
    assert data_files(data) == before
    changed.write_bytes(b"54321")
    assert data_files(data) not in (before, None)


def test_images_of_conversations_are_told_by_names_and_sizes(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    said = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "That."}]
    (tmp_path / "one/val.json").write_text(json.dumps([{"image": "a.png", "conversations": said}]))
    image = tmp_path / "one/a.png"
    Image.new("RGB", (8, 8)).save(image)

    def told(folder: str, use: Use = "val") -> str | None:
        file = str(tmp_path / folder / "val.json")
        return data_files(ConversationsConfig(file, file), use)

    before, trained = told("one"), told("one", "train")
    assert str(before).startswith("2 files, ")
    assert str(trained).startswith("1 file, ")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert told("two") == before
    Image.new("RGB", (64, 64)).save(image)
    assert told("one") not in (before, None)
    assert told("one", "train") == trained
    # Beside one that is missing, the others are told.
    (tmp_path / "three").mkdir()
    records = [{"image": name, "conversations": said} for name in ("a.png", "missing.png")]
    (tmp_path / "three/val.json").write_text(json.dumps(records))
    shutil.copy(image, tmp_path / "three/a.png")
    missing = told("three")
    assert str(missing).startswith("2 files, ")
    Image.new("RGB", (8, 8)).save(tmp_path / "three/a.png")
    assert told("three") not in (missing, None)
    # The file is known also where a record cannot be read.
    image.unlink()
    assert str(told("one")).startswith("1 file, ")


def test_a_copy_of_a_folder_is_the_same_set_and_what_is_not_read_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "one/val/class").mkdir(parents=True)
    (tmp_path / "one/val/class/a.png").write_bytes(b"1")
    # Links in circles end.
    (tmp_path / "one/val/class/up").symlink_to(tmp_path / "one/val", target_is_directory=True)
    before = data_files(of_folder(tmp_path / "one"))
    assert str(before).startswith("1 file, ")
    shutil.copytree(tmp_path / "one", tmp_path / "two", symlinks=True)
    (tmp_path / "two/val/class/up").unlink()
    (tmp_path / "two/val/class/up").symlink_to(tmp_path / "two/val", target_is_directory=True)
    for name in (".DS_Store", "class/notes.txt"):
        (tmp_path / "two/val" / name).write_bytes(b"1")
    assert data_files(of_folder(tmp_path / "two")) == before
    (tmp_path / "two/val/class/b.png").write_bytes(b"1")
    assert str(data_files(of_folder(tmp_path / "two"))).startswith("2 files, ")


@pytest.mark.parametrize(
    "data",
    [
        DataConfig("digits:tiny"),
        DataConfig("hf-datasets:owner/name:test"),
        DataConfig("folder", root="nowhere"),
        DataConfig("shards:nowhere/{split}-*.tar"),
        DataConfig("shards:https://example.org/{split}-{00..01}.tar"),
        PairsConfig(),
        TextConfig(),
        ConversationsConfig(),
        ConversationsConfig(val="questions:tiny/val"),
        None,
    ],
    ids=[
        "drawn",
        "streamed",
        "no folder",
        "no shards",
        "remote",
        "pairs",
        "text",
        "conversations",
        "questions",
        "none",
    ],
)
def test_sets_without_files_here_have_none(data: object) -> None:
    assert data_files(data) is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (ConversationsConfig(train="hf-datasets:owner/name"), "no file of conversations at 'hf-datasets:owner/name'"),
        (ConversationsConfig(train="scenes:tiny/train"), "no file of conversations at 'scenes:tiny/train'"),
        (PairsConfig(train="questions:tiny/train"), "questions:tiny/train"),
        (TextConfig(source="scenes:tiny/train"), "data.source='scenes:tiny/train' matches no file"),
    ],
)
def test_a_source_of_another_kind_of_data_is_a_file_that_is_missing(data: object, message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        check_files(data)
