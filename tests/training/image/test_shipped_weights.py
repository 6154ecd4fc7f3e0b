"""The weights that come with the package score what their header says."""

from __future__ import annotations

import dataclasses
import json

import pytest

from mmod.io.tensors import read_tensors
from mmod.opening.runs import find_weights
from mmod.plain import from_plain
from mmod.training import TrainConfig
from mmod.training.engine.kind import load
from mmod.training.image.kind import ImageKind

CONFIGS = {"digits-dense": "digits/filled.yaml", "digits-shallow": "digits/filled-shallow.yaml"}


@pytest.mark.parametrize("name", CONFIGS)
def test_shipped_weights_score_what_they_say(name: str) -> None:
    file = find_weights(f"mmod:{name}")
    assert file.stat().st_size < 3e6
    header = read_tensors(file)[1]
    recipe, config = json.loads(header["config"]), TrainConfig.load(f"configs/{CONFIGS[name]}")
    # As runs use it: digits are never cropped, whatever a config says.
    written = from_plain(TrainConfig, {"output": config.output, **recipe})
    assert ImageKind(written) == ImageKind(config)
    assert recipe["seed"] == 0
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, checkpoint=f"mmod:{name}"),
        # Drawn when it is read, and once for all models: the train split is never built.
        data=dataclasses.replace(config.data, root=None),
    )
    shipped = ImageKind(config)
    evaluation = shipped.score(load(shipped)).result
    assert (evaluation.samples, evaluation.top1) == (1000, pytest.approx(float(header["top1"]), abs=0.2))
