"""A learned score that consecutive blocks share."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mmod
from mmod import RoutingConfig
from tests.kit.oracle import reference_forward
from tests.kit.zoo import make_model

IMAGES = torch.randn(2, 3, 64, 64, dtype=torch.float64)
CONFIG: dict[str, Any] = {"router": {"name": "linear", "shared": True, "init_std": 0.5}, "capacity": 0.5}


def routed(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    model = make_model("vit_tiny_patch16_224", img_size=64, depth=6).double()
    return mmod.route_(model, RoutingConfig(**{**CONFIG, "blocks": (1, 2, 4, 5), **changes}))


def scores_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.named_parameters() if "router" in name}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.train()
    model(IMAGES).square().sum().backward()
    assert all(value.grad is not None for value in model.parameters())
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def test_the_first_block_of_each_span_alone_has_a_weight() -> None:
    model = routed()
    assert list(scores_of(model)) == ["blocks.1.router.score.weight", "blocks.4.router.score.weight"]
    with mmod.trace(model) as trace, torch.no_grad():
        model(IMAGES)
    kept = [trace[name].keep_BN for name in trace]
    assert torch.equal(kept[0], kept[1])
    assert torch.equal(kept[2], kept[3])
    assert not torch.equal(kept[0], kept[2])


@pytest.mark.parametrize(
    "changes", [{}, {"gate": "identity"}, {"capacity": (0.5, 0.5, 0.7, 0.3)}, {"skipped": "scale"}], ids=str
)
def test_it_is_the_model_whose_blocks_score_alike(changes: dict[str, Any]) -> None:
    model = routed(**changes).eval()
    with torch.no_grad():
        handed = model(IMAGES)
        model.blocks[1].register_forward_hook(lambda *_: None)
        # Watched blocks enter and leave one by one.
        assert torch.equal(model(IMAGES), handed)
        expected = reference_forward(model, IMAGES)
    torch.testing.assert_close(handed, expected, rtol=1e-6, atol=1e-6)


def test_gradients_reach_the_score_from_all_blocks_with_checkpointing_too() -> None:
    model = routed()
    plain = gradients(copy.deepcopy(model))
    kept = copy.deepcopy(model)
    kept.set_grad_checkpointing(True)
    for name, value in gradients(kept).items():
        torch.testing.assert_close(value, plain[name])
    # The second block of a span weighs its update too.
    with torch.no_grad():
        model.blocks[2].mlp.fc2.weight.zero_()
        model.blocks[2].attn.proj.weight.zero_()
    assert not torch.allclose(gradients(model)["blocks.1.router.score.weight"], plain["blocks.1.router.score.weight"])


def test_checkpointing_that_loses_the_gradient_is_refused() -> None:
    model = routed().train()
    for block in model.blocks:
        run = block.forward
        block.forward = lambda x, run=run: checkpoint(run, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match=r"use_reentrant=False, or set router.shared=False"):
        model(IMAGES.clone().requires_grad_()).sum().backward()
