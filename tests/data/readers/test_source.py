"""Parts of a data set: spread over the classes, and the same whenever they are drawn."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mmod.data.config import DataConfig
from mmod.data.loader import image_stream
from mmod.random_state import spread


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("photos")
    draw = np.random.default_rng(0)
    for split in ("train", "val"):
        for label, count in (("a", 9), ("b", 5), ("c", 2)):
            (root / split / label).mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 256, (12, 12, 3), np.uint8)
                Image.fromarray(pixels).save(root / split / label / f"{number}.png")
    return str(root)


@given(st.lists(st.integers(-1, 4), min_size=1, max_size=60), st.integers(1, 70), st.integers(0, 3))
def test_spread_takes_as_many_of_every_class_as_there_are(labels: list[int], count: int, seed: int) -> None:
    chosen = spread(labels, count, seed)
    assert len(chosen) == len(set(chosen.tolist())) == min(count, len(labels))
    assert chosen.tolist() == sorted(spread(labels, count, seed).tolist())
    there, taken = Counter(labels), Counter(labels[index] for index in chosen)
    most = max(taken.values())
    assert all(taken[label] >= min(there[label], most - 1) for label in there)


def config(folder: str, **changes: object) -> DataConfig:
    values: dict[str, object] = {"image_size": 12, "channels": 3, "batch_size": 4, "crop_pct": 1.0}
    return DataConfig("folder", root=folder, **{**values, **changes})  # type: ignore[arg-type]


def test_limits_hold_for_their_split_and_name_the_same_images(folder: str) -> None:
    limited = config(folder, train_limit=8, val_limit=5)
    train, val = image_stream(limited, seed=3), image_stream(limited)
    assert (train.num_samples, val.num_samples) == (8, 5)
    labels = torch.cat([labels for _, labels in val.batches(0)])
    assert sorted(Counter(labels.tolist()).values()) == [1, 2, 2]
    epochs = [{image.numpy().tobytes() for images, _ in train.batches(epoch) for image in images} for epoch in (0, 1)]
    assert epochs[0] == epochs[1]
    assert image_stream(config(folder, val_limit=99)).num_samples == 16


def test_shards_know_their_classes(tmp_path: Path) -> None:
    digits = DataConfig("digits:tiny", root=str(tmp_path), val_limit=20, batch_size=64)
    stream = image_stream(digits)
    (batch,) = stream.batches(0)
    assert sorted(Counter(batch[1].tolist()).values()) == [2] * 10


def test_cropping_of_images_that_fit_already_is_told_once(folder: str, recwarn: pytest.WarningsRecorder) -> None:
    image_stream(config(folder))
    image_stream(config(folder, image_size=10, crop_pct=0.9))
    assert not [warning for warning in recwarn if "crop_pct" in str(warning.message)]
    for seed in (None, 0, None):
        # A library that changes the filters for a moment makes Python repeat its warnings.
        with warnings.catch_warnings():
            warnings.simplefilter("always")
        image_stream(config(folder, crop_pct=0.875), seed)
    told = [str(warning.message) for warning in recwarn if "crop_pct" in str(warning.message)]
    assert len(told) == 1
    assert "image_size=12 already: data.crop_pct=0.875 enlarges them" in told[0]
