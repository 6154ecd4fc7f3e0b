"""A tiny model and tiny data for tests of fine-tuning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import mmod
from mmod.data.readers.conversations import ConversationsConfig
from mmod.training.chat.config import ModelConfig, TrainConfig
from tests.kit.sets import SETS

TEXT = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
    "vision_use_head": False,
}
MODEL = {
    "model_type": "llava",
    "vision_config": VISION,
    "text_config": TEXT,
    "vision_feature_select_strategy": "full",
    "vision_feature_layer": -1,
    "image_seq_length": 16,
}
TRAINER = {
    "max_steps": 4,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-3,
    "save_steps": 2,
    "logging_steps": 2,
    "train_sampling_strategy": "group_by_length",
}


P_MOD = {"language": {"preset": "p-mod"}}
GAMMA = {
    "language": {
        "preset": "gamma-mod",
        "depth": 6,
        "blocks": [1, 2],
        "language": {"tokens": "image", "inference_threshold": None},
    }
}
MASKED = {"language": {"preset": "gamma-mod", "depth": 6, "blocks": [1, 2], "language": {"inference_threshold": 0.5}}}

PREDICTOR = {
    "language": {
        "preset": "mod",
        "blocks": [1, 2],
        "capacity": 0.5,
        "language": {"tokens": "image", "inference_threshold": 0.5, "predictor": True},
        "losses": {"membership": 0.01},
    }
}


def vlm_config(folder: Path, name: str = "run", trainer: dict[str, Any] | None = None, **changes: Any) -> TrainConfig:
    """Return the config of a run of a few steps; the data is built in `folder` once."""
    fields: dict[str, Any] = {
        "output": str(folder / name),
        "model": ModelConfig(config=MODEL, processor="words"),
        "data": ConversationsConfig("questions:tiny/train", "questions:tiny/val", root=str(SETS / "questions")),
        "trainer": {**TRAINER, **(trainer or {})},
        "max_new_tokens": 3,
        # All questions at once: more batches are asked in the references, and of few in `test_kind.py`.
        "eval_batch_size": 72,
        **changes,
    }
    return TrainConfig(**fields)


def weights(result: Any) -> dict[str, torch.Tensor]:
    """Return the weights that a run has saved."""
    return mmod.load_pretrained(Path(result.folder) / "model").state_dict()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return whether two states are equal in every bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
