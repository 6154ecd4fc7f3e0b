"""Mixtures of experts in the place of MLPs, and MoDE: against loops, by hand, saved, counted, trained."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import mmod
from mmod.analysis import flops
from mmod.lab import Experts
from mmod.lab.experts import ExpertMlp
from mmod.lab.mixture import balance_loss
from mmod.methods import methods_of
from mmod.training import TrainConfig
from tests.kit.experts import WAYS, mixture_by_loop
from tests.kit.zoo import make_images, make_model, perturb_

# Experts and routers differ.
lively = partial(perturb_, parts=(".others.", ".router."))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_mixture_by_its_definition(way: dict[str, Any]) -> None:
    model = lively(mmod.apply_(make_model("test_vit").double(), Experts(experts=3, blocks=(1, 2), **way)))
    mlp: Any = model.blocks[1].mlp
    x = torch.randn(2, 11, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = torch.stack([mixture_by_loop(mlp, methods_of(model)[0], x_ND) for x_ND in x])
        torch.testing.assert_close(mlp(x), expected, rtol=1e-9, atol=1e-10)


def test_the_balance_loss_by_hand() -> None:
    prob = torch.tensor([[[0.5, 0.3, 0.2], [0.6, 0.1, 0.3], [0.2, 0.7, 0.1], [0.1, 0.2, 0.7]]])
    # Half of the tokens at the first of three experts, a quarter at each other; 3 sum share * mean.
    expected = 3 * (0.5 * 1.4 / 4 + 0.25 * 1.3 / 4 + 0.25 * 1.3 / 4)
    assert balance_loss(prob).item() == pytest.approx(expected)
    assert balance_loss(torch.eye(4)[None] * 0.2 + 0.2).item() == pytest.approx(1)


@torch.no_grad()
def test_tokens_that_choose_alone_can_be_routed_by_threshold() -> None:
    model, images = make_model("test_vit").double(), make_images("test_vit", 3).double()
    lively(mmod.apply_(model, Experts(choice="tokens", capacity=None, idle=1)))
    for config in (
        mmod.RoutingConfig(router="norm", select=mmod.Threshold(8.0)),
        mmod.RoutingConfig(router="random", skipped={"name": "merge", "before": "mlp"}),
    ):
        mmod.route_(model, config)
        assert sum(isinstance(module, ExpertMlp) for module in model.modules()) == 6
        single = torch.cat([model(image[None]) for image in images])
        torch.testing.assert_close(model(images), single)
        mmod.unroute_(model)
    with pytest.raises(ValueError, match=r"operator='mlp' is not possible in blocks\.1"):
        mmod.route_(model, mmod.RoutingConfig(router="random", operator="mlp"))


@pytest.mark.parametrize(("router", "way"), [("attention", WAYS[0]), ("linear", WAYS[3])], ids=str)
def test_staged_mixtures_share_the_kept_tokens_of_each_image(router: str, way: dict[str, Any]) -> None:
    images = make_images("test_vit", 3).double()
    model = lively(mmod.apply_(make_model("test_vit").double(), Experts(**way)))
    before = model.state_dict().keys()
    with torch.no_grad():
        unrouted = model(images)
    mmod.route_(model, mmod.RoutingConfig(router=router, capacity=0.5))
    slots: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, ExpertMlp):
            module.register_forward_pre_hook(lambda _, args, name=name: slots.update({name: args[0].shape[1]}))
    with torch.no_grad():
        actual, single = model(images), torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(actual, single)
    assert [slots[f"blocks.{index}.mlp"] for index in (0, 1)] == [37, 18]
    mmod.unroute_(model)
    assert model.state_dict().keys() == before
    with torch.no_grad():
        assert torch.equal(model(images), unrouted)


def test_flops_follow_from_the_slots() -> None:
    width, tokens, hidden = 64, 37, 192
    dense = flops(make_model("test_vit"), 96).blocks[1].routed
    for experts, idle, capacity in ((4, 0, 1.0), (4, 1, 0.5), (2, 3, 1.5)):
        model = mmod.apply_(make_model("test_vit"), Experts(experts=experts, idle=idle, capacity=capacity))
        slots = experts * math.floor(capacity * tokens / experts)
        router = 2 * tokens * width * (experts + idle)
        expected = dense - 4 * (tokens - slots) * width * hidden + router
        assert flops(model, 96).blocks[1].routed == expected
    report = flops(mmod.route_(model, mmod.RoutingConfig(router="stride", capacity=0.5)), 96)
    assert report.routed < report.dense
    # Without a limit, what the balance loss draws the mean to: three quarters of the tokens.
    model = mmod.apply_(make_model("test_vit"), Experts(experts=3, idle=1, choice="tokens", capacity=None))
    assert flops(model, 96).blocks[1].routed == dense - 4 * (37 - 27) * width * hidden + 2 * tokens * width * 4


def test_what_does_not_go_together_is_refused() -> None:
    model: nn.Module = mmod.apply_(make_model("test_vit"), Experts())
    for config in (
        mmod.RoutingConfig(router="norm", select=mmod.Threshold(1.0)),
        mmod.RoutingConfig(router="random", operator="mlp"),
        mmod.RoutingConfig(router="random", skipped={"name": "merge", "before": "mlp"}),
    ):
        with pytest.raises(ValueError, match=r"possible in blocks\.1"):
            mmod.route_(model, config)
    mmod.route_(model, mmod.preset("mindskip", depth=6))
    fields = {"output": "run", "model": {"name": "test_vit"}, "data": {"source": "digits"}}
    TrainConfig.from_dict({**fields, "methods": [{"kind": "experts"}], "routing": {"router": "random"}})
