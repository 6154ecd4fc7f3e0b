"""Routed models in CLIP_benchmark's own code, on a few pictures of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import mmod
from mmod.registry.clip_benchmark import register

models = pytest.importorskip("clip_benchmark.models", reason="needs the package clip-benchmark")

CLASSES, TEMPLATES = ["cat", "dog", "tree"], ["a {c}", "a photo of a {c}"]
SIZES: dict[str, Any] = {
    "embed_dim": 16,
    "vision_cfg": {"width": 32, "head_width": 16, "layers": 4, "patch_size": 8, "image_size": 32},
    "text_cfg": {"width": 32, "heads": 2, "layers": 2, "context_length": 16, "vocab_size": 49408},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    import open_clip

    torch.manual_seed(0)
    model = open_clip.CLIP(**SIZES)
    mmod.route_(model, image=mmod.RoutingConfig(router="norm", capacity=0.5))
    mmod.save_pretrained(model, tmp_path, architecture=SIZES)
    return tmp_path


def test_zero_shot_classification(folder: Path) -> None:
    from clip_benchmark.metrics import zeroshot_classification
    from PIL import Image

    register()
    register()
    assert models.MODEL_TYPES.count("mmod") == 1
    model, transform, tokenizer = models.load_clip("mmod", "ViT-B-32", str(folder), cache_dir="", device="cpu")
    assert mmod.capacities(model) == {f"visual.transformer.resblocks.{block}": 0.5 for block in (1, 3)}
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 255, (6, 40, 48, 3), dtype=torch.uint8, generator=generator)
    pictures = torch.stack([transform(Image.fromarray(image.numpy())) for image in pixels])
    assert pictures.shape == (6, 3, 32, 32)
    named = TensorDataset(pictures, torch.tensor([0, 1, 2, 0, 1, 2]))
    named.classes = CLASSES  # type: ignore[attr-defined]
    loader = DataLoader(named, batch_size=4)
    metrics = zeroshot_classification.evaluate(model, loader, tokenizer, CLASSES, TEMPLATES, "cpu", amp=False)
    with torch.no_grad():
        words = [model.encode_text(tokenizer([t.format(c=c) for t in TEMPLATES]), normalize=True) for c in CLASSES]
        classes = torch.stack([torch.nn.functional.normalize(image.mean(0), dim=-1) for image in words])
        guesses = (model.encode_image(pictures, normalize=True) @ classes.T).argmax(1)
    assert metrics["acc1"] == pytest.approx((guesses == torch.tensor([0, 1, 2, 0, 1, 2])).float().mean().item())
