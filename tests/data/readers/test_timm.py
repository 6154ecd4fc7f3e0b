from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from mmod.data import DataConfig, image_stream
from mmod.data.labels import ModelClasses
from mmod.data.readers.timm import TimmSource


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
        DataConfig(name)


@pytest.mark.parametrize(
    "name",
    ["fodler", "Folders", "digit", "shard:x.tar", "folder:x", "torch/cifar", "torch/", "torch", "hfds/x", "tfds"],
)
def test_unknown_sources_are_refused_before_anything_is_read(tmp_path, name):
    with pytest.raises(ValueError, match=rf"source '{name}' is unknown; valid: digits, .*folder, .*cifar10"):
        DataConfig(name, str(tmp_path))


@pytest.mark.parametrize("name", ["folder", "torch/cifar10", "TORCH/MNIST", "digits"])
def test_known_sources_stay_possible(name):
    assert DataConfig(name).source == name


class Rows(list):
    """A set of torchvision whose rows may have any label."""

    def __init__(self, labels, class_to_idx=None):
        super().__init__((Image.new("RGB", (8, 8)), label) for label in labels)
        self.class_to_idx = class_to_idx or {}


def test_labels_of_rows_are_classes_or_faults(monkeypatch):
    def read(labels, class_to_idx=None, model=None):
        monkeypatch.setattr("mmod.data.readers.timm._open", lambda *_: Rows(labels, class_to_idx))
        return TimmSource("torch/places365", None, "val", model=model)

    for label in (-1, None, 0.5, [1]):
        source = read([2, label])
        assert source.labels() == [2, -1]
        with pytest.raises(ValueError, match="is no class"):
            source.read(1, "RGB")
    source = read([1, 0, 5], {"cat": 0, "dog": 1}, ModelClasses({"dog": 0, "sea": 1, "cat": 2}, "the run"))
    assert [source.read(index, "RGB")[1] for index in range(2)] == [0, 2]
    with pytest.raises(ValueError, match="class 5 has no name among 2"):
        source.read(2, "RGB")


def test_targets_of_torchvision_may_be_a_tensor(monkeypatch):
    rows = SimpleNamespace(targets=torch.tensor([3, 0]), __len__=lambda: 2)
    monkeypatch.setattr("mmod.data.readers.timm._open", lambda *_: rows)
    assert TimmSource("torch/mnist", None, "val").labels() == [3, 0]
