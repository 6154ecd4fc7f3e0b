"""A loss that is not finite is named within its step, and stops the run, saved before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmod.opening.runs import list_checkpoints
from mmod.training import fit
from mmod.training.engine import start
from mmod.training.engine.checkpoint import load_checkpoint
from mmod.training.engine.kind import LoopKind
from mmod.training.engine.start import create_models
from tests.kit.engine_worker import TensorStream, run, tiny_config, weights

ROUTED = {"router": "linear", "gate": "tanh", "capacity": 0.5}


class Poisoned(TensorStream):
    """Batches, one of which is not finite.

    Args:
        step: Number of the poisoned batch.
        value: What all of it is multiplied by.
    """

    def __init__(self, step: int, value: float):
        super().__init__(8, seed=0)
        self.step, self.value = step, value

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        for step, (images, targets) in enumerate(super().batches(epoch, start), start):
            yield images * (self.value if epoch == 0 and step == self.step else 1), targets


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_the_state_before_the_step_is_saved_and_a_mended_run_ends_like_another(tmp_path: Path, value: float) -> None:
    config = tiny_config(output=tmp_path / "run", epochs=1, log_every=50)
    message = r"at step 4 \(epoch 1\); last good checkpoint: .*step-000000003.*first in the output of patch_embed"
    with pytest.raises(FloatingPointError, match=message):
        fit(config, streams=(Poisoned(3, value), TensorStream(8, seed=None)), progress=False)
    assert all(
        value.isfinite().all()
        for value in load_checkpoint(*list_checkpoints(tmp_path / "run/checkpoints")[:1]).weights.values()
    )
    expected = run(replace(config, output=str(tmp_path / "other")))
    assert run(config).evaluation == expected.evaluation
    left, right = weights(tmp_path / "run/model"), weights(tmp_path / "other/model")
    assert all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize(
    ("name", "losses"), [("blocks.1.router.score", {}), ("blocks.2.mlp.fc1", {}), ("blocks.2.mlp.fc1", {"load": 0.1})]
)
def test_the_module_and_the_batch_are_named(
    name: str, losses: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poisoned(kind: LoopKind) -> tuple[nn.Module, nn.Module | None]:
        model, teacher = create_models(kind)
        calls = iter(range(10**6))

        def poison(module: Any, inputs: Any, output: Tensor) -> Tensor | None:
            # The second batch of the first step, and its repetition.
            return output * torch.nan if next(calls) in (1, 3) else None

        model.get_submodule(name).register_forward_hook(poison)
        return model, teacher

    monkeypatch.setattr(start, "create_models", poisoned)
    config = tiny_config(output=tmp_path / "run", epochs=1, routing={**ROUTED, "losses": losses}, accumulate=2)
    message = rf"at step 1 .*none was written yet; first in the output of {name}, batch 2 of 2"
    with pytest.raises(FloatingPointError, match=message.replace(".score", r"\.score")):
        run(config)
    assert not (tmp_path / "run/config.yaml").exists()


def test_an_infinite_gradient_changes_no_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(kind: LoopKind) -> tuple[nn.Module, nn.Module | None]:
        model, teacher = create_models(kind)
        calls = iter(range(10**6))
        model.get_parameter("blocks.0.mlp.fc1.weight").register_hook(
            lambda gradient: gradient * torch.inf if next(calls) == 3 else None
        )
        return model, teacher

    monkeypatch.setattr(start, "create_models", poisoned)
    config = tiny_config(output=tmp_path / "run", epochs=1, checkpoint_every=1)
    with pytest.raises(FloatingPointError, match=r"or its gradient, .*at step 4 .*good checkpoint: .*step-000000003"):
        run(config)
    for path in list_checkpoints(tmp_path / "run/checkpoints"):
        assert all(value.isfinite().all() for value in load_checkpoint(path).weights.values())
