"""The study of patch features."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from mmod.studies.features import figures_of
from mmod.studies.kind_configs import FeaturesStudyConfig
from mmod.studies.study import run_study

ARGS = {
    "patch_size": 4,
    "embed_dim": 16,
    "depth": 4,
    "num_heads": 2,
    "num_classes": 0,
    "global_pool": "",
    "img_size": 16,
}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> FeaturesStudyConfig:
    """Scenes whose patches are coloured by their class, and a model that was never trained."""
    root, draw = tmp_path_factory.mktemp("maps"), np.random.default_rng(0)
    for split in ("train", "test"):
        for number in range(10):
            classes = np.kron(draw.integers(0, 3, (4, 4)), np.ones((4, 4), int))
            pixels = draw.integers(0, 60, (16, 16, 3)) + 150 * np.eye(3, dtype=int)[classes]
            for folder, values in (("images", pixels), ("labels", classes)):
                (root / folder / split).mkdir(parents=True, exist_ok=True)
                Image.fromarray(values.astype(np.uint8)).save(root / folder / split / f"{number}.png")
    torch.manual_seed(1)
    save_file(timm.create_model("vit_tiny_patch16_224", **ARGS).state_dict(), root / "weights.safetensors")
    data = {
        "source": "maps:16",
        "val_split": "test",
        "image_size": 16,
        "channels": 3,
        "batch_size": 4,
        "label_patch": 4,
    }
    dense = {"output": "unused", "model": {"name": "vit_tiny_patch16_224", "args": ARGS}, "data": data}
    (root / "dense.yaml").write_text(yaml.safe_dump(dense))
    return FeaturesStudyConfig(
        feature="patches",
        score="mean_iou",
        strengths=[0.01],
        output=str(root / "study"),
        dense=str(root / "dense.yaml"),
        images=str(root),
        checkpoint=str(root / "weights.safetensors"),
        routers={
            "merged": {"router": "redundancy", "skipped": {"name": "merge", "before": "mlp"}, "blocks": [1, 2]},
            "random": {"router": "random", "blocks": [1, 2]},
        },
        baselines={
            "resolution": {0.5: {"kind": "resolution", "image_size": 12}},
            "merging": {0.5: {"kind": "merge", "r": 2}},
            "pruning": {0.5: {"kind": "prune", "keep": 0.5, "blocks": [1]}},
        },
        latency_batch=2,
        latency_batches=[],
        latency_rounds=1,
        maps=1,
    )


def test_every_model_answers_every_patch(study: FeaturesStudyConfig) -> None:
    result = run_study(study, progress=False)
    table = result.table
    by_name = {row["name"]: row for row in result.rows}
    assert list(by_name) == ["dense", "merged-0.5", "random-0.5", "resolution-0.5", "merging-0.5", "pruning-0.5"]
    dense = by_name["dense"]
    assert dense["mean_iou"] > 60, "patches differ in colour"
    for name, row in by_name.items():
        assert 0 <= row["mean_iou"] <= row["patches"] <= 100
        gap = row["mean_iou_to_dense"]
        if name != "dense":
            assert gap.value == pytest.approx(row["mean_iou"] - dense["mean_iou"], abs=1e-6)
            assert gap.low <= gap.high
    assert by_name["merged-0.5"]["to_control"] is not None
    assert "10 images; 95 % intervals" in table
    again = run_study(study, progress=False).table
    assert [row.split("|")[1] for row in again.splitlines()[:8]] == [
        row.split("|")[1] for row in table.splitlines()[:8]
    ]


@given(st.integers(2, 5), st.integers(1, 6), st.integers(0, 99))
def test_mean_iou_is_that_of_all_patches_together(classes: int, images: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    labels, guesses = draw.integers(0, classes, (2, images, 12))
    counts = [
        [[int(((label == one) & (guess == other)).sum()) for other in range(classes)] for one in range(classes)]
        for label, guess in zip(labels, guesses)
    ]
    columns = figures_of({"confusion": np.array(counts)}, images)
    present = [one for one in range(classes) if (labels == one).any() or (guesses == one).any()]
    iou = [((labels == one) & (guesses == one)).sum() / ((labels == one) | (guesses == one)).sum() for one in present]
    assert columns["mean_iou"] == pytest.approx(100 * np.mean(iou))
    assert columns["patches"] == pytest.approx(100 * (labels == guesses).mean())


@pytest.mark.parametrize("changes", [{"train_split": "test"}, {"source": "folder", "label_patch": None}])
def test_patches_need_classes_and_a_split_to_fit_on(study: FeaturesStudyConfig, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"needs their classes, data\.label_patch"):
        run_study(dataclasses.replace(study, output="unused", changes={"data": changes}), progress=False)
    assert not Path("unused").exists()


def test_it_is_not_for_fine_tuning(study: FeaturesStudyConfig) -> None:
    with pytest.raises(ValueError, match="tune=False"):
        dataclasses.replace(study, tune=True)
    with pytest.raises(ValueError, match="is that of feature 'patches'"):
        dataclasses.replace(study, score="linear")
