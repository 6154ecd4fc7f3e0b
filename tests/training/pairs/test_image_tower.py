"""Image towers that start from weights of their own, and towers that are locked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

import mmod
from mmod.training.engine.start import create_models
from mmod.training.pairs.config import ModelConfig, TrainConfig
from mmod.training.pairs.kind import PairsKind
from tests.kit.pairs_worker import clip_config, write_model


def create(folder: Path, **model: Any) -> torch.nn.Module:
    routing = {"image": {"router": "linear", "capacity": 0.5}} if model.pop("routed", False) else None
    fields = clip_config(folder, "run", model=model, routing=routing, distill={"teacher": "none"})
    return create_models(PairsKind(TrainConfig.from_dict(fields)))[0]


@pytest.mark.parametrize("part", ["whole", "tower"])
def test_an_image_tower_starts_from_its_own_weights_alone(tmp_path: Path, part: str) -> None:
    torch.manual_seed(1)
    other = create(tmp_path)
    save_file((other if part == "whole" else other.visual).state_dict(), tmp_path / "tower.safetensors")
    torch.manual_seed(2)
    plain = create(tmp_path)
    torch.manual_seed(2)
    model = create(tmp_path, image_checkpoint=str(tmp_path / "tower.safetensors"))
    for name, value in model.state_dict().items():
        source = other if name.startswith("visual.") else plain
        assert torch.equal(value, source.state_dict()[name]), name


def test_a_tower_of_timm_starts_from_a_timm_checkpoint_of_another_size(tmp_path: Path) -> None:
    backbone = timm.create_model("test_vit", img_size=64, num_classes=5)
    save_file(backbone.state_dict(), tmp_path / "backbone.safetensors")
    vision = {"image_size": 32, "timm_model_name": "test_vit", "timm_pool": "token", "timm_proj": "linear"}
    vision["timm_model_pretrained"] = False
    named = write_model(tmp_path, "test-timm-tower", vision_cfg=vision)
    model = create(tmp_path, **named, image_checkpoint=str(tmp_path / "backbone.safetensors"), routed=True)
    assert mmod.is_routed(model)
    state = model.visual.trunk.state_dict()
    kept = [name for name in backbone.state_dict() if not name.startswith(("head.", "pos_embed"))]
    assert len(kept) > 50
    assert all(torch.equal(state[name], backbone.state_dict()[name]) for name in kept)


def test_a_locked_tower_keeps_its_weights_and_trains_its_routers(tmp_path: Path) -> None:
    model = create(tmp_path, locked="image", routed=True)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    tower = {name for name in trained if name.startswith("visual.")}
    assert tower
    assert all(".router." in name for name in tower)
    assert any(not name.startswith("visual.") for name in trained)
    assert all(parameter.requires_grad for parameter in create(tmp_path).parameters())


def test_a_run_of_ones_own_takes_the_place_of_other_weights() -> None:
    started = ModelConfig("ViT-B-32", pretrained="openai", image_checkpoint="tower", locked="image").started_from("run")
    assert (started.checkpoint, started.image_checkpoint, started.pretrained) == ("run", None, None)
    assert started.locked == "image"
