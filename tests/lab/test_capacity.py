"""Capacities that are learned: the budget holds in every step, gradients are exact, and a plain plan is kept."""

from __future__ import annotations

import copy
import functools
import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import mmod
from mmod.lab import LearnedCapacity, learn_capacity_, settle_capacity_
from mmod.lab.capacity import LearnedRouter
from mmod.routing import Router, TokenMasks, kept_count
from mmod.training import Step
from tests.kit.engine_worker import run, tiny_config
from tests.kit.zoo import make_images, make_model

LINEAR = mmod.RoutingConfig(router="linear", blocks="all")
# Counting FLOPs takes longest: few models suffice.
WAYS = {
    "linear": LINEAR,
    "shared": mmod.RoutingConfig(router="attention", blocks="late"),
    "all": mmod.RoutingConfig(router="linear", context="all", blocks=(0, 2, 3)),
}
MODELS = ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"]


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def learner(costs: list[list[float]], budget: float, offsets: Tensor | None = None, rate: float = 1.0) -> Any:
    module = LearnedCapacity(costs, 0.0, budget, rate, options=[]).double()
    module.costs_LG = torch.tensor(costs, dtype=torch.float64)
    if offsets is not None:
        module.offsets.data = offsets.double()
    return module


@given(seed=st.integers(0, 99), blocks=st.integers(1, 6), share=st.floats(0.05, 0.95), grid=st.sampled_from([4, 5]))
def test_costs_add_up_to_the_budget_and_gradients_are_exact(seed: int, blocks: int, share: float, grid: int) -> None:
    table = numbers(seed, blocks, grid).abs().add(0.1).cumsum(1)
    least, most = float(table[:, 0].sum()), float(table[:, -1].sum())
    room = least + share * (most - least)
    offset_L = numbers(seed + 100, blocks)

    def capacities(offset_L: Tensor) -> tuple[Any, Tensor]:
        module = learner(table.tolist(), room, offset_L, rate=2.0)
        return module, module()

    module, capacity_L = capacities(offset_L)
    places = np.linspace(float(module.grid[0]), 1, grid)
    spent = sum(np.interp(float(capacity), places, row) for capacity, row in zip(capacity_L.detach(), table.numpy()))
    assert spent == pytest.approx(room, rel=1e-9)
    weight_L = numbers(seed + 200, blocks)
    (gradient,) = torch.autograd.grad((weight_L * capacity_L).sum(), module.offsets)
    # At a corner of a block's cost there is no one gradient.
    near = (capacity_L.detach() * 4 - (capacity_L.detach() * 4).round()).abs().min() < 1e-3
    for block in range(blocks if not near else 0):
        step = torch.zeros(blocks, dtype=torch.float64)
        step[block] = 1e-6
        ends = [(weight_L * capacities(offset_L + sign * step)[1].detach()).sum() for sign in (1, -1)]
        assert float(ends[0] - ends[1]) / 2e-6 == pytest.approx(float(gradient[block]), abs=1e-5)


@given(
    seed=st.integers(0, 99),
    tokens=st.integers(1, 12),
    prefix=st.integers(0, 2),
    upper=st.integers(1, 8),
    padded=st.booleans(),
    gated=st.booleans(),
)
def test_weights_are_those_of_a_loop(
    seed: int, tokens: int, prefix: int, upper: int, padded: bool, gated: bool
) -> None:
    # Ties are many.
    score_BN = numbers(seed, 3, tokens + prefix).mul(2).round()
    counts = torch.tensor([[tokens + prefix], [prefix + 1], [prefix + 1]])
    real_BN = torch.arange(tokens + prefix) < counts if padded else None
    gate = "sigmoid" if gated else "identity"
    lower = Fraction(upper - 1, 8)
    config = mmod.RoutingConfig(router=lambda x_BND: x_BND[:, :, 0], gate=gate)
    router: Any = Router(config, dim=1, block=0, capacity=0.5, prefix=prefix)
    module = learner([[0.0, 0.25, 0.5, 0.75, 1.0]], float(lower) + 0.25 / 8)
    router.__class__ = LearnedRouter
    router.learning = module, 0
    weight = router(score_BN[:, :, None], tokens=TokenMasks(real_BN))
    index_BK, valid_BK = weight.kept.index_BK, weight.kept.valid_BK
    for image in range(3):
        number = tokens + prefix if real_BN is None else int(real_BN[image].sum())
        order = sorted(range(number), key=lambda token: (token >= prefix, -float(score_BN[image, token]), token))
        order = [*range(min(prefix, number)), *(token for token in order if token >= prefix)]
        fully_kept = set(order[: kept_count(number, lower, prefix)])
        for slot, token in enumerate(index_BK[image].tolist()):
            if valid_BK is not None and not valid_BK[image, slot]:
                continue
            expected = 1.0 if token in fully_kept else 0.25
            expected *= float(torch.sigmoid(score_BN[image, token])) if gated else 1.0
            assert float(weight.gate_BK[image, slot].detach()) == pytest.approx(expected)


