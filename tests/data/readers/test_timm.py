import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from mmod.data import DataConfig, image_stream
from mmod.data.labels import ModelClasses
from mmod.data.readers.images import UnreadableSampleError
from mmod.data.readers.timm import TimmSource


@pytest.fixture
def root(tmp_path) -> Path:
    for split, classes in (("train", "abc"), ("validation", "abc"), ("odd", "ac")):
        for number, label in enumerate(classes):
            (tmp_path / split / label).mkdir(parents=True)
            Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / split / label / "0.png")
    return tmp_path


@pytest.mark.parametrize(("split", "folder"), [("train", "train"), ("val", "validation"), ("validation", "validation")])
def test_a_split_is_a_folder_under_any_of_its_usual_names(root, split, folder):
    source = TimmSource("folder", str(root), split)
    assert [source.read(index, "RGB")[1] for index in range(len(source))] == [0, 1, 2]
    (root / folder / "b" / "0.png").write_bytes(b"broken")
    with pytest.raises(UnreadableSampleError, match=f"{folder}/b/0.png: image of 6 bytes"):
        source.read(1, "RGB")


def test_no_split_is_the_folder_itself(root):
    assert len(TimmSource("", str(root / "odd"), "")) == 2


def test_a_missing_split_is_an_error_not_the_whole_root(root):
    with pytest.raises(ValueError, match=r"has no folder for the split 'test'; it has: odd, train, validation"):
        TimmSource("folder", str(root), "test")
    with pytest.raises(ValueError, match="is no folder"):
        TimmSource("folder", str(root / "nowhere"), "train")


def test_a_split_with_fewer_classes_has_the_numbers_of_the_training_split(root):
    for options in ({}, {"class_map": {"a": 0, "b": 1, "c": 2}}):
        source = TimmSource("folder", str(root), "odd", options)
        assert [source.read(index, "RGB")[1] for index in range(2)] == source.labels() == [0, 2]
    assert str(TimmSource("folder", str(root), "odd").classes) == "2 of 3 classes, matched by name"


