"""Small runs on pairs, for the tests and for the processes they start and kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmod.training import FitResult, fit
from mmod.training.pairs.config import TrainConfig
from mmod.training.pairs.evaluate import EvalResult

MODEL = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "layers": 2, "width": 16, "head_width": 8, "patch_size": 8},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2},
}


def write_model(folder: Path, name: str = "test-clip", **changes: Any) -> dict[str, str]:
    """Write a model config and return the fields that name it."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps(MODEL | changes))
    return {"name": name, "config": str(path)}


def clip_config(folder: Path, output: str, **changes: Any) -> dict[str, Any]:
    """Return the fields of a config for the shards in `folder`, with some fields changed."""
    data = {"train": f"{folder}/train-*.tar", "val": f"{folder}/val-*.tar", "batch_size": 8}
    fields: dict[str, Any] = {
        "output": str(folder / output),
        "model": write_model(folder) | changes.pop("model", {}),
        "data": data | changes.pop("data", {}),
        "augment": None,
        "epochs": 1,
        "device": "cpu",
        "optim": {"opt": "sgd", "lr": 0.1},
    }
    return fields | changes


def run(fields: dict[str, Any]) -> FitResult[EvalResult]:
    """Train as the fields say."""
    return fit(TrainConfig.from_dict(fields), progress=False)
