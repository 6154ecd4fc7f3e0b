"""Estimates before a run: equal to what the run then does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mmod
from mmod.analysis.memory import ActivationMemory
from mmod.data.config import DataConfig
from mmod.data.loader import image_stream
from mmod.training import EmaConfig, ModelConfig, TrainConfig
from mmod.training.command import main
from mmod.training.engine.kind import create
from mmod.training.kinds import estimate as estimate_of
from mmod.training.kinds import fit, kind_of
from tests.kit.engine_worker import MODEL


@pytest.mark.parametrize("routing", [None, {"router": "linear", "gate": "tanh", "capacity": 0.5}], ids=["dense", "mod"])
def test_an_estimate_of_an_image_run_is_what_the_run_does(tmp_path: Path, routing: Any) -> None:
    config = TrainConfig(
        output=str(tmp_path / "run"),
        model=ModelConfig("vit_tiny_patch16_224", {**MODEL, "img_size": 32, "num_classes": 10}),
        data=DataConfig("digits:tiny", root=str(tmp_path / "digits"), workers=0),
        routing=routing,
        epochs=2,
        accumulate=3,
        ema=EmaConfig(),
        device="cpu",
    )
    kind: Any = kind_of(config)
    estimate = estimate_of(kind.config)
    assert not (tmp_path / "run").exists()

    model = create(kind).train()
    images = next(iter(image_stream(config.data, 0).batches(0)))[0]
    with ActivationMemory([images, *model.parameters(), *model.buffers()]) as memory:
        logits = model(images)
        held = memory.live
    del logits
    assert estimate.activation_bytes == pytest.approx(held, rel=0.02)
    assert estimate.parameters == sum(weight.numel() for weight in model.parameters())
    assert estimate.weight_bytes == 2 * 4 * estimate.parameters
    image_flops = mmod.flops(model, (1, 32, 32)).routed
    assert estimate.flops == {"image": image_flops}
    assert estimate.step_flops == 3 * 3 * 64 * image_flops
    result = fit(kind.config, progress=False)
    assert (estimate.epochs, estimate.steps) == (result.epochs, result.steps)


def test_shards_are_counted_by_the_number_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    fields: dict[str, Any] = {
        "output": str(tmp_path),
        "model": {"name": "vit_tiny_patch16_224", "args": {**MODEL, "img_size": 32, "num_classes": 10}},
        "data": {"source": "digits:tiny", "root": str(tmp_path / "digits"), "workers": 0},
        "ema": {},
        "device": "cpu",
    }
    unsharded, shards = (
        estimate_of(TrainConfig.from_dict({**fields, "distributed": {"kind": kind}})) for kind in ("ddp", "fsdp")
    )
    weights = 4 * unsharded.parameters
    assert (unsharded.weight_bytes, unsharded.training_bytes, unsharded.full_bytes) == (2 * weights, 3 * weights, 0)
    assert (shards.weight_bytes, shards.training_bytes, shards.full_bytes) == (weights // 2, 3 * weights // 4, weights)
    assert shards.hours(10.0) == shards.steps * shards.step_flops / 4e13 / 3600
    assert "more for whole weights in evaluations" in str(shards)


def test_a_dry_run_of_pairs_prints_the_cost_and_writes_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"output": "run", "data.train": "scenes:tiny/train", "data.val": "scenes:tiny/val", "data.root": "data"}
    words = [
        f"--{name}={tmp_path / value if name in ('output', 'data.root') else value}" for name, value in options.items()
    ]
    torch.manual_seed(0)
    main(["configs/clip/scenes.yaml", *words, "--dry-run=0.001"], "pairs")
    printed = capsys.readouterr().out
    assert "epochs: 5, steps: 20 of 64 samples" in printed
    assert "forward GFLOPs of a sample: image 0.02482, text 0.004874; about 0.005701 TFLOPs a step" in printed
    assert "3,686,017 parameters, 3,686,017 trained" in printed
    assert printed.endswith(f"{tmp_path / 'run'}: the run would start anew\n")
    # 20 steps of 0.005701 TFLOPs.
    assert "0.03167 hours at 0.001 TFLOP/s in each process" in printed
    with pytest.raises(TypeError, match="--dry-run must be a number above 0, got 'fast'"):
        main(["configs/clip/scenes.yaml", *words, "--dry-run=fast"], "pairs")
    assert not (tmp_path / "run").exists()
