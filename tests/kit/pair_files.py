"""Small shards of pairs, good and damaged, for the tests."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor


def png(value: int, side: int = 8) -> bytes:
    """Encode a plain RGB image."""
    file = io.BytesIO()
    noise = np.random.default_rng(value).integers(0, 255, (side, side, 3), np.uint8)
    noise[0, 0] = value % 256
    Image.fromarray(noise).save(file, format="PNG")
    return file.getvalue()


def pair(key: int) -> dict[str, bytes]:
    """Return the members of a good sample."""
    return {f"{key:06d}.png": png(key), f"{key:06d}.txt": f"number {key}".encode(), f"{key:06d}.json": b"{}"}


def write_tar(path: Path, members: dict[str, bytes], mode: str = "w") -> Path:
    """Write a tar file."""
    with tarfile.open(path, mode, format=tarfile.USTAR_FORMAT) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def write_pairs(path: Path, keys: range) -> Path:
    """Write a shard of good samples."""
    return write_tar(path, {name: data for key in keys for name, data in pair(key).items()})


def transform(image: Image.Image) -> Tensor:
    """Return the pixels as a tensor (C, H, W)."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float()


def tokenizer(captions: list[str]) -> Tensor:
    """Return the number that a caption ends in."""
    return torch.tensor([[int(caption.split()[-1])] for caption in captions])
