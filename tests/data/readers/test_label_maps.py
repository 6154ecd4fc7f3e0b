"""Label maps: the class of each patch from the classes of its pixels."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mmod.data.config import DataConfig
from mmod.data.corrupt import CorruptDataError
from mmod.data.loader import image_stream
from mmod.data.readers.shards import parse_patches
from mmod.data.synthetic.crowds import DIFFICULTIES as CROWDS
from mmod.data.synthetic.crowds import compose_crowds
from mmod.io.files import open_shard
from tests.kit.deep_images import encode_image

png_of = functools.partial(encode_image, kind="PNG")


def slow_patches(labels: np.ndarray, side: int) -> list[int]:
    """Count pixel by pixel; the smallest of the most frequent classes but 255, -100 where there is none."""
    patches = []
    for top in range(0, len(labels), side):
        for left in range(0, len(labels), side):
            counts = Counter(int(label) for label in labels[top : top + side, left : left + side].flat if label != 255)
            patches.append(min(counts, key=lambda label: (-counts[label], label), default=-100))
    return patches


@given(seed=st.integers(0, 2**32), side=st.integers(1, 5), steps=st.integers(1, 4), classes=st.integers(1, 256))
def test_a_patch_has_the_class_of_most_of_its_pixels(seed: int, side: int, steps: int, classes: int) -> None:
    size = side * steps
    labels = np.random.default_rng(seed).integers(0, classes, (size, size)).astype(np.uint8)
    paletted = Image.fromarray(labels, "P")
    paletted.putpalette([255 - number // 3 for number in range(768)])
    for image in (Image.fromarray(labels), paletted):
        assert parse_patches(png_of(image), side) == slow_patches(labels, side)


@given(seed=st.integers(0, 2**32), side=st.integers(1, 4), steps=st.integers(1, 4), share=st.floats(0, 1))
def test_pixels_of_255_have_no_class(seed: int, side: int, steps: int, share: float) -> None:
    draw, size = np.random.default_rng(seed), side * steps
    labels = draw.integers(0, 5, (size, size)).astype(np.uint8)
    labels[draw.random((size, size)) < share] = 255
    if (labels == 255).all():
        with pytest.raises(ValueError, match="no pixel with a class: all are 255"):
            parse_patches(png_of(Image.fromarray(labels)), side)
        return
    assert parse_patches(png_of(Image.fromarray(labels)), side) == slow_patches(labels, side)


@pytest.fixture(scope="module")
def crowds(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    config = DataConfig("crowds:tiny", root=str(tmp_path_factory.mktemp("crowds")), batch_size=10, label_patch=4)
    image_stream(config, 0)
    return config


def test_streams_give_each_patch_its_class_however_they_are_read(crowds: DataConfig) -> None:
    scenes = list(compose_crowds(CROWDS["tiny"], "val"))
    expected = torch.tensor([slow_patches(scene.labels, 4) for scene in scenes])
    shards = f"shards:{crowds.root}/{{split}}-*.tar"
    config = replace(crowds, source=shards, crop_pct=0.5, workers=2, mean=(0.094,), std=(0.22,))
    batches = [list(image_stream(source).batches(0)) for source in (crowds, config)]
    for (images, labels), (others, other_labels) in zip(*batches, strict=True):
        torch.testing.assert_close(images, others, rtol=0, atol=1e-5)
        assert torch.equal(labels, other_labels)
    assert torch.equal(torch.cat([labels for _, labels in batches[0]]), expected)
    assert next(image_stream(crowds, 0).batches(0))[1].shape == (10, 64)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (Image.new("L", (8, 16)), "8x16 pixels and mode L; it must be square"),
        (Image.new("RGB", (8, 8)), "8x8 pixels and mode RGB; it must be square"),
        (Image.new("L", (9, 9)), "9x9 pixels and mode L; it must be square with a multiple of 4 pixels"),
    ],
)
def test_what_is_no_label_map_is_a_fault_of_its_sample(tmp_path: Path, labels: Image.Image, message: str) -> None:
    with open_shard(tmp_path / "val-0.tar") as writer:
        writer.write({"__key__": "0", "png": png_of(Image.new("L", (8, 8))), "seg.png": png_of(labels)})
    config = DataConfig(f"shards:{tmp_path}/{{split}}-0.tar", image_size=8, label_patch=4)
    with pytest.raises(CorruptDataError, match=message):
        next(image_stream(config).batches(0))
