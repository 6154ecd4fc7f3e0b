"""Attempts on photographs start from what the library does: without a change they are equal to it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch

import mmod
from scripts.photo_attempts import Parts, Steps, merging_forward, parts_forward

PLAN = {1: 0.7, 3: 0.4}


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    shape = {"img_size": 112, "embed_dim": 48, "num_heads": 3, "depth": 5, "num_classes": 0, "global_pool": ""}
    return timm.create_model("vit_small_patch14_dinov2", init_values=1.0, **shape).eval()


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.rand(2, 3, 112, 112, generator=torch.Generator().manual_seed(1))


def test_steps_are_gradual_merging(model: Any, images: torch.Tensor) -> None:
    routed = mmod.route_(
        copy.deepcopy(model), mmod.preset("gradual", blocks=(1, 2, 3, 4), capacity=(0.7, 0.7, 0.4, 0.4))
    )
    with torch.no_grad():
        expected = routed.forward_features(images)[:, 1:]
        torch.testing.assert_close(merging_forward(model, images, Steps(PLAN)), expected)


@pytest.mark.parametrize(
    "change",
    [
        {"score": "random"},
        {"by_size": 0.5},
        {"restored_from": 4},
        {"shared_among": 4},
        {"restored_before": 4},
        {"plan": {}, "pooled_keys": True},
        {"score": "windows", "plan": {2: 0.25}},
    ],
    ids=str,
)
def test_every_attempt_answers_each_patch_and_differs(model: Any, images: torch.Tensor, change: dict[str, Any]) -> None:
    with torch.no_grad():
        features = merging_forward(model, images, Steps(**{"plan": PLAN, **change}))
        assert features.shape == (2, 64, 48)
        assert not torch.equal(features, merging_forward(model, images, Steps(PLAN)))


@pytest.mark.parametrize("keys", ["all", "groups"])
@pytest.mark.parametrize("mlp", ["all", "groups"])
def test_groups_of_one_token_change_nothing(model: Any, images: torch.Tensor, keys: str, mlp: str) -> None:
    with torch.no_grad():
        dense = model.forward_features(images)[:, 1:]
        parts = Parts(1.0, keys, mlp, decided=(1, 3))
        torch.testing.assert_close(parts_forward(model, images, parts), dense, atol=1e-4, rtol=1e-4)
