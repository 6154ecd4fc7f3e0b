"""Small studies of images."""

from __future__ import annotations

from pathlib import Path

from mmod.training.image.config import TrainConfig
from tests.kit.sets import SETS

MODEL = {"patch_size": 8, "in_chans": 1, "num_classes": 10, "embed_dim": 16, "depth": 3, "num_heads": 2}


def config(folder: Path, **changes: object) -> TrainConfig:
    fields: dict[str, object] = {
        "output": str(folder / "run"),
        "model": {"name": "vit_tiny_patch16_224", "args": {**MODEL, "img_size": 32}},
        "data": {"source": "digits:tiny", "root": str(SETS / "digits"), "image_size": 32, "channels": 1},
        "epochs": 1,
        "epoch_steps": 1,
    }
    return TrainConfig.from_dict({**fields, **changes})


DENSE = {
    "output": "unused",
    "model": {
        "name": "vit_tiny_patch16_224",
        "args": {"img_size": 32, "patch_size": 8, "in_chans": 1, "num_classes": 10}
        | {"embed_dim": 16, "depth": 4, "num_heads": 2},
    },
    "data": {"source": "digits:tiny", "image_size": 32, "channels": 1, "batch_size": 64},
    "epochs": 1,
}
