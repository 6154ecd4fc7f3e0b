"""One checkpoint for many budgets, and routing in training alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mmod
from mmod.training import ElasticConfig, EmaConfig, FitResult, evaluate
from mmod.training.engine.start import create_models
from mmod.training.image.kind import ImageKind
from mmod.training.image.task import ElasticTask
from tests.kit.engine_worker import TensorStream, run, tiny_config, weights

CAPACITIES = [0.25, 0.5, 0.75, 1.0]
RANDOM = {"router": "random", "blocks": "late", "capacity": 0.5, "training_only": True}


def elastic(output: Path, **changes: Any) -> Any:
    routing = {"router": "attention", "blocks": "late", "capacity": 0.5}
    return tiny_config(output=output, **{"routing": routing, "elastic": ElasticConfig(CAPACITIES), **changes})


def test_others_learn_what_the_largest_says(tmp_path: Path) -> None:
    model, _ = create_models(ImageKind(elastic(tmp_path)))
    nn.init.normal_(model.head.weight)  # type: ignore[union-attr,arg-type]
    images, targets = next(TensorStream(8, seed=None).batches(0))
    task = ElasticTask(model, nn.CrossEntropyLoss(), ElasticConfig(CAPACITIES))
    parts = task.eval()(images, targets)
    logits = {}
    for capacity in CAPACITIES:
        mmod.set_capacity_(model, capacity)
        logits[capacity] = model(images)
    taught = logits.pop(1.0).detach()
    torch.testing.assert_close(parts["task"], F.cross_entropy(taught, targets))
    p = taught.softmax(-1)
    learned = [(p * (p / answer.softmax(-1)).log()).sum(-1).mean() for answer in logits.values()]
    expected = torch.stack(learned).sum()
    torch.testing.assert_close(parts["elastic"], expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(parts["loss"], parts["task"] + parts["elastic"])
    # What they learn does not move what teaches them.
    gradients, others = (torch.autograd.grad(loss, list(model.parameters())) for loss in (parts["elastic"], expected))
    for one, other in zip(gradients, others):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_step_has_the_largest_the_smallest_and_some_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = create_models(ImageKind(elastic(tmp_path)))
    capacities: list[float] = []
    monkeypatch.setattr("mmod.training.image.task.set_capacity_", lambda _, capacity: capacities.append(capacity))
    task = ElasticTask(model, nn.CrossEntropyLoss(), ElasticConfig(CAPACITIES, samples=3))
    for _ in range(8):
        task(*next(TensorStream(8, seed=None).batches(0)))
    steps = [capacities[first : first + 3] for first in range(0, len(capacities), 3)]
    assert all(step[:2] == [1.0, 0.25] for step in steps)
    assert {step[2] for step in steps} == {0.5, 0.75}


def test_an_elastic_run_is_evaluated_at_each_capacity(tmp_path: Path) -> None:
    done = run(elastic(tmp_path / "run", epochs=1, ema=EmaConfig(0.5)))
    again = elastic(tmp_path / "again", model={"checkpoint": str(tmp_path / "run")})
    model, _ = create_models(ImageKind(again))
    for evaluation in (done.evaluation, done.average):
        assert evaluation is not None
        assert evaluation.capacities is not None
        assert list(evaluation.capacities) == ["0.25", "0.5", "0.75", "1"]
        assert evaluation.capacities["0.5"] == evaluation.accuracies()
        assert {"top1@0.25", "top1@1"} <= evaluation.columns().keys()
    for capacity, figures in (done.evaluation.capacities or {}).items():
        mmod.set_capacity_(model, float(capacity))
        assert evaluate(model, TensorStream(8, seed=None)).accuracies() == figures  # type: ignore[arg-type]


TRAINING_ONLY = [
    {"routing": RANDOM},
    {"methods": [{"kind": "prune", "keep": 0.5, "blocks": [0], "training_only": True}]},
    {"methods": [{"kind": "merge", "r": 3, "training_only": True}]},
    {"methods": [{"kind": "resize", "size": 8, "training_only": True}]},
]


SHORT: dict[str, Any] = {"epochs": 3, "ema": EmaConfig(0.5), "args": {"dynamic_img_size": True}}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> FitResult:
    return run(tiny_config(output=tmp_path_factory.mktemp("dense") / "run", **SHORT))


@pytest.mark.parametrize("change", TRAINING_ONLY, ids=["routing", "prune", "merge", "resize"])
def test_what_is_for_training_alone_leaves_a_dense_model(
    change: dict[str, Any], dense: FitResult, tmp_path: Path
) -> None:
    done = run(tiny_config(output=tmp_path / "routed", **change, training_only_epochs=2, **SHORT))
    assert done.evaluation.kept == {}
    trained, others = weights(tmp_path / "routed/model"), weights(Path(dense.folder) / "model")
    assert trained.keys() == others.keys()
    assert any(not torch.equal(trained[name], others[name]) for name in trained)
    model, teacher = create_models(
        ImageKind(tiny_config(output=tmp_path / "next", model={"checkpoint": str(tmp_path / "routed")}))
    )
    assert teacher is None
    assert evaluate(model, TensorStream(8, seed=None)) == done.best  # type: ignore[arg-type]
    assert dense.steps == done.steps


@pytest.mark.parametrize(("epochs", "expected"), [(None, [True, True, True]), (2, [True, True, False])])
def test_the_first_epochs_are_routed(epochs: int | None, expected: list[bool], tmp_path: Path) -> None:
    config = tiny_config(output=tmp_path, routing=RANDOM, training_only_epochs=epochs, epochs=3)
    is_routed: list[bool] = []
    run(config, after_step=lambda step: is_routed.append(mmod.is_routed(step.model)))
    assert is_routed[:: len(is_routed) // 3] == expected