@functools.cache
def begun(name: str, way: str, budget: float) -> tuple[nn.Module, LearnedCapacity]:
    model = mmod.route_(make_model(name), WAYS[way]).train()
    return model, learn_capacity_(model, budget, make_images(name, 2), rate=1.0)


def learning_model(name: str, way: str, budget: float = 0.6) -> tuple[nn.Module, LearnedCapacity, Tensor]:
    """Return a copy of a model that has begun to learn, for which FLOPs are counted once."""
    model, learned = copy.deepcopy(begun(name, way, budget))
    return model, learned, make_images(name, 2)


@pytest.mark.parametrize(("way", "budget"), [("shared", 0.7), ("all", 0.83)])
def test_the_loss_has_its_gradient(way: str, budget: float) -> None:
    model, learned, images = learning_model(MODELS[0], way, budget)
    model, learned, images = model.double(), learned.double(), images.double()
    offsets = learned.offsets
    offsets.data = 0.3 * numbers(1, len(offsets))

    def loss() -> Tensor:
        logits: Tensor = model(images)
        return (logits * numbers(2, *logits.shape)).sum()

    (gradient,) = torch.autograd.grad(loss(), offsets)
    assert gradient.abs().max() > 0
    for block in range(len(offsets)):
        ends = []
        for sign in (1, -1):
            moved = offsets.detach().clone()
            moved[block] += sign * 1e-3
            offsets.data, kept = moved, offsets.data
            ends.append(float(loss()))
            offsets.data = kept
        # Scores are in fp32.
        assert (ends[0] - ends[1]) / 2e-3 == pytest.approx(float(gradient[block]), abs=1e-3, rel=1e-2)


@pytest.mark.parametrize(("name", "way"), list(zip(MODELS, ["shared", "linear"])))
def test_what_is_settled_is_a_plan_within_the_budget(name: str, way: str, tmp_path: Path) -> None:
    model, learned, images = learning_model(name, way, 0.7)
    learned.offsets.data = numbers(3, len(learned.offsets)).float()
    with torch.no_grad():
        expected = model.eval()(images)
        other = copy.deepcopy(model)(images)
    assert torch.equal(other, expected)
    plan = settle_capacity_(model)
    assert torch.equal(model(images), expected)
    assert plan.capacity == tuple(mmod.capacities(model).values())
    # Few tokens: a block's next one may not fit any more.
    assert 0.6 < mmod.flops(model, tuple(images.shape[1:])).share <= 0.7 + 1e-6
    assert len(set(plan.capacity)) > 1
    mmod.save_pretrained(model, tmp_path / "saved")
    assert torch.equal(mmod.load_pretrained(tmp_path / "saved")(images), expected)


def test_a_pass_solves_for_the_level_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, learned, images = learning_model(MODELS[0], "linear")
    solved: list[float] = []
    solve = LearnedCapacity._solve

    def count(module: LearnedCapacity, offset_L: Any) -> float:
        solved.append(solve(module, offset_L))
        return solved[-1]

    monkeypatch.setattr(LearnedCapacity, "_solve", count)
    for passes in (1, 2):
        learned.offsets.data = numbers(passes, len(learned.offsets)).float()
        model(images)
        assert len(solved) == passes
    with torch.no_grad():
        model.eval()(images)
    assert len(solved) == 2


def test_flops_are_those_of_the_nearest_plan_while_capacities_are_learned() -> None:
    model, learned, images = learning_model(MODELS[0], "linear")
    size = tuple(images.shape[1:])
    assert 0.5 < mmod.flops(model, size).share <= 0.6 + 1e-6
    learned.offsets.data = numbers(3, len(learned.offsets)).float()
    report = mmod.flops(model, size)
    settle_capacity_(model)
    assert mmod.flops(model, size) == report


