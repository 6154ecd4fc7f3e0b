"""Folders of small image models, as transformers saves them, and of images."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image

from tests.kit.made import made_once

SIDE = 32
NAMES = {0: "cat", 1: "dog"}
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "image_size": SIDE,
    "patch_size": 8,
}
_TEXT = {"vocab_size": 99, **{name: size for name, size in _TOWER.items() if name[-5:] != "_size"}, "hidden_size": 32}
_CLASSES: dict[str, Any] = {"id2label": NAMES, "label2id": {name: number for number, name in NAMES.items()}}
_TIMM = {"architecture": "test_vit", "model_args": {"img_size": 64}, "pretrained_cfg": {"input_size": [3, 64, 64]}}
CLASSIFIERS = ("vit", "dinov2", "siglip classifier", "timm wrapper")


@made_once
def make_image_model(name: str, seed: int = 0) -> Any:
    """Return a small dense model of transformers in evaluation mode."""
    torch.manual_seed(seed)
    makers = {
        "vit": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**_TOWER, **_CLASSES)),
        "dinov2": lambda: transformers.Dinov2ForImageClassification(transformers.Dinov2Config(**_TOWER, **_CLASSES)),
        "headless": lambda: transformers.Dinov2Model(transformers.Dinov2Config(**_TOWER)),
        "siglip classifier": lambda: transformers.SiglipForImageClassification(
            transformers.SiglipConfig(vision_config=_TOWER, text_config=_TEXT, **_CLASSES)
        ),
        "clip": lambda: transformers.CLIPModel(transformers.CLIPConfig(vision_config=_TOWER, text_config=_TEXT)),
        "siglip": lambda: transformers.SiglipModel(transformers.SiglipConfig(vision_config=_TOWER, text_config=_TEXT)),
        "timm wrapper": lambda: transformers.TimmWrapperForImageClassification(
            transformers.TimmWrapperConfig(**_TIMM, **_CLASSES)
        ),
    }
    return makers[name]().eval()


def side_of(name: str) -> int:
    """Return the side of a model's images in pixels."""
    return 64 if name == "timm wrapper" else SIDE


def save_image_model(name: str, folder: Path) -> Any:
    """Save a small model with its processor, and return it."""
    model = make_image_model(name)
    model.save_pretrained(folder)
    if name != "timm wrapper":
        side = side_of(name)
        transformers.ViTImageProcessor(size={"height": side, "width": side}).save_pretrained(folder)
    return model


def save_images(root: Path, images: int = 4) -> Path:
    """Save images of both classes, in a folder for each."""
    for number, name in NAMES.items():
        (root / name).mkdir(parents=True)
        for image in range(images):
            picture = Image.effect_noise((50, 40), 30 + 20 * number + image).convert("RGB")
            picture.save(root / name / f"{image}.png")
    return root


def stop_behind_a_checkpoint(run: Path) -> None:
    """Leave of a finished run what one has that was stopped behind its first step; the checkpoint is empty."""
    (run / "result.json").unlink()
    shutil.rmtree(run / "model")
    (run / "checkpoints" / "step-000000001-epoch-00000").mkdir(parents=True)
