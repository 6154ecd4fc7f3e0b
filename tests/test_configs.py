"""Every config file is read strictly, builds its model, and says what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import mmod
from mmod.data.loader import _transform
from mmod.training import TrainConfig
from mmod.training.image.preflight import check_input
from mmod.training.image.preparation import open_start

ROOT = Path(__file__).parents[1]
FOLDERS = ("cifar", "digits", "fashion", "imagenet", "patches")
PATHS = [path for name in FOLDERS for path in sorted((ROOT / "configs" / name).glob("*.yaml"))]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_config_builds_and_routes_its_model(path: Path) -> None:
    config = TrainConfig.load(path)
    assert config.output == f"runs/{path.parent.name}/{path.stem}"
    with torch.device("meta"):
        opened = open_start(config.model, weights=False)
    check_input(opened, config.data, config.model.pretrained)
    model = opened.model
    routing = config.image_routing
    if routing is not None:
        mmod.route_(model.train(), routing)
        assert mmod.routed_blocks(model)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_header_holds_the_exact_command(path: Path) -> None:
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert path.read_text().startswith("# ")
    for entry in ("Source row:", "Command:", "Source's figure:"):
        assert sum(entry in line for line in header) == 1, entry
    assert any(f"mmod train image {path.relative_to(ROOT)}" in line for line in header)
    assert any("Time:" in line or "Hours:" in line for line in header)


def test_every_operation_of_the_recipes_augmentation_runs_at_every_magnitude() -> None:
    image, counts = Image.effect_noise((32, 32), 64).convert("RGB"), []
    policies = {
        data.augment.auto_augment: data
        for data in (TrainConfig.load(path).data for path in PATHS)
        if data.augment is not None and data.augment.auto_augment is not None
    }
    for data in policies.values():
        steps: list[Any] = _transform(data, True).transforms
        operations = [operation for step in steps for operation in getattr(step, "ops", [])]
        counts.append(len(operations))
        for operation in operations:
            operation.prob, operation.magnitude_std = 1.0, 0.0
            for operation.magnitude in range(11):
                assert operation(image).size == image.size
    assert counts
    assert min(counts) > 0
