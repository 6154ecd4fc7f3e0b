"""Configs are strict, and the command line is one call of the library."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mmod.training import TrainConfig

MINIMAL = """
output: {output}
model: {{name: vit_tiny_patch16_224, args: {{num_classes: 10}}}}
data: {{source: digits, image_size: 32, channels: 1, batch_size: 8}}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(MINIMAL.format(output=tmp_path / "run"))
    return file


def test_resolved_config_reads_back_as_itself(path: Path, tmp_path: Path) -> None:
    config = TrainConfig.load(path, ["--routing.preset", "p-mod", "--routing.depth", "12", "--mixup.mode", "elem"])
    copy = tmp_path / "copy.yaml"
    # As in the folder of a run.
    copy.write_text(yaml.safe_dump({**config.to_dict(), "world_size": 2}))
    again = TrainConfig.load(copy)
    assert isinstance(again, TrainConfig)
    assert again.to_dict() == config.to_dict()
    assert again.image_routing == config.image_routing


def test_help_and_print_config(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mmod.config.parse import parse_config

    with pytest.raises(SystemExit) as stop:
        parse_config(["--help"], TrainConfig)
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "--optim.layer_decay" in shown
    assert "Optimiser steps between checkpoints" in " ".join(shown.split())
    assert "elastic.capacities" in shown
    assert "; required)" in " ".join(shown.split())
    with pytest.raises(SystemExit) as stop:
        parse_config([str(path), "--epochs", "7", "--print_config"], TrainConfig)
    assert stop.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["epochs"] == 7
    assert printed["data"]["source"] == "digits"


@pytest.mark.parametrize("name", ["img_size", "image_size"])
@pytest.mark.parametrize("size", [60, 16, [32, 64]])
def test_a_size_of_the_model_that_is_not_the_images_is_refused(path: Path, name: str, size: int | list[int]) -> None:
    # A model of any size would resample its positions, and train.
    arguments = ["--model.args.dynamic_img_size", "true", f"--model.args.{name}", str(size)]
    with pytest.raises(ValueError, match=rf"data\.image_size is 32 and model\.args\.{name} .*{name} to 32, or"):
        TrainConfig.load(path, arguments)


@pytest.mark.parametrize("size", ["32", "[32, 32]", "null"])
def test_a_size_of_the_model_may_be_said_as_the_host_reads_it(path: Path, size: str) -> None:
    TrainConfig.load(path, ["--model.args.img_size", size])
