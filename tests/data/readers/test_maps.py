"""Photographs with label maps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmod.data.config import DataConfig
from mmod.data.corrupt import CorruptDataError
from mmod.data.loader import image_stream


def save(root: Path, name: str, pixels: np.ndarray, labels: np.ndarray | None, split: str = "test") -> None:
    for folder in ("images", "labels"):
        (root / folder / split).mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(root / "images" / split / f"{name}.png")
    if labels is not None:
        Image.fromarray(labels.astype(np.uint8)).save(root / "labels" / split / f"{name}.png")


def config(folder: Path, **changes: object) -> DataConfig:
    values: dict[str, object] = {"source": "maps:32", "root": str(folder), "val_split": "test", "label_patch": 8}
    return DataConfig(**{**values, "channels": 3, "mean": (0.0,) * 3, "std": (1.0,) * 3, "batch_size": 2, **changes})


def test_the_middle_square_of_image_and_map_go_together(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for name, (height, width) in {"a": (64, 96), "b": (128, 64), "c": (64, 64)}.items():
        labels = np.kron(draw.integers(0, 5, (height // 16, width // 16)), np.ones((16, 16), int))
        save(tmp_path, name, 50 * np.stack([labels] * 3, axis=-1), labels)
    stream = image_stream(config(tmp_path, image_size=32))
    count = 0
    for images, classes in stream.batches(0):
        # Every patch is of one colour inside, fifty times its class.
        middle = images[:, 0].unflatten(1, (4, 8)).unflatten(3, (4, 8))[:, :, 3:5, :, 3:5].mean((2, 4)) * 255 / 50
        assert np.allclose(middle.flatten(1), classes, atol=0.3)
        count += len(classes)
    assert count == 3


def test_folders_inside_are_read_and_what_is_left_out_is_told(tmp_path: Path) -> None:
    for place in ("test", "test/city/street"):
        save(tmp_path, "a", np.zeros((32, 32, 3)), np.ones((32, 32)), place)
    for other in ("notes.txt", "city/.DS_Store", "@eaDir/a.png"):
        path = tmp_path / "images/test" / other
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"no picture")
    with pytest.warns(
        UserWarning, match=r"images/test: left out are .*: @eaDir \(1\); .*\.DS_Store \(1\); .*\.txt \(1\)"
    ):
        stream = image_stream(config(tmp_path, image_size=32))
    assert [classes.tolist() for _, classes in stream.batches(0)] == [[[1] * 16] * 2]


def test_smaller_images_keep_the_labels_of_the_square(tmp_path: Path) -> None:
    labels = np.kron(np.arange(16).reshape(4, 4), np.ones((8, 8), int))
    save(tmp_path, "a", np.stack([labels] * 3, axis=-1), labels)
    for size in (32, 16):
        images, classes = next(iter(image_stream(config(tmp_path, image_size=size, batch_size=1)).batches(0)))
        assert images.shape == (1, 3, size, size)
        assert classes.tolist() == [list(range(16))]


def test_what_does_not_fit_is_told(tmp_path: Path) -> None:
    pixels = np.zeros((32, 32, 3))
    save(tmp_path, "a", pixels, None)
    with pytest.raises(ValueError, match=r"lacks 1 of 1 label maps, the first a\.png"):
        image_stream(config(tmp_path))
    with pytest.raises(ValueError, match="which does not exist"):
        image_stream(config(tmp_path, val_split="train"))
    save(tmp_path, "a", pixels, np.zeros((16, 32)))
    with pytest.raises(CorruptDataError, match=r"the label map a\.png has 32x16 pixels and mode L; it must have 32x32"):
        list(image_stream(config(tmp_path)).batches(0))
    save(tmp_path, "b", pixels, np.zeros((32, 32)))
    skipping = image_stream(config(tmp_path, on_corrupt="skip"))
    assert sum(len(classes) for _, classes in skipping.batches(0)) == 1
    assert len(skipping.report.faults) == 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_photograph_lies_on_its_upright_map(tmp_path: Path, orientation: int) -> None:
    upright = np.random.default_rng(0).integers(1, 5, (4, 4)).repeat(8, 0).repeat(8, 1).astype(np.uint8)
    save(tmp_path, "a", np.zeros((32, 32, 3)), upright)
    # What a camera stores, such that applying the orientation makes it upright again.
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.T,
        6: np.rot90(upright),
        7: np.rot90(upright, 2).T,
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = np.stack([50 * stored] * 3, -1).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "images" / "test" / "a.png", exif=exif)
    images, classes = next(image_stream(config(tmp_path, image_size=32)).batches(0))
    middle = images[0, 0].unflatten(0, (4, 8)).unflatten(2, (4, 8))[:, 3:5, :, 3:5].mean((1, 3)) * 255 / 50
    assert np.allclose(middle.flatten(), classes[0], atol=0.3)


def test_a_map_without_any_class_is_a_fault(tmp_path: Path) -> None:
    save(tmp_path, "a", np.zeros((32, 32, 3)), np.full((32, 32), 255))
    save(tmp_path, "b", np.zeros((32, 32, 3)), np.where(np.eye(32) > 0, 3, 255))
    with pytest.raises(CorruptDataError, match=r"a\.png\]: the label map has no pixel with a class"):
        list(image_stream(config(tmp_path)).batches(0))
    ((_, classes),) = image_stream(config(tmp_path, on_corrupt="skip")).batches(0)
    assert classes.tolist() == np.where(np.eye(4) > 0, 3, -100).reshape(1, -1).tolist()
