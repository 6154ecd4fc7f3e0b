"""ImageNet's archives become folders of classes: whole images, each in its class, or a line in the report."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from mmod.data import DataConfig, image_stream
from mmod.data.convert import imagenet
from mmod.data.convert.imagenet import ARCHIVES, DEVKIT, ImageNetConversion, convert_imagenet
from mmod.data.corrupt import CorruptDataError
from tests.kit.imagenet_archives import SYNSETS, TRAIN, TRUTH, VAL, jpeg, tar_of
from tests.kit.imagenet_archives import write_archives as write
from tests.kit.scripts import run_script


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


EXPECTED = {f"train/{synset}/{name}": data for synset, images in TRAIN.items() for name, data in images.items()}
EXPECTED |= {f"val/{SYNSETS[TRUTH[place] - 1]}/{name}": data for place, (name, data) in enumerate(VAL.items())}


def images_of(output: Path) -> dict[str, bytes]:
    return {name: data for name, data in files_of(output).items() if name.endswith(".JPEG")}


def test_every_image_is_in_the_folder_of_its_class(tmp_path: Path) -> None:
    config = ImageNetConversion(str(write(tmp_path / "archives")), str(tmp_path / "out"))
    report = convert_imagenet(config, progress=False)
    assert images_of(tmp_path / "out") == EXPECTED
    assert report == {
        "train": {"classes": 3, "images": 15, "dropped": {}},
        "val": {"classes": 3, "images": 7, "dropped": {}},
    }
    assert json.loads((tmp_path / "out/report.json").read_text()) == report
    data = DataConfig(source="folder", root=str(tmp_path / "out"), train_split="train", val_split="val", image_size=16)
    labels_read = sorted(int(label) for _, labels in image_stream(data).batches(0) for label in labels)
    # Classes are numbered by their synsets.
    assert labels_read == sorted(sorted(SYNSETS).index(SYNSETS[number - 1]) for number in TRUTH)
    # The same command again changes nothing, without the archives' images being read.
    before = files_of(tmp_path / "out")
    assert convert_imagenet(config, progress=False) == report
    assert files_of(tmp_path / "out") == before


def test_a_list_of_synsets_stands_for_the_devkit(tmp_path: Path) -> None:
    source = write(tmp_path / "archives")
    (source / DEVKIT).unlink()
    only_val: dict[str, Any] = {"source": str(source), "output": str(tmp_path / "out"), "splits": ("val",)}
    with pytest.raises(FileNotFoundError, match="download the devkit, or pass --labels FILE"):
        convert_imagenet(ImageNetConversion(**only_val), progress=False)
    labels = tmp_path / "synsets.txt"
    labels.write_text("\n".join(SYNSETS[number - 1] for number in TRUTH))
    convert_imagenet(ImageNetConversion(**only_val, labels=str(labels)), progress=False)
    assert images_of(tmp_path / "out") == {name: data for name, data in EXPECTED.items() if name.startswith("val/")}
    for text, message in (("n0000007\n", "got 'n0000007'"), ("", "got None"), ("n00000007\n", "has no label")):
        labels.write_text(text)
        with pytest.raises(ValueError, match=message):
            convert_imagenet(
                ImageNetConversion(str(source), str(tmp_path / f"out{len(text)}"), ("val",), str(labels)), False
            )
    labels.write_text("\n".join(["n00000007"] * len(TRUTH)))
    with pytest.raises(ValueError, match="holds a split with another config"):
        convert_imagenet(ImageNetConversion(**only_val, labels=str(labels)), progress=False)


def test_members_that_are_no_whole_images_are_counted(tmp_path: Path) -> None:
    first, second, third = SYNSETS
    train = {synset: dict(images) for synset, images in TRAIN.items()}
    train[first] |= {f"{first}_77.JPEG": jpeg(1)[:200], "notes.txt": b"x", f"../../{first}_78.JPEG": jpeg(2)}
    source = write(tmp_path / "archives", train, {**VAL, "ILSVRC2012_val_00000002.JPEG": b"no image"})
    damaged = tar_of(train[second])[:-2000]
    classes = {f"{first}.tar": tar_of(train[first]), f"{second}.tar": damaged, f"{third}.tar": tar_of(train[third])}
    (source / ARCHIVES["train"]).write_bytes(tar_of(classes))
    report = convert_imagenet(ImageNetConversion(str(source), str(tmp_path / "out")), progress=False)
    assert report["train"]["dropped"]["image cannot be decoded"] >= 1
    assert report["train"]["dropped"]["not an image of the set"] == 1
    assert report["val"] == {"classes": 3, "images": 6, "dropped": {"image cannot be decoded": 1}}
    with open(tmp_path / "out/dropped.csv", newline="") as file:
        rows = list(csv.reader(file))[1:]
    assert {(row[0], row[1]) for row in rows} >= {
        ("train", f"{first}_77.JPEG"),
        ("val", "ILSVRC2012_val_00000002.JPEG"),
    }
    written = images_of(tmp_path / "out")
    assert f"train/{first}/{first}_78.JPEG" in written
    assert all(data == EXPECTED[name] for name, data in written.items() if name in EXPECTED)
    assert sum(split["images"] for split in report.values()) == len(written)
    # Nothing is written beside the output.
    assert {path.name for path in tmp_path.iterdir()} <= {"archives", "out", ".out.lock"}


@pytest.mark.parametrize("written", [1, 5, 12, 18])
def test_an_interrupted_conversion_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int) -> None:
    monkeypatch.setattr(imagenet, "_PART", 3)
    config = ImageNetConversion(str(write(tmp_path / "archives")), str(tmp_path / "out"))
    count, real = 0, Path.write_bytes

    def dying(path: Path, data: bytes) -> int:
        nonlocal count
        if path.suffix == ".JPEG":
            count += 1
            if count > written:
                real(path, data[:7])
                raise KeyboardInterrupt
        return real(path, data)

    monkeypatch.setattr(Path, "write_bytes", dying)
    with pytest.raises(KeyboardInterrupt):
        convert_imagenet(config, progress=False)
    # A split is shown when it is complete.
    assert (tmp_path / "out/train").exists() == (written >= 15)
    assert not (tmp_path / "out/val").exists()
    count = -100
    convert_imagenet(config, progress=False)
    assert images_of(tmp_path / "out") == EXPECTED
    # Complete parts are not written again: at most one part was repeated.
    assert 100 + count <= len(EXPECTED) - written + 6
    assert not list((tmp_path / "out").glob(".*.partial"))


def test_an_archive_that_ends_early_is_named_and_another_download_resumes(tmp_path: Path) -> None:
    source = write(tmp_path / "archives")
    archive = (source / ARCHIVES["train"]).read_bytes()
    (source / ARCHIVES["train"]).write_bytes(archive[: len(archive) // 2])
    config = ImageNetConversion(str(source), str(tmp_path / "out"))
    with pytest.raises(CorruptDataError, match=r"img_train\.tar' cannot be read to its end"):
        convert_imagenet(config, progress=False)
    assert not (tmp_path / "out/train").exists()
    (source / ARCHIVES["train"]).write_bytes(archive)
    convert_imagenet(config, progress=False)
    assert images_of(tmp_path / "out") == EXPECTED


def test_what_is_not_the_conversions_is_never_touched(tmp_path: Path) -> None:
    source = write(tmp_path / "archives")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="choose a new or empty folder"):
        convert_imagenet(ImageNetConversion(str(source), str(tmp_path / "out")), progress=False)
    assert files_of(tmp_path / "out") == {"mine.txt": b"mine"}
    convert_imagenet(ImageNetConversion(str(source), str(tmp_path / "other"), ("train",)), progress=False)
    with pytest.raises(FileExistsError, match="check: True there, False now"):
        convert_imagenet(ImageNetConversion(str(source), str(tmp_path / "other"), check=False), progress=False)
    write(source, {**TRAIN, SYNSETS[0]: {f"{SYNSETS[0]}_1.JPEG": jpeg(1) + bytes(30_000)}})
    with pytest.raises(FileExistsError, match="bytes"):
        convert_imagenet(ImageNetConversion(str(source), str(tmp_path / "other"), ("train",)), progress=False)
    (source / ARCHIVES["train"]).write_bytes(tar_of({"n00000007/n00000007_1.JPEG": jpeg(1)}))
    with pytest.raises(ValueError, match="is no archive of a class"):
        convert_imagenet(ImageNetConversion(str(source), str(tmp_path / "third"), ("train",)), progress=False)


@pytest.mark.parametrize("script", ["datasets/imagenet.py", "-m mmod"])
def test_command_lines_unpack_and_end_with_one_message(tmp_path: Path, script: str) -> None:
    words = ["data", "imagenet"] if script == "-m mmod" else []
    done = run_script(script, *words, str(tmp_path / "archives"), str(tmp_path / "out"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert ARCHIVES["train"] in done.stderr
    write(tmp_path / "archives")
    done = run_script(script, *words, str(tmp_path / "archives"), str(tmp_path / "out"), "--splits", "[val]")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["val"]["images"] == len(VAL)
    assert "unpack val: 1 of 1 part" in done.stderr
