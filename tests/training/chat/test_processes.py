"""Several processes train the model that one does, whole in each or split among them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

import mmod
from mmod.training import fit
from mmod.training.chat.evaluate import EvalResult
from mmod.training.engine.run_folder import read_fit
from tests.kit.chat_configs import PREDICTOR, same, vlm_config, weights
from tests.kit.fsdp_worker import RUNS, run_config, train_split
from tests.kit.processes import run_processes


@pytest.mark.slow
def test_two_processes_train_as_one(folder: Path) -> None:
    fields = {"max_steps": 2, "save_strategy": "no", "logging_steps": 1, "max_grad_norm": 0.0}
    fields |= {"eval_strategy": "steps", "eval_steps": 1}
    one = vlm_config(folder, "one", {**fields, "per_device_train_batch_size": 4}, routing=PREDICTOR)
    single = fit(one, progress=False)
    fields |= {"per_device_train_batch_size": 2, "use_cpu": True, "ddp_backend": "gloo"}
    two = vlm_config(folder, "two", fields, routing=PREDICTOR)
    assert run_processes(partial(fit, progress=False), two, world=2) == [0, 0]
    other = read_fit(folder / "two", EvalResult)
    assert other is not None
    losses = [[entry["loss"] for entry in result.history if "loss" in entry] for result in (single, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    asked = [[entry["step"] for entry in result.history if "eval_right" in entry] for result in (single, other)]
    assert asked == [[1, 2]] * 2
    assert single.evaluation is not None
    assert other.evaluation is not None
    assert other.evaluation.questions == single.evaluation.questions
    one_weights, two_weights = weights(single), weights(other)
    for name, value in one_weights.items():
        torch.testing.assert_close(two_weights[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_two_processes_that_split_the_model_train_as_one(folder: Path) -> None:
    for name in RUNS:
        fit(run_config(folder, name, 1), progress=False)
    assert run_processes(train_split, folder, world=2) == [0, 0]
    split = json.loads((folder / "split.json").read_text())
    assert len(split) == len(RUNS) * (2 + 1)
    assert all(split)
    for name in RUNS:
        single, other = (read_fit(folder / f"{name}-{processes}", EvalResult) for processes in (1, 2))
        assert single is not None
        assert other is not None
        losses = [[entry["loss"] for entry in result.history if "loss" in entry] for result in (single, other)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
        one, two = weights(single), weights(other)
        assert one.keys() == two.keys()
        for key, value in one.items():
            torch.testing.assert_close(two[key], value, rtol=1e-3, atol=1e-4)
        assert same(mmod.load_pretrained(folder / f"{name}-whole").state_dict(), two)
