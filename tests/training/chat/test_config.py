"""Configs of fine-tuning: what excludes what, and the files in configs/vlm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import mmod
from mmod.data.readers.conversations import ConversationsConfig
from mmod.training.chat.config import ModelConfig, TrainConfig
from mmod.training.chat.model import create_model
from mmod.training.chat.trainer import training_arguments
from tests.kit.chat_configs import MODEL, vlm_config

ROOT = Path(__file__).parents[3]


def test_configs_that_exclude_themselves(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.val: null"):
        vlm_config(folder, trainer={"fsdp": "full_shard"})
    with pytest.raises(ValueError, match="trainer must not set seed"):
        vlm_config(folder, trainer={"seed": 1})
    without = ConversationsConfig("questions:tiny/train", val=None)
    for name in ("label_smoothing_factor", "auto_find_batch_size", "save_only_model"):
        with pytest.raises(ValueError, match=rf"trainer\.{name}: "):
            vlm_config(folder, trainer={name: 1})
    with pytest.raises(ValueError, match=r"eval_on_start asks questions"):
        vlm_config(folder, data=without, trainer={"eval_on_start": True})
    with pytest.raises(ValueError, match=r"eval_strategy asks questions in training: set data\.val"):
        vlm_config(folder, data=without, trainer={"eval_strategy": "epoch"})
    with pytest.raises(ValueError, match="frozen must be several values, each one of 'vision'"):
        vlm_config(folder, frozen=["tower"])
    with pytest.raises(ValueError, match="names no part"):
        vlm_config(folder, routing={})
    with pytest.raises(ValueError, match=r"model\.args tp_plan: a run does not train .* set trainer\.fsdp instead"):
        vlm_config(folder, model=ModelConfig("model", args={"tp_plan": "auto"}))
    with pytest.raises(ValueError, match="either"):
        ModelConfig()
    with pytest.raises(ValueError, match=r"needs model\.processor"):
        ModelConfig(config=MODEL)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "vlm").glob("*.yaml")), ids=lambda path: path.stem)
def test_configs_are_read_and_say_what_they_are(path: Path) -> None:
    config = TrainConfig.load(path)
    assert config.output == f"runs/vlm/{path.stem}"
    if config.trainer.get("bf16"):
        config = replace(config, trainer={k: v for k, v in config.trainer.items() if k not in ("bf16", "deepspeed")})
    training_arguments(config)
    header = path.read_text().split("output:")[0]
    for entry in ("Source row:", "Command:", "Source's figure:", f"mmod train chat configs/vlm/{path.name}"):
        assert header.count(entry) == 1, entry
    assert "Time:" in header or "Hours:" in header


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "vlm").glob("tiny-*.yaml")), ids=lambda path: path.stem)
def test_tiny_configs_build_what_they_route(path: Path, folder: Path) -> None:
    dense = TrainConfig.load(ROOT / "configs/vlm/tiny-llava.yaml")
    config = replace(TrainConfig.load(path), model=dense.model)
    model, _ = create_model(config, on_meta=True)
    assert mmod.is_routed(model) == (config.routing is not None)
