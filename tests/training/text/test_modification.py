"""MoDification of a dense model: its load penalty alone leaves the load near 1, and a capacity target sets it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mmod
from mmod.training import fit
from mmod.training.engine.start import create_models
from mmod.training.text.kind import TextKind
from tests.kit.text_configs import text_config

SIZES: dict[str, Any] = {"data": {"length": 32, "batch_size": 16, "val_limit": 16}, "epochs": 1}


def routing(**changes: Any) -> dict[str, Any]:
    fields = {"preset": "modification", "router": {"name": "linear", "initial": 3.0}}
    return {**fields, "language": {"gate_on": "branches"}, **changes}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense") / "run"
    fit(text_config(folder, **SIZES, epoch_steps=100, optim={"lr": 1e-2}), progress=False)
    return folder


def tuned(dense: Path, losses: dict[str, float], **changes: Any) -> Any:
    config = text_config(
        dense.parent / "-".join(losses),
        **SIZES,
        model={"config": None, "checkpoint": str(dense)},
        distill={"teacher": "none"},
        routing=routing(losses=losses, **changes),
        epoch_steps=60,
        optim={"lr": 3e-3, "weight_decay": 0.0},
    )
    return fit(config, progress=False).evaluation


def test_the_load_stays_near_one_until_a_target_is_set(dense: Path) -> None:
    with pytest.warns(UserWarning, match=r"keeps nearly all .* losses\.load alone may not"):
        penalised = tuned(dense, {"load": 0.01})
    targeted = tuned(dense, {"load": 0.01, "capacity": 1.0}, capacity=0.5)
    assert penalised.mean_kept > 0.9
    assert targeted.mean_kept == pytest.approx(0.5, abs=0.2)
    # Each token is decided alone in training, too.
    assert penalised.causal_loss == penalised.loss


@torch.no_grad()
def test_a_converted_model_starts_near_the_dense_one(dense: Path) -> None:
    model, _ = create_models(
        TextKind(text_config(dense.parent / "start", model={"config": None, "checkpoint": str(dense)}))
    )
    ids = torch.randint(0, 256, (2, 40))
    before = model(input_ids=ids).logits.softmax(-1)
    gaps = []
    for initial in (0.0, 3.0, 8.0):
        config = mmod.preset("modification", router={"initial": initial}, language={"gate_on": "branches"})
        after = mmod.route_(model, config)(input_ids=ids).logits.softmax(-1)
        gaps.append(float((after - before).abs().sum(-1).mean()))
        kept = [block.router.score.bias is not None for block in mmod.routed_blocks(model).values()]
        assert kept == [initial != 0] * 2
        mmod.unroute_(model)
    assert gaps[0] > 3 * gaps[1] > 9 * gaps[2]
