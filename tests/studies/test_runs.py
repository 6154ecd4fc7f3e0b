"""The evaluation of a model that a run starts from: done once, and anew where its weights or its config are others."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from mmod.compare.table import Measured
from mmod.io.store import STORE, Store
from mmod.io.tensors import read_tensors, write_tensors
from mmod.studies.runs import evaluate_start
from mmod.training import fit
from mmod.training.image.config import TrainConfig
from mmod.training.image.kind import ImageKind
from tests.kit.sets import SETS

ARGS = {"img_size": 32, "patch_size": 8, "in_chans": 1, "num_classes": 10, "embed_dim": 16, "depth": 2, "num_heads": 2}


def tiny_config(output: Path) -> TrainConfig:
    data = {"source": "digits:tiny", "root": str(SETS / "digits"), "image_size": 32, "channels": 1}
    model = {"name": "vit_tiny_patch16_224", "args": ARGS}
    return TrainConfig.from_dict({"data": data, "model": model, "output": str(output), "epochs": 1, "epoch_steps": 1})


def test_a_model_is_evaluated_once_and_anew_with_other_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = tmp_path / "study" / "dense"
    fit(tiny_config(dense), progress=False)
    start: TrainConfig = tiny_config(tmp_path / "study" / "routed").started_from(str(dense))
    assess, calls = ImageKind.assess, []
    monkeypatch.setattr(ImageKind, "assess", lambda *args: calls.append("") or assess(*args))  # type: ignore[func-returns-value]

    def evaluate(folder: Path, config: TrainConfig) -> Measured:
        rows = evaluate_start(Store(folder / STORE), config)
        # What models are paired by has the mean that is shown.
        assert rows.figures["top1"] == pytest.approx(100 * rows.outcomes["top1"].mean())
        assert rows.samples == len(rows.outcomes["top1"]) == 64
        return rows._replace(outcomes=rows.outcomes["top1"].tolist())

    first = evaluate(tmp_path / "study", start)
    assert evaluate(tmp_path / "study", start) == first
    assert len(calls) == 1
    evaluate(tmp_path / "study", dataclasses.replace(start, precision="bf16"))
    assert len(calls) == 2
    shutil.move(tmp_path / "study", tmp_path / "moved")
    moved = dataclasses.replace(start, output=str(tmp_path / "moved" / "routed"))
    moved = moved.started_from(str(tmp_path / "moved" / "dense"))
    assert evaluate(tmp_path / "moved", moved) == first
    assert len(calls) == 2
    file = next((tmp_path / "moved" / "dense").rglob("model.safetensors"))
    (file.parent / "sha256.json").unlink()
    state, header = read_tensors(file)
    write_tensors(file, {name: torch.zeros_like(value) for name, value in state.items()}, header)
    assert evaluate(tmp_path / "moved", moved).figures["loss"] != first.figures["loss"]
    assert len(calls) == 3
