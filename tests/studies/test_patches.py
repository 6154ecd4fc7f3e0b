"""The study of dense prediction: the same candidates, by mean IoU."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mmod.analysis.counting import pass_flops
from mmod.config.parse import parse_config
from mmod.studies.candidates import comparison_of
from mmod.studies.kind_configs import ImageStudyConfig
from mmod.studies.runs import run_config_of
from mmod.studies.study import run_study
from mmod.training import TrainConfig
from mmod.training.engine.start import sketch
from mmod.training.image.kind import ImageKind
from tests.kit.image_study import DENSE
from tests.kit.sets import SETS

ROOT = Path(__file__).parents[2]
MODEL: dict[str, Any] = {"num_classes": 11, "class_token": False, "global_pool": "", "embed_dim": 16}


@pytest.fixture
def study(tmp_path: Path) -> ImageStudyConfig:
    model = {**DENSE["model"], "args": {**DENSE["model"]["args"], **MODEL}}
    data = {**DENSE["data"], "source": "crowds:tiny", "label_patch": 4, "root": str(SETS / "crowds")}
    (tmp_path / "dense.yaml").write_text(yaml.safe_dump({**DENSE, "model": model, "data": data}))
    return ImageStudyConfig(
        output=str(tmp_path / "out"),
        dense=str(tmp_path / "dense.yaml"),
        score="mean_iou",
        routers={"a-mod": {"preset": "a-mod"}, "random": {"router": "random"}},
        changes={"epoch_steps": 1},
        finetune={"epochs": 1},
        # Fewer tokens on the grid of the labels, and another grid.
        baselines={
            "merge": {0.5: {"kind": "merge", "r": 12}},
            "resolution": {0.5: {"kind": "resolution", "image_size": 24}},
        },
        latency_batch=16,
        latency_batches=[],
        latency_rounds=2,
        maps=2,
    )


def test_a_study_of_patches(study: ImageStudyConfig) -> None:
    result = run_study(study, progress=False)
    rows = {point.name: point.row() for point in result.points}
    names = ["dense", "a-mod-0.5", "random-0.5", "merge-0.5", "resolution-0.5"]
    assert list(rows) == names
    dense = rows["dense"]
    for name, row in rows.items():
        assert 0 <= row["mean_iou"] <= 100
        assert 0 <= row["objects"] <= 100
        assert (
            row["to_dense"] is None
            if name == "dense"
            else row["to_dense"].value == pytest.approx(row["mean_iou"] - dense["mean_iou"])
        )
    assert "mean IoU %" in result.table
    assert (result.folder / "maps-a-mod-0.5.png").exists()


def test_baselines_of_the_study_cost_what_routed_models_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = parse_config(["configs/tradeoff/patches.yaml"], ImageStudyConfig)
    dense = TrainConfig.load("configs/patches/dense.yaml")
    costs = {}
    for candidate in comparison_of(config).candidates:
        config = run_config_of(candidate, dense)
        image = torch.empty(1, *config.image_shape, device="meta")
        costs[candidate.name] = pass_flops(sketch(ImageKind(config)), {"image": image})
    assert len(costs) == 14
    # Narrow models take more time than their FLOPs, so theirs are fewer. Comparing tokens within cells costs little.
    shares = {"dense": 1.0, "resolution-0.5": 0.6, "narrow-0.25": 0.3, "cells, merged": 0.43}
    for name, cost in costs.items():
        assert cost == pytest.approx(shares.get(name, 0.5) * costs["dense"], rel=0.15), name


def test_a_score_of_patches_needs_their_labels(study: ImageStudyConfig) -> None:
    model = {"model": {"args": {"global_pool": "avg"}}, "data": {"source": "digits:tiny", "label_patch": None}}
    with pytest.raises(ValueError, match="score='mean_iou' is one of patches"):
        comparison_of(dataclasses.replace(study, changes=model)).runs()
