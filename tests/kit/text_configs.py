"""Small configs of training on text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmod.io.yaml import merged
from mmod.training.text.config import TrainConfig

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
PREDICTOR = {
    "preset": "mod",
    "capacity": 0.25,
    "gate": "sigmoid",
    "losses": {"membership": 0.1},
    "language": {"inference_threshold": 0.5, "predictor": True},
}
SCORE = {**PREDICTOR, "language": {"inference_threshold": 0.5}}


def text_config(output: Path, **changes: Any) -> TrainConfig:
    fields = {
        "output": str(output),
        "model": {"config": LLAMA},
        "data": {"length": 32, "batch_size": 4, "val_limit": 6},
        "epochs": 2,
        "epoch_steps": 3,
        "optim": {"lr": 3e-3},
        "device": "cpu",
    }
    return TrainConfig.from_dict(merged(fields, changes))
