"""Every config file is read strictly, builds its model, and says what it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import mmod
from mmod.training import TrainConfig
from mmod.training.image.model import check_input, create_dense_model

ROOT = Path(__file__).parents[1]
PATHS = [
    path for name in ("digits", "imagenet", "patches") for path in sorted((ROOT / "configs" / name).glob("*.yaml"))
]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_config_builds_and_routes_its_model(path: Path) -> None:
    config = TrainConfig.load(path)
    assert config.output == f"runs/{path.parent.name}/{path.stem}"
    with torch.device("meta"):
        model = create_dense_model(replace(config.model, pretrained=False))
    check_input(model, config.data, config.model.pretrained)
    routing = config.image_routing
    if routing is not None:
        mmod.route_(model, routing)
        assert mmod.routed_blocks(model)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_header_holds_the_exact_command(path: Path) -> None:
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert path.read_text().startswith("# ")
    for entry in ("Source row:", "Command:", "Source's figure:"):
        assert sum(entry in line for line in header) == 1, entry
    assert any(f"mmod train image {path.relative_to(ROOT)}" in line for line in header)
    assert any("Time:" in line or "Hours:" in line for line in header)
