"""Models with methods, trained by the recipe of routed ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mmod
from mmod.methods import methods_of, read_method
from mmod.training import ModelConfig, TrainConfig, evaluate
from mmod.training.image.kind import ImageKind
from tests.kit.engine_worker import TensorStream, run, tiny_config

METHODS = [
    {"kind": "prune", "keep": 0.5, "blocks": [0]},
    {"kind": "merge", "r": 3},
    {"kind": "exit", "confidence": 0.12, "blocks": [0]},
    {"kind": "resize", "size": 8},
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method["kind"])
def test_a_run_folder_gives_the_same_model_again(method: dict[str, Any], tmp_path: Path) -> None:
    config = tiny_config(output=tmp_path / "run", epochs=1, methods=[method], args={"dynamic_img_size": True})
    result = run(config)
    assert run(TrainConfig.from_dict(config.to_dict())).reused
    start = ModelConfig(config.model.name, config.model.args, checkpoint=str(tmp_path / "run"))
    model, teacher = ImageKind(replace(config, model=start)).create_models()
    assert methods_of(model)[0] == read_method(method)
    assert teacher is not None
    assert not methods_of(teacher)
    assert evaluate(model, TensorStream(8, seed=None)) == result.evaluation
    exported = mmod.load_pretrained(tmp_path / "run" / "model")
    assert methods_of(exported) == (read_method(method),)
