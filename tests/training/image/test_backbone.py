"""Backbones that start a new task: weights of another form, and checkpoints with another classifier or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

import mmod
from mmod.data.config import DataConfig
from mmod.training import ModelConfig, TrainConfig
from mmod.training.engine.start import create_models
from mmod.training.image.config import DistillConfig
from mmod.training.image.kind import ImageKind

SMALL = {"in_chans": 1, "embed_dim": 16, "depth": 3, "num_heads": 2}
HOSTS = {
    "vit_tiny_patch16_224": {**SMALL, "patch_size": 4},
    "deit_tiny_distilled_patch16_224": {**SMALL, "patch_size": 4},
    "vit_small_patch14_reg4_dinov2": {**SMALL, "patch_size": 4},
}


def config(folder: Path, name: str, classes: int, size: int = 16, **changes: Any) -> TrainConfig:
    args = {**HOSTS[name], "num_classes": classes, "img_size": size}
    model = ModelConfig(name, args, checkpoint=str(folder / "start.safetensors"), head=changes.pop("head", None))
    data = DataConfig("folder", root="unused", image_size=size, channels=1)
    return TrainConfig(output=str(folder / "run"), model=model, data=data, **changes)


def save(folder: Path, name: str, classes: int, size: int = 16) -> dict[str, torch.Tensor]:
    model = timm.create_model(name, img_size=size, num_classes=classes, **HOSTS[name])
    save_file(model.state_dict(), folder / "start.safetensors")
    return model.state_dict()


@pytest.mark.parametrize("name", HOSTS)
@pytest.mark.parametrize(("had", "classes"), [(0, 5), (7, 5), (7, 0), (5, 5)])
def test_a_fresh_head_takes_all_other_weights(tmp_path: Path, name: str, had: int, classes: int) -> None:
    start = save(tmp_path, name, had)
    model, teacher = create_models(ImageKind(config(tmp_path, name, classes, head="fresh", routing={"capacity": 0.5})))
    state = model.state_dict()
    body = [key for key in start if not key.startswith("head")]
    assert all(torch.equal(state[key], start[key]) for key in body)
    assert teacher is None, "a classifier that was never trained teaches nothing"
    heads = {key for key in state if key.startswith("head")}
    assert bool(heads) == bool(classes)
    assert all(not torch.equal(state[key], start[key]) for key in heads & start.keys() if key.endswith("weight"))


@pytest.mark.parametrize(("had", "classes", "message"), [(0, 5, "has no classifier"), (7, 0, "the model none")])
def test_a_missing_classifier_is_named(tmp_path: Path, had: int, classes: int, message: str) -> None:
    save(tmp_path, "vit_tiny_patch16_224", had)
    with pytest.raises(ValueError, match=rf"{message}.*model\.head='fresh'"):
        create_models(ImageKind(config(tmp_path, "vit_tiny_patch16_224", classes)))


@pytest.mark.parametrize(("had", "classes", "message"), [(0, 5, "no classifier"), (7, 0, "a classifier .* none")])
@pytest.mark.parametrize("head", [None, "fresh"])
def test_a_teacher_without_the_models_classifier_is_named(
    tmp_path: Path, head: str | None, had: int, classes: int, message: str
) -> None:
    save(tmp_path, "vit_tiny_patch16_224", classes)
    (tmp_path / "teacher").mkdir()
    save(tmp_path / "teacher", "vit_tiny_patch16_224", had)
    teacher = DistillConfig(teacher=str(tmp_path / "teacher" / "start.safetensors"))
    run = config(tmp_path, "vit_tiny_patch16_224", classes, head=head, distill=teacher, routing={"capacity": 0.5})
    with pytest.raises(ValueError, match=rf"^teacher '.*teacher/start.safetensors' has {message}") as caught:
        create_models(ImageKind(run))
    assert "fresh" not in str(caught.value)


@pytest.mark.parametrize("name", HOSTS)
def test_weights_of_another_image_size_are_converted_as_timm_does(tmp_path: Path, name: str) -> None:
    start = save(tmp_path, name, 5, size=32)
    actual = create_models(ImageKind(config(tmp_path, name, 5)))[0].state_dict()
    convert = timm.models.vision_transformer.checkpoint_filter_fn
    expected = convert(start, timm.create_model(name, img_size=16, num_classes=5, **HOSTS[name]))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], expected[key]) for key in actual)
    assert start["pos_embed"].shape != actual["pos_embed"].shape


def test_routers_of_a_routed_backbone_stay(tmp_path: Path) -> None:
    name, routing = "vit_tiny_patch16_224", {"router": "linear", "capacity": 0.5}
    routed = timm.create_model(name, img_size=16, num_classes=7, **HOSTS[name])
    mmod.route_(routed, mmod.RoutingConfig(**routing))
    save_file(routed.state_dict(), tmp_path / "start.safetensors")
    model, _ = create_models(ImageKind(config(tmp_path, name, 5, head="fresh", routing=routing)))
    routers = [key for key in model.state_dict() if ".router." in key]
    assert routers
    assert all(torch.equal(model.state_dict()[key], routed.state_dict()[key]) for key in routers)


def test_a_fresh_head_ends_with_a_run_of_ones_own() -> None:
    started = ModelConfig("vit_tiny_patch16_224", checkpoint="dino", head="fresh").started_from("run")
    assert (started.checkpoint, started.head) == ("run", None)
