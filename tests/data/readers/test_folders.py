"""Folders of images: one meaning for every reader, and what is left out is told."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from mmod.data import DataConfig, image_stream
from mmod.data.labels import Classes, ModelClasses, match_classes
from mmod.data.readers.folders import FolderSource, map_folders, walk_images
from mmod.data.readers.images import EXTENSIONS
from mmod.io.progress import warn_once
from mmod.opening.opened import Opened, Preprocessing
from mmod.studies.advised import read_images


def save(path: Path, value: int, kind: str | None = None) -> None:
    """Save an image of one colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (value,) * 3).save(path, kind)


def stream_of(root: Path, training: bool = False, **options: Any) -> Any:
    fields: dict[str, Any] = {
        "source": "folder",
        "channels": 3,
        "image_size": 8,
        "crop_pct": 1.0,
        "batch_size": 4,
        "mean": (0.0,) * 3,
        "std": (1.0,) * 3,
    }
    return image_stream(DataConfig(root=str(root), **{**fields, **options}), 0 if training else None)


def pairs_of(batches: Any) -> list[tuple[int, int]]:
    """Return grey value and label of every image, in order of both."""
    return sorted(
        (round(float(image.mean() * 255)), int(label))
        for images, labels in batches
        for image, label in zip(images, labels)
    )


def advice_on(folder: Path, classes: dict[str, int]) -> tuple[Any, str]:
    fields = {"input_size": (3, 8, 8), "mean": (0.0,) * 3, "std": (1.0,) * 3, "crop_pct": 1.0}
    model: Any = torch.nn.Linear(1, len(classes))
    model.num_classes = len(classes)
    opened = Opened(model, "of a test", lambda: Preprocessing(fields, "of a test"), classes)
    return read_images(str(folder), opened, 99, "raise")[:2]


def flat(name: str, number: int) -> str:
    return f"{name}/{number}.png"


