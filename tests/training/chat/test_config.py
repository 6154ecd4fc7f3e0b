"""Configs of fine-tuning: what excludes what, and the files in configs/vlm."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

import mmod
from mmod.training.chat.config import TrainConfig
from mmod.training.chat.start import create_with_processor
from mmod.training.chat.trainer import training_arguments
from mmod.training.kinds import config_class

ROOT = Path(__file__).parents[3]


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
    model, _ = create_with_processor(config, on_meta=True)
    assert mmod.is_routed(model) == (config.routing is not None)


def test_options_change_the_parts_of_a_routing_as_the_guide_says() -> None:
    page = (ROOT / "docs/finetuning_vlm.md").read_text()
    lines = re.findall(r"`(--routing [^`]+)`", page.split("## Config\n")[1].split("### Routing text\n")[0])
    config = str(ROOT / "configs/vlm/tiny-p-mod.yaml")
    language, image = {"preset": "p-mod"}, {"preset": "a-mod"}
    routings = [TrainConfig.parse([config, *shlex.split(line)]).routing for line in lines]
    assert routings == [{"language": language, "image": image}, {"image": image}]


@pytest.mark.parametrize(("kind", "parts"), [("chat", ("language", "image")), ("pairs", ("image", "text"))])
def test_a_part_of_null_is_dense_in_a_file_and_in_options(kind: str, parts: tuple[str, str], tmp_path: Path) -> None:
    model = {"chat": {"checkpoint": "OWNER/NAME"}, "pairs": {"name": "ViT-B-32"}}[kind]
    routed, dense = parts
    fields = {"output": "run", "model": model, "routing": {routed: {"capacity": 0.5}}}
    config = config_class(kind).from_dict(fields)
    both = {routed: {"capacity": 0.5}, dense: {"capacity": 0.25}}
    (tmp_path / "both.yaml").write_text(json.dumps({**fields, "routing": both}))
    path = str(tmp_path / "both.yaml")
    assert config_class(kind).parse([path, f"--routing.{dense}", "null"]) == config
    assert config_class(kind).from_dict({**fields, "routing": {**both, dense: None}}) == config
    assert config_class(kind).from_dict({**fields, "routing": dict.fromkeys(parts)}).routing is None
