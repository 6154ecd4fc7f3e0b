"""Checkpoints of other training scripts: which weights are read, under which names, and what is refused."""

from __future__ import annotations

import argparse
import json
import sys
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import timm
import torch
from torch import Tensor

from mmod.data.config import DataConfig
from mmod.opening.open import open_model
from mmod.opening.open_clip import load_clip, read_clip
from mmod.opening.weights import read_weights
from mmod.training import ModelConfig, TrainConfig
from mmod.training.engine.start import create_models, create_teacher
from mmod.training.image.kind import ImageKind
from tests.kit.pairs_worker import MODEL
from tests.kit.trap import Trap

SMALL = {"img_size": 16, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
NAME = "vit_tiny_patch16_224"
ARGS = argparse.Namespace(lr=1e-3, model=NAME, betas=(0.9, 0.99), nested=argparse.Namespace(a=np.float32(1)))


def prefixed(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{name}": value for name, value in state.items()}


def inside(state: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    """Names of a model whose part of this name is wrapped by `torch.compile`."""
    return {name.replace(f"{part}.", f"{part}._orig_mod."): value for name, value in state.items()}


def layouts(raw: dict[str, Tensor], ema: dict[str, Tensor]) -> dict[str, tuple[dict[str, Any], str]]:
    """Checkpoints as training scripts save them, and which weights are to be read."""
    numbers = {"best": np.float64(3.5), "seen": np.int64(7), "curve": np.arange(4), "name": np.str_("a")}
    head = {"head.mlp.0.weight": torch.ones(2), "head.last_layer.weight_v": torch.ones(2)}
    lightning = {"pytorch-lightning_version": "2.5", "epoch": 3}
    averaged = {"n_averaged": torch.tensor(3), **prefixed(ema, "module.")}
    return {
        "timm": ({"epoch": 3, "arch": NAME, "state_dict": raw, "args": ARGS, "version": 2, "metric": 71.2}, "raw"),
        "timm with EMA": ({"state_dict": raw, "args": ARGS, "state_dict_ema": ema, "metric": 71.2}, "ema"),
        "timm without an average": ({"state_dict": raw, "state_dict_ema": None}, "raw"),
        "DeiT": ({"model": raw, "optimizer": {}, "epoch": 3, "model_ema": ema, "args": ARGS}, "ema"),
        "torchvision": ({"model": prefixed(raw, "module."), "model_ema": averaged, "args": ARGS}, "ema"),
        "open_clip": ({"epoch": 3, "name": "run", "state_dict": prefixed(raw, "module."), "optimizer": {}}, "raw"),
        "compiled": ({"state_dict": prefixed(raw, "_orig_mod.")}, "raw"),
        "parallel and compiled": ({"state_dict": prefixed(raw, "module._orig_mod.")}, "raw"),
        "compiled and parallel": (prefixed(raw, "_orig_mod.module."), "raw"),
        "compiled blocks": (inside(raw, "blocks.0"), "raw"),
        "FSDP": (inside(prefixed(raw, "_fsdp_wrapped_module."), "blocks.1"), "raw"),
        "DeepSpeed": ({"module": prefixed(raw, "module."), "args": ARGS}, "raw"),
        "tutorial": ({"epoch": 3, "model_state_dict": raw, "loss": 0.5}, "raw"),
        "Lightning": ({**lightning, "state_dict": prefixed(raw, "model.")}, "raw"),
        "Lightning, another attribute": ({**lightning, "state_dict": prefixed(raw, "net._orig_mod.")}, "raw"),
        "DINO": (
            {
                "student": {**prefixed(raw, "module.backbone."), **prefixed(head, "module.")},
                "teacher": {**prefixed(ema, "backbone."), **head},
                "args": ARGS,
            },
            "ema",
        ),
        "DINO, student alone": ({"student": prefixed(raw, "module.backbone.")}, "raw"),
        "numbers of numpy": ({"state_dict": OrderedDict(raw), **numbers}, "raw"),
    }


MODEL_STATE = timm.create_model(NAME, **SMALL).state_dict()
AVERAGE = {name: value + 1 for name, value in MODEL_STATE.items()}
LAYOUTS = layouts(MODEL_STATE, AVERAGE)


def same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


def config(folder: Path, **changes: Any) -> TrainConfig:
    data = DataConfig("folder", root="unused", image_size=16, channels=1)
    return TrainConfig(output=str(folder / "run"), data=data, **changes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_weights_of_a_training_script_are_read(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, which = LAYOUTS[layout]
    path = tmp_path / "checkpoint.pth.tar"
    torch.save(content, path)
    expected = AVERAGE if which == "ema" else MODEL_STATE
    same(read_weights(path), expected)
    assert ("the EMA weights" in capsys.readouterr().err) == (which == "ema")

    run = config(tmp_path, model=ModelConfig(NAME, SMALL, checkpoint=str(path)), routing={"capacity": 0.5})
    model, teacher = create_models(ImageKind(run))
    assert teacher is not None
    same(teacher.state_dict(), expected)
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    same({name: value for name, value in model.state_dict().items() if name in expected}, expected)


@pytest.mark.parametrize("layout", ["timm", "timm with EMA", "DeiT", "parallel and compiled"])
def test_timm_chooses_the_same_weights(layout: str, tmp_path: Path) -> None:
    # timm refuses numbers of numpy.
    torch.save({**LAYOUTS[layout][0], "args": argparse.Namespace(lr=1e-3)}, tmp_path / "checkpoint.pth")
    same(read_weights(tmp_path / "checkpoint.pth"), timm.models.load_state_dict(str(tmp_path / "checkpoint.pth")))


def test_a_teacher_is_read_in_the_same_way(tmp_path: Path) -> None:
    torch.save(LAYOUTS["DeiT"][0], tmp_path / "teacher.pth")
    kind = ImageKind(config(tmp_path, model=ModelConfig(NAME, SMALL)))
    teacher = create_teacher(kind, str(tmp_path / "teacher.pth"), kind.prepare(weights=False))
    same(teacher.state_dict(), AVERAGE)


@pytest.mark.parametrize("name", ["yacs.config.CfgNode", "lightning.fabric.utilities.data.AttributeDict"])
def test_the_config_beside_the_weights_needs_no_library(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module_name, _, class_name = name.rpartition(".")
    with monkeypatch.context() as patch:
        module: Any = types.ModuleType(module_name)
        module.__dict__[class_name] = kind = type(class_name, (dict,), {"__module__": module_name})
        parents = module_name.split(".")
        for depth in range(1, len(parents)):
            patch.setitem(sys.modules, ".".join(parents[:depth]), types.ModuleType(parents[depth - 1]))
        patch.setitem(sys.modules, module_name, module)
        inner = kind(DEPTH=2)
        inner.__dict__["__immutable__"] = True
        torch.save({"model": MODEL_STATE, "config": kind(MODEL=inner)}, tmp_path / "checkpoint.pth")
    same(read_weights(tmp_path / "checkpoint.pth"), MODEL_STATE)


@pytest.mark.parametrize("place", ["beside", "in the arguments", "as an argument of numpy"])
def test_code_beside_the_weights_is_refused_and_not_run(place: str, tmp_path: Path) -> None:
    trap = Trap(tmp_path / "ran")
    content = {
        "beside": {"state_dict": MODEL_STATE, "callback": trap},
        "in the arguments": {"state_dict": MODEL_STATE, "args": argparse.Namespace(callback=trap)},
        "as an argument of numpy": {"state_dict": MODEL_STATE, "metric": np.array([trap, 1], dtype=object)},
    }[place]
    torch.save(content, tmp_path / "checkpoint.pth")
    with pytest.raises(ValueError, match="besides; save the state dict alone"):
        read_weights(tmp_path / "checkpoint.pth")
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def clip(tmp_path: Path) -> str:
    (tmp_path / "foreign-clip.json").write_text(json.dumps(MODEL))
    open_clip.add_model_config(tmp_path / "foreign-clip.json")
    return "foreign-clip"


@pytest.mark.parametrize("layout", ["open_clip", "parallel and compiled", "DeiT"])
def test_every_reader_of_open_clip_models_reads_them_alike(layout: str, clip: str, tmp_path: Path) -> None:
    model: Any = open_clip.create_model(clip)
    raw = model.state_dict()
    content, which = layouts(raw, {name: value + 1 for name, value in raw.items()})[layout]
    torch.save(content, tmp_path / "epoch_3.pt")
    expected = {name: value + (which == "ema") for name, value in raw.items()}
    torch.manual_seed(1)
    other: Any = open_clip.create_model(clip)
    load_clip(other, str(tmp_path / "epoch_3.pt"), read_clip(tmp_path / "epoch_3.pt"))
    same(other.state_dict(), expected)
    advised = open_model(f"open_clip:{clip}", checkpoint=tmp_path / "epoch_3.pt").model
    same(advised.state_dict(), expected)