def test_the_model_does_not_hold_what_is_learned_and_unroute_ends_it() -> None:
    model, _, images = learning_model(MODELS[0], "linear")
    routed = mmod.route_(make_model(MODELS[0]), LINEAR)
    assert model.state_dict().keys() == routed.state_dict().keys()
    mmod.unroute_(model)
    assert torch.equal(model.eval()(images), make_model(MODELS[0])(images))


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (LINEAR.replace(select="threshold"), {}, "select='topk' and skipped='pass'"),
        (mmod.RoutingConfig(skipped="merge"), {}, "got 'topk' and 'merge'"),
        (LINEAR, {"budget": 1.5}, r"budget must be a number in \(0, 1\)"),
        (LINEAR, {"budget": 0.001}, r"budget must be in \(0\.\d+, 1\.\d+\)"),
        (LINEAR, {"rate": 0.0}, "rate must be"),
        (LINEAR, {"example": None}, "example must be a Tensor, got None"),
        (LINEAR, {"example": torch.rand(3, 32, 32)}, r"\(B, C, H, W\), got \(3, 32, 32\)"),
    ],
)
def test_what_cannot_be_learned_is_refused(config: mmod.RoutingConfig, options: dict[str, Any], message: str) -> None:
    model = mmod.route_(make_model(MODELS[0]), config)
    with pytest.raises((TypeError, ValueError), match=message):
        learn_capacity_(model, **{"budget": 0.5, "example": make_images(MODELS[0], 2), **options})


def test_learning_begins_and_ends_once() -> None:
    model, _, images = learning_model(MODELS[0], "linear")
    with pytest.raises(ValueError, match=r"learned once.* has a LearnedRouter"):
        learn_capacity_(model, 0.5, images)
    settle_capacity_(model)
    with pytest.raises(ValueError, match="learns no capacities"):
        settle_capacity_(model)


def test_copies_learn_and_routers_get_their_class_back() -> None:
    model, learned, images = learning_model(MODELS[0], "shared", 0.83)
    learned.offsets.data = numbers(3, len(learned.offsets)).float()
    expected = model(images)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(images), expected)
        settle_capacity_(copied)
        assert {type(block.router) for block in mmod.routed_blocks(copied).values()} == {Router}
    # The copies' ends are not the model's.
    assert torch.equal(model(images), expected)


def test_routers_that_peft_copies_learn() -> None:
    peft = pytest.importorskip("peft")
    model, learned, images = learning_model(MODELS[0], "linear")
    learned.offsets.data = numbers(3, len(learned.offsets)).float()
    expected = model(images)
    config = peft.LoraConfig(target_modules=["qkv"], modules_to_save=["router"])
    wrapped = peft.get_peft_model(model, config)
    assert torch.equal(wrapped(images), expected)
    settle_capacity_(wrapped.get_base_model())
    assert not any(isinstance(module, LearnedRouter) for module in wrapped.modules())


def test_a_run_learns_capacities_in_its_first_steps_and_keeps_them(tmp_path: Path) -> None:
    optimizers: list[torch.optim.Optimizer] = []
    plans: list[mmod.RoutingConfig] = []

    def learn(step: Step) -> None:
        if step.done == 1:
            learned = learn_capacity_(step.model, 0.7, torch.zeros(8, 1, 16, 16), rate=50.0)
            optimizers.append(torch.optim.Adam(learned.parameters(), lr=1e-3))
        elif step.done <= 8:
            optimizers[0].step()
            optimizers[0].zero_grad()
        if step.done == 8:
            plans.append(settle_capacity_(step.model))

    config = tiny_config(output=tmp_path / "run", routing={"router": "linear", "blocks": "all"}, epochs=2)
    result = run(config, after_step=learn)
    (plan,) = plans
    assert len(set(plan.capacity)) > 1
    model = mmod.load_pretrained(tmp_path / "run/model")
    assert tuple(mmod.capacities(model).values()) == plan.capacity
    assert mmod.flops(model, (1, 16, 16)).share <= 0.7 + 1e-6
    # Images have 17 tokens.
    kept = [max(1, int(17 * capacity + 1e-9)) / 17 for capacity in plan.capacity]
    assert list(result.evaluation.kept.values()) == kept