# Where images lie; what else lies there, by the words of what is told.
LAYOUTS: dict[str, tuple[Callable[[str, int], str], str, list[str]]] = {
    "plain": (flat, "", []),
    "equal folders": (lambda name, number: f"{name}/{('indoor', 'outdoor')[number % 2]}/{number}.png", "", []),
    "own folders": (lambda name, number: f"{name}/{name}-{number % 2}/more/{number}.png", "", []),
    "some images deeper": (lambda name, number: f"{name}/{'more/' * (number % 3)}{number}.png", "", []),
    "a notebook's": (flat, ".ipynb_checkpoints (2)", [".ipynb_checkpoints/a.png", "cat/.ipynb_checkpoints/b.png"]),
    "of macOS": (flat, "__MACOSX (1)", ["__MACOSX/cat/._0.png", "dog/._0.png"]),
    "of a network drive": (flat, "@eaDir (2)", ["@eaDir/a.jpg", "dog/@eaDir/0.png/thumb.jpg"]),
    "hidden files": (flat, "hidden files: .DS_Store (2)", ["cat/.DS_Store", "dog/.DS_Store"]),
    "other files": (flat, ".csv (1), .heic (1), .txt (1)", ["cat/notes.txt", "list.csv", "cat/0.HEIC"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_reader_has_the_same_classes_and_tells_what_it_leaves_out(layout: str, tmp_path: Path) -> None:
    place, told, others = LAYOUTS[layout]
    for split in ("train", "val"):
        for value, name in ((60, "cat"), (180, "dog")):
            for number in range(4):
                save(tmp_path / split / place(name, number), value)
        for other in others:
            save(tmp_path / split / other, 250, "PNG")
    expected = [(60, 0)] * 4 + [(180, 1)] * 4
    for training in (False, True):
        # The readers share folders, of which a process warns once.
        warn_once.cache_clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            stream = stream_of(tmp_path, training)
        assert stream.classes.numbers == {"cat": 0, "dog": 1}
        assert pairs_of(stream.batches(0)) == expected
        said = " ".join(str(warning.message) for warning in caught)
        assert told in said
        assert bool(said) == bool(told)
    (images, labels), note = advice_on(tmp_path / "val", {"cat": 0, "dog": 1})
    assert pairs_of([(images, labels)]) == expected
    assert told in note
    assert bool(note) == bool(told)


def test_every_format_that_is_decoded_is_read_from_folders(tmp_path: Path) -> None:
    Image.init()
    endings = {ending: kind for kind, names in EXTENSIONS.items() if kind in Image.SAVE for ending in names}
    for ending, kind in endings.items():
        for folder in ("val/a", "images/val"):
            save(tmp_path / folder / f"{ending}.{ending}", 9, kind)
            save(tmp_path / folder / f"upper-{ending}.{ending.upper()}", 9, kind)
        (tmp_path / "labels/val").mkdir(parents=True, exist_ok=True)
        for stem in (ending, f"upper-{ending}"):
            Image.new("L", (8, 8)).save(tmp_path / f"labels/val/{stem}.png")
    assert stream_of(tmp_path).num_samples == 2 * len(endings)
    assert len(pairs_of(stream_of(tmp_path).batches(0))) == 2 * len(endings)
    maps = stream_of(tmp_path, source="maps:8", label_patch=8)
    assert sum(len(labels) for _, labels in maps.batches(0)) == 2 * len(endings)


def test_a_file_of_names_makes_a_class_of_any_folder(tmp_path: Path) -> None:
    for name in ("@home", "__background__", ".hidden", "cat"):
        save(tmp_path / "val" / name / "0.png", 60)
    (tmp_path / "names.txt").write_text("cat\n@home\n__background__")
    with pytest.warns(UserWarning, match=r"folders whose names begin with \. or __ or @ .*: \.hidden \(1\)"):
        stream = stream_of(tmp_path, classes=str(tmp_path / "names.txt"))
    assert sorted(label for _, label in pairs_of(stream.batches(0))) == [0, 1, 2]


def test_a_file_numbers_the_classes_of_folders(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        save(tmp_path / "val" / name / "0.png", 60)
    for name, content in {"map.txt": "\ufeffdog \r\ncat\r\n", "map.json": '["dog", "cat"]'}.items():
        (tmp_path / name).write_text(content, newline="")
        stream = stream_of(tmp_path, classes=str(tmp_path / name))
        assert sorted(label for _, label in pairs_of(stream.batches(0))) == [0, 1]
        assert stream.classes is not None
        assert stream.classes.numbers == {"dog": 0, "cat": 1}
    (tmp_path / "map.txt").write_bytes("dog\ncat".encode("utf-16"))
    with pytest.raises(ValueError, match=r"map\.txt' is no text in UTF-8 but in UTF-16: save it as UTF-8"):
        stream_of(tmp_path, classes=str(tmp_path / "map.txt"))
    with pytest.raises(ValueError, match=r"data\.options=.* are arguments of torch/NAME, which source 'folder' is not"):
        stream_of(tmp_path, options={"input_key": ".png"})


def test_a_link_to_a_folder_above_is_no_copy_of_its_images(tmp_path: Path) -> None:
    save(tmp_path / "a" / "0.png", 60)
    (tmp_path / "a" / "again").symlink_to(tmp_path)
    (tmp_path / "b").symlink_to(tmp_path / "a")
    images, reasons = walk_images(str(tmp_path))
    assert {name: len(paths) for name, paths in images.items()} == {"a": 1, "b": 1}
    assert reasons == ["links to a folder that holds them: again (2)"]


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a" / "0.png", 60)
    scan = os.scandir

    def refuse(path: str) -> Any:
        if str(path).endswith("/a"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match="/a"):
        walk_images(str(tmp_path))


def test_a_folder_of_splits_is_no_set_of_classes(tmp_path: Path) -> None:
    for split in ("train", "val"):
        save(tmp_path / split / "cat" / "0.png", 60)
    with pytest.raises(ValueError, match=rf"holds splits, train, val, and no class folders: .* as {tmp_path}/train"):
        advice_on(tmp_path, {"cat": 0, "dog": 1})


def test_images_beside_class_folders_have_no_label_in_advice(tmp_path: Path) -> None:
    save(tmp_path / "0.png", 60)
    save(tmp_path / "cat" / "0.png", 60)
    images, note = advice_on(tmp_path, {"cat": 0, "dog": 1})
    assert len(images) == 2
    assert note == "Labels are not used: some images are in no class folder, beside cat."


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for split, classes in (("train", "abc"), ("validation", "abc"), ("odd", "ac")):
        for number, label in enumerate(classes):
            (tmp_path / split / label).mkdir(parents=True)
            Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / split / label / "0.png")
    return tmp_path


@pytest.mark.parametrize(("split", "folder"), [("train", "train"), ("val", "validation"), ("validation", "validation")])
def test_a_split_is_a_folder_under_any_of_its_usual_names(root: Path, split: str, folder: str) -> None:
    source = FolderSource(str(root), split)
    assert [source.read(index, "RGB")[1] for index in range(len(source))] == [0, 1, 2]
    (root / folder / "b" / "0.png").write_bytes(b"broken")
    with pytest.raises(ValueError, match="image of 6 bytes"):
        source.read(1, "RGB")
    assert source.place(1) == (str(root / folder / "b/0.png"), "")


def test_a_split_named_by_a_synonym_is_said_to_be_read(root: Path) -> None:
    assert FolderSource(str(root), "valid").left_out == f"the split 'valid' of {root} is read from {root}/validation"
    assert FolderSource(str(root), "val").left_out == ""
    assert not FolderSource(str(root), "train").left_out
    (root / "2024").mkdir()
    shutil.copytree(root / "odd", root / "2024/val")
    for split in ("2024/val", "odd/", "./odd"):
        assert not FolderSource(str(root), split, train_split=split).left_out


def test_no_split_is_the_folder_itself(root: Path) -> None:
    assert len(FolderSource(str(root / "odd"), "")) == 2


def test_a_split_with_fewer_classes_has_the_numbers_of_the_training_split(root: Path) -> None:
    source = FolderSource(str(root), "odd")
    assert [source.read(index, "RGB")[1] for index in range(2)] == source.labels() == [0, 2]
    assert str(source.classes) == "2 of 3 classes, matched by name"


def test_classes_are_in_timms_order(tmp_path: Path) -> None:
    names = [*(str(number) for number in range(12)), "b", "A", "a10", "a9"]
    for number, label in enumerate(names):
        save(tmp_path / "val" / label / "0.png", number)

    def read(**options: Any) -> dict[str, int]:
        source = FolderSource(str(tmp_path), "val", **options)
        samples = [source.read(index, "RGB") for index in range(len(source))]
        assert source.labels() == [label for _, label in samples]
        return {names[image.getpixel((0, 0))[0]]: label for image, label in samples}

    assert read() == {label: number for number, label in enumerate([*names[:12], "A", "a9", "a10", "b"])}
    numbers = {label: number for number, label in enumerate(reversed(names))}
    assert read(model=ModelClasses(numbers, "the model")) == numbers


def test_a_file_names_the_classes_of_the_model(root: Path) -> None:
    (root / "names.txt").write_text("\n".join("dcba"))
    config = DataConfig("folder", str(root), val_split="odd", channels=3, classes=str(root / "names.txt"))
    stream = image_stream(config)
    assert next(stream.batches(0))[1].tolist() == [3, 1]
    assert str(stream.classes) == "2 of 4 classes, matched by name"
    (root / "names.txt").write_text("a\nb")
    with pytest.raises(ValueError, match=r"odd has classes that .*names\.txt does not name: c; it names a, b"):
        image_stream(config)


def test_a_set_that_joins_classes_of_the_model_is_refused(root: Path) -> None:
    joined = {"a": 0, "b": 0, "c": 1}
    apart = ModelClasses({"a": 0, "b": 1, "c": 2}, "the run")
    with pytest.raises(ValueError, match=r"the number 0 stands for several classes of the model.* one number in the "):
        match_classes(Classes(joined), "abc", apart, "a set")
    # A model may have one number for several names.
    assert FolderSource(str(root), "val", model=ModelClasses(joined, "the run")).labels() == [0, 0, 1]


def tree(text: str) -> list[str]:
    """Return the paths of a text such as "train/abc odd/a", in which every letter is a class of one image."""
    places = [word.rpartition("/") for word in text.split()]
    return [f"{folder}/{label}/0.png" for folder, _, labels in places for label in labels]


# Files, whether for training, values of the config, and what the message says of the folder {root}.
REFUSED: list[tuple[list[str], bool, dict[str, Any], str]] = [
    ([], True, {}, "is no folder"),
    (tree("odd/a train/a validation/a"), False, {"val_split": "test"}, "for the split 'test'; it has: odd, train, val"),
    (
        tree("odd/ac train/abc validation/abc"),
        False,
        {"train_split": "odd"},
        "validation has class folders that .*odd lacks, so labels would not agree: b",
    ),
    (
        [*tree("train/ab val/a"), "val/bb/0.png"],
        False,
        {},
        r"val has class folders that {root}/train lacks, .*: bb \(near ones: b\)\. Rename them, or list the classes of",
    ),
    ([*tree("train/abc val/ac"), "val/b/note.txt"], False, {}, r"without readable images: {root}/val/b\. Remove them"),
    ([*tree("train/ac val/abc"), "train/b/note.txt"], False, {}, r"without readable images: {root}/train/b\. Remove"),
    (
        ["train/a/below/", "train/b/below/0.png", "train/c/below/", "train/.cache/"],
        True,
        {},
        r"images: {root}/train/a, {root}/train/c\. Remove them",
    ),
    (["train/a/note.txt"], True, {}, r"train holds no image that is read; .* jpg, .*left out are .*: \.txt \(1\)"),
    (["val/ILSVRC2012_val_00000001.JPEG"], False, {}, "val has images outside class folders"),
    # One stray image would move all classes by one.
    ([*tree("train/abc"), "train/stray.png"], True, {}, "train has images outside class folders"),
]


@pytest.mark.parametrize(("files", "training", "fields", "message"), REFUSED)
def test_folders_that_would_shift_labels_are_refused(
    files: list[str], training: bool, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    root = tmp_path / "set"
    for name in files:
        folder = name if name.endswith("/") else name.rpartition("/")[0]
        (root / folder).mkdir(parents=True, exist_ok=True)
        if name.endswith(".txt"):
            (root / name).write_text("no image")
        elif not name.endswith("/"):
            save(root / name, 60)
    with pytest.raises(ValueError, match=message.format(root=root)):
        image_stream(DataConfig("folder", str(root), channels=3, **fields), 0 if training else None)


def test_a_root_beside_the_right_one_is_told_which(tmp_path: Path) -> None:
    for name in tree("train/ab val/ab"):
        save(tmp_path / "shapes" / name, 60)
    shapes = tmp_path / "shapes"
    for root, message in {
        shapes / "train": rf"train has no folder for the split 'val'; its parent '{shapes}' has one: .* has: a, b$",
        tmp_path / "shpes": rf"data.root='{tmp_path}/shpes' is no folder; near ones: {shapes}$",
        tmp_path / "other": rf"data.root='{tmp_path}/other' is no folder$",
    }.items():
        with pytest.raises(ValueError, match=message):
            image_stream(DataConfig("folder", str(root)))
    with pytest.raises(ValueError, match=rf"labels? .*shpes/images/val, .* data\.root; near ones: {shapes}$"):
        map_folders(tmp_path / "shpes", "val")
    with pytest.raises(ValueError, match=r"images/val, which does not exist: name its root by data\.root$"):
        map_folders(shapes, "val")


def test_what_a_model_names_or_needs_no_label_is_read(tmp_path: Path) -> None:
    for name in ("a/0.png", "c/0.png", "1.png"):
        save(tmp_path / "val" / name, 60)
    (tmp_path / "val" / "b").mkdir()
    assert FolderSource(str(tmp_path), "val", labelled=False).classes is None
    (tmp_path / "val" / "1.png").unlink()
    assert FolderSource(str(tmp_path), "val", model=ModelClasses({"a": 4, "c": 1}, "the run")).labels() == [4, 1]
