"""Shards of small grey images with classes."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from mmod.data.readers.shards import ShardSource
from tests.kit.pair_files import write_tar


def png(value: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (8, 8), value).save(file, format="PNG")
    return file.getvalue()


def sample(key: int) -> dict[str, bytes]:
    return {f"{key:04d}.png": png(key), f"{key:04d}.cls": str(key % 10).encode()}


def write_samples(path: Path, keys: range) -> Path:
    return write_tar(path, {name: data for key in keys for name, data in sample(key).items()})


def read_all(source: ShardSource) -> list[tuple[int, int]]:
    samples = [source.read(index, "L") for index in range(len(source))]
    return [(int(np.asarray(image)[0, 0]), label) for image, label in samples]
