"""ImageNet's archives become folders of classes: each split whole, or not there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from mmod.data import DataConfig, image_stream
from tests.kit.imagenet_archives import DEVKIT, SYNSETS, TRAIN, TRUTH, VAL, archive, write_archives
from tests.kit.scripts import run_script

EXPECTED = {f"train/{synset}/{name}": data for synset, images in TRAIN.items() for name, data in images.items()}
EXPECTED |= {f"val/{SYNSETS[TRUTH[place] - 1]}/{name}": data for place, (name, data) in enumerate(VAL.items())}


def of(split: str) -> dict[str, bytes]:
    return {name: data for name, data in EXPECTED.items() if name.startswith(split)}


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return write_archives(tmp_path / "archives", monkeypatch)


def unpack(source: Path, *options: str) -> CompletedProcess[str]:
    return run_script("datasets/imagenet.py", str(source), str(source.parent / "out"), *options)


def test_every_image_is_in_the_folder_of_its_class(source: Path) -> None:
    before = files_of(source)
    done = unpack(source)
    out = source.parent / "out"
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{out}/train: unpacked, 3 classes, 15 images\n{out}/val: unpacked, 3 classes, 7 images\n"
    assert files_of(out) == EXPECTED
    data = DataConfig(source="folder", root=str(out), train_split="train", val_split="val", image_size=16)
    labels_read = sorted(int(label) for _, labels in image_stream(data).batches(0) for label in labels)
    # Classes are numbered by their synsets.
    assert labels_read == sorted(sorted(SYNSETS).index(SYNSETS[number - 1]) for number in TRUTH)
    # The same command again needs no archive.
    shutil.rmtree(source)
    assert unpack(source).stdout == done.stdout.replace("unpacked", "there already")
    assert files_of(out) == EXPECTED
    assert set(before) == {archive("train"), archive("val"), DEVKIT}


def test_what_is_missing_or_damaged_is_named_and_another_download_goes_on(source: Path) -> None:
    out = source.parent / "out"
    content = (source / archive("train")).read_bytes()
    for text, message in ((None, "does not exist: download it"), (content[:9000], "corrupted")):
        (source / archive("train")).unlink(missing_ok=True)
        if text is not None:
            (source / archive("train")).write_bytes(text)
        done = unpack(source)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert done.stderr.startswith("error: ")
        assert archive("train") in done.stderr
        assert message in done.stderr
        assert not out.exists() or not files_of(out)
    assert unpack(source, "--splits", "val").returncode == 0
    assert files_of(out) == of("val")
    (source / archive("train")).write_bytes(content)
    assert unpack(source).returncode == 0
    assert files_of(out) == EXPECTED


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_split_is_shown_when_it_is_whole(split: str, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = source.parent / "out"

    def dying() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "sync", dying)
        with pytest.raises(KeyboardInterrupt):
            unpack(source, "--splits", split)
    assert not files_of(out)
    # What a killed process leaves.
    (out / f".{split}.partial").mkdir()
    (out / f".{split}.partial" / "n00000007").touch()
    (out / "mine.txt").write_text("mine")
    assert unpack(source, "--splits", split).returncode == 0
    assert files_of(out) == of(split) | {"mine.txt": b"mine"}