def test_torchvision_sets_are_read_by_their_own_names(tmp_path):
    # A CIFAR-10 test split of two images, written in the format that torchvision reads.
    import hashlib
    import pickle

    from torchvision.datasets import CIFAR10

    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()
    rows = np.arange(2 * 3072, dtype=np.int64).reshape(2, 3072).astype(np.uint8)
    (folder / "test_batch").write_bytes(pickle.dumps({"data": rows, "labels": [7, 2]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    sums = {name: hashlib.md5((folder / name).read_bytes()).hexdigest() for name in ("test_batch", "batches.meta")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CIFAR10, "test_list", [["test_batch", sums["test_batch"]]])
        patch.setattr(CIFAR10, "train_list", [])
        patch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": sums["batches.meta"]})
        config = DataConfig("torch/cifar10", str(tmp_path), channels=3, crop_pct=1.0, mean=(0.0,) * 3, std=(1.0,) * 3)
        images, classes = next(image_stream(config).batches(0))
    assert classes.tolist() == [7, 2]
    assert np.array_equal((images[0] * 255).round().numpy().astype(np.uint8).ravel(), rows[0])


@pytest.mark.parametrize("name", ["tfds/imagenet2012", "wds/imagenet", "hfids/user/set"])
def test_streams_without_numbered_samples_are_refused(name):
    with pytest.raises(ValueError, match=rf"'{name}' is a stream.*shards:PATTERN"):
        TimmSource(name, "", "train")


@pytest.mark.parametrize("name", ["folder", "torch/image_folder"])
@pytest.mark.parametrize("emptied", ["train", "val"])
def test_a_class_folder_without_images_would_shift_labels(tmp_path, name, emptied):
    for split in ("train", "val"):
        for label in "abc":
            (tmp_path / split / label).mkdir(parents=True)
            if (split, label) != (emptied, "b"):
                Image.new("RGB", (8, 8)).save(tmp_path / split / label / "0.png")
    (tmp_path / emptied / "b" / "note.txt").write_text("no image")
    # torchvision itself refuses such a folder.
    empty = rf"class folders without readable images: {tmp_path}/{emptied}/b\. Remove them"
    message = empty if name == "folder" else "no valid file for the classes b"
    with pytest.raises(ValueError, match=message):
        image_stream(DataConfig(name, str(tmp_path), channels=3))
    if name == "folder":
        chosen = {"class_map": {"a": 0, "c": 1}}
        assert len(TimmSource(name, str(tmp_path), emptied, chosen)) == 2


def test_a_class_folder_without_images_is_named_where_there_is_no_other_split(tmp_path):
    for label in "abc":
        (tmp_path / "train" / label / "below").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "train" / "b" / "below" / "0.png")
    (tmp_path / "train" / ".cache").mkdir()
    with pytest.raises(ValueError, match=rf"images: {tmp_path}/train/a, {tmp_path}/train/c\. Remove them"):
        TimmSource("folder", str(tmp_path), "train")


def test_classes_are_compared_with_those_of_the_training_split_that_is_named(root):
    TimmSource("folder", str(root), "val")
    with pytest.raises(ValueError, match=r"validation and .*odd have images of different classes"):
        image_stream(DataConfig("folder", str(root), train_split="odd"))


@pytest.mark.parametrize(
    "name", ["fodler", "Folders", "digit", "shard:x.tar", "folder:x", "torch/cifar", "torch/", "torch", "hfds/", "tfds"]
)
def test_unknown_sources_are_refused_before_anything_is_read(root, name):
    for make in (lambda: DataConfig(name, str(root)), lambda: TimmSource(name, str(root), "train")):
        with pytest.raises(ValueError, match=rf"source '{name}' is unknown; valid: digits, .*folder, .*cifar10"):
            make()


@pytest.mark.parametrize("name", ["folder", "torch/cifar10", "torch/folder", "TORCH/MNIST", "hfds/user/set", "digits"])
def test_known_sources_stay_possible(name):
    assert DataConfig(name).source == name


def test_a_torchvision_folder_never_falls_back_on_its_root(root):
    with pytest.raises(ValueError, match=r"has no folder for the split 'test'"):
        TimmSource("torch/image_folder", str(root), "test")


def test_a_folder_without_any_image_is_an_error(tmp_path):
    (tmp_path / "train" / "a").mkdir(parents=True)
    with pytest.raises(ValueError, match="source 'folder' cannot be read: Found 0 images"):
        TimmSource("folder", str(tmp_path), "train")


def test_an_image_in_no_class_folder_is_refused(root, tmp_path):
    flat = tmp_path / "flat" / "val"
    flat.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(flat / "ILSVRC2012_val_00000001.JPEG")
    with pytest.raises(ValueError, match="flat/val has images outside class folders"):
        TimmSource("folder", str(tmp_path / "flat"), "val")
    assert TimmSource("folder", str(tmp_path / "flat"), "val", labelled=False).classes is None
    # One stray image would move all classes by one.
    Image.new("RGB", (8, 8)).save(root / "train" / "stray.png")
    with pytest.raises(ValueError, match="train has images outside class folders"):
        TimmSource("folder", str(root), "train")


@pytest.mark.parametrize("name", ["folder", "torch/image_folder", "torch/folder"])
def test_every_reader_of_folders_has_one_order_of_classes(tmp_path, name):
    names = [*(str(number) for number in range(12)), "b", "A", "a10", "a9"]
    for number, label in enumerate(names):
        (tmp_path / "val" / label).mkdir(parents=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / "val" / label / "0.png")
    expected = {label: number for number, label in enumerate([*names[:12], "A", "a9", "a10", "b"])}
    source = TimmSource(name, str(tmp_path), "val")
    read = [source.read(index, "RGB") for index in range(len(source))]
    assert {names[image.getpixel((0, 0))[0]]: label for image, label in read} == expected
    assert source.labels() == [label for _, label in read]
    # The map decides, also for torchvision's reader, which timm gives none.
    chosen = {"class_map": {"3": 1, "a9": 0}}
    mapped = TimmSource(name, str(tmp_path), "val", chosen)
    read = [mapped.read(index, "RGB") for index in range(len(mapped))]
    assert {names[image.getpixel((0, 0))[0]]: label for image, label in read} == {"3": 1, "a9": 0}
    # And so do the names of the model.
    model = ModelClasses({label: number for number, label in enumerate(reversed(names))}, "the model")
    known = TimmSource(name, str(tmp_path), "val", model=model)
    read = [known.read(index, "RGB") for index in range(len(known))]
    assert all(model.numbers[names[image.getpixel((0, 0))[0]]] == label for image, label in read)


def test_a_file_names_the_classes_of_the_model(root):
    (root / "names.txt").write_text("\n".join("dcba"))
    config = DataConfig("folder", str(root), val_split="odd", channels=3, classes=str(root / "names.txt"))
    stream = image_stream(config)
    assert next(stream.batches(0))[1].tolist() == [3, 1]
    assert str(stream.classes) == "2 of 4 classes, matched by name"
    (root / "names.txt").write_text("a\nb")
    with pytest.raises(ValueError, match=r"odd has classes that .*names\.txt does not name: c; it names a, b"):
        image_stream(config)


class Rows:
    """A reader of timm for rows that may hold anything."""

    def __init__(self, labels, class_to_idx=None):
        self.rows, self.class_to_idx = labels, class_to_idx or {}

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        file = io.BytesIO()
        Image.new("RGB", (8, 8)).save(file, "PNG")
        file.seek(0)
        return file, self.rows[index]

    def iter_targets(self):
        return iter(self.rows)


def test_labels_of_rows_are_classes_or_faults(monkeypatch):
    def read(labels, class_to_idx=None, model=None):
        dataset = SimpleNamespace(reader=Rows(labels, class_to_idx))
        monkeypatch.setattr("mmod.data.readers.timm._open", lambda *_: dataset)
        return TimmSource("hfds/user/set", None, "val", model=model)

    for label in (-1, None, 0.5, [1]):
        source = read([2, label])
        assert source.labels() == [2, -1]
        with pytest.raises(UnreadableSampleError, match="is no class"):
            source.read(1, "RGB")
    for label in ("cat", [1, 2]):
        with pytest.raises(ValueError, match=r"the labels of hfds/user/set:None are such as .*options"):
            read([label])
    source = read([1, 0, 5], {"cat": 0, "dog": 1}, ModelClasses({"dog": 0, "sea": 1, "cat": 2}, "the run"))
    assert [source.read(index, "RGB")[1] for index in range(2)] == [0, 2]
    with pytest.raises(UnreadableSampleError, match="class 5 has no name among 2"):
        source.read(2, "RGB")


def test_a_map_that_joins_classes_of_the_model_is_refused(root):
    joined = {"class_map": {"a": 0, "b": 0, "c": 1}}
    assert TimmSource("folder", str(root), "val", joined).labels() == [0, 0, 1]
    apart = ModelClasses({"a": 0, "b": 1, "c": 2}, "the run")
    with pytest.raises(ValueError, match=r"the number 0 stands for several classes of the model.*leave class_map out"):
        TimmSource("folder", str(root), "val", joined, model=apart)
    # A run that was trained with the map has its numbers.
    assert (
        TimmSource("folder", str(root), "val", joined, model=ModelClasses({"a": 0, "b": 0, "c": 1}, "")).labels()[1]
        == 0
    )


def test_targets_of_torchvision_may_be_a_tensor(monkeypatch):
    rows = SimpleNamespace(targets=torch.tensor([3, 0]), __len__=lambda: 2)
    monkeypatch.setattr("mmod.data.readers.timm._open", lambda *_: rows)
    assert TimmSource("torch/mnist", None, "val").labels() == [3, 0]
