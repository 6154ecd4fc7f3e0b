from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import mmod
from mmod import RoutingConfig
from mmod.config import LOSSES
from mmod.routing import Evidence, Kept, Router, Routing, TokenMarks
from tests.kit.zoo import make_images, make_model

NAME = "test_vit"


def trained(config: RoutingConfig):
    model = mmod.route_(make_model(NAME), config).train()
    model(make_images(NAME, 3))
    return model


def routers(model) -> dict[str, Router]:
    return {name: block.router for name, block in mmod.routed_blocks(model).items()}


def test_membership_is_the_cross_entropy_with_what_was_kept() -> None:
    model = trained(RoutingConfig(router=mmod.score("linear", init_std=1.0), losses={"membership": 0.5}))
    routings = [block.mod_state.routing for block in mmod.routed_blocks(model).values()]
    expected = torch.stack(
        [F.binary_cross_entropy_with_logits(r.score_BN[:, 1:], r.keep_BN[:, 1:].float()) for r in routings]
    ).sum()
    torch.testing.assert_close(mmod.auxiliary_loss(model), 0.5 * expected)


def test_membership_is_zero_when_scores_say_what_is_kept() -> None:
    score = torch.tensor([[50.0, -50.0, 50.0, -50.0]])
    routing = Routing(Kept(torch.tensor([[0, 2]])), Evidence(score))
    router = Router(RoutingConfig(router="linear"), dim=2, block=0, capacity=0.5)
    assert mmod.losses.membership_loss(routing, router).item() < 1e-20


def test_load_is_share_times_mean_gate_and_only_the_gate_learns() -> None:
    model = trained(mmod.preset("modification", router={"init_std": 1.0}))
    routings = [block.mod_state.routing for block in mmod.routed_blocks(model).values()]
    shares = [r.keep_BN[:, 1:].float().mean() for r in routings]
    expected = sum(share * torch.sigmoid(r.score_BN[:, 1:]).mean() for share, r in zip(shares, routings, strict=True))
    loss = mmod.auxiliary_loss(model)
    torch.testing.assert_close(loss, 0.01 * expected)
    loss.backward()
    assert all(router.score.weight.grad.abs().sum() > 0 for router in routers(model).values())


def test_capacity_measures_the_hard_share_and_moves_the_scores() -> None:
    config = RoutingConfig(
        router=mmod.score("linear", init_std=1.0), select="threshold", capacity=0.25, losses={"capacity": 1.0}
    )
    model = trained(config)
    shares = [block.mod_state.routing.keep_BN.float().mean() for block in mmod.routed_blocks(model).values()]
    loss = mmod.auxiliary_loss(model)
    torch.testing.assert_close(loss, torch.stack([(share - 0.25).abs() for share in shares]).sum())
    loss.backward()
    assert all(router.score.weight.grad.abs().sum() > 0 for router in routers(model).values())


def test_importance_teaches_the_selection_of_attention_routing() -> None:
    model = trained(mmod.preset("distilled", capacity=0.5, router={"init_std": 1.0}))
    block = mmod.routed_blocks(model)["blocks.1"]
    importance = block.mod_state.routing.evidence.importance_BN
    assert not importance.requires_grad
    twin = mmod.route_(make_model(NAME), RoutingConfig(capacity=0.5, blocks=(1,))).train()
    twin(make_images(NAME, 3))
    twin_routing = mmod.routed_blocks(twin)["blocks.1"].mod_state.routing
    torch.testing.assert_close(importance, twin_routing.score_BN)
    expected = F.binary_cross_entropy_with_logits(
        block.mod_state.routing.score_BN[:, 1:], twin_routing.keep_BN[:, 1:].float()
    )
    torch.testing.assert_close(mmod.losses.importance_loss(block.mod_state.routing, block.router), expected)


def test_importance_is_not_computed_in_evaluation() -> None:
    model = trained(mmod.preset("distilled")).eval()
    with mmod.trace(model) as decisions:
        model(make_images(NAME, 1))
    assert all(routing.evidence.importance_BN is None for routing in decisions.values())


def test_evaluation_mode_is_named_where_a_loss_is_asked_for() -> None:
    model = trained(RoutingConfig(router="linear", losses={"membership": 0.5}))
    mmod.auxiliary_loss(model)
    model.eval()(make_images(NAME, 1))
    with pytest.raises(
        RuntimeError, match=r"blocks\.1 is in evaluation mode.*`if model\.training: loss = loss \+ mmod"
    ):
        mmod.auxiliary_loss(model)


@pytest.mark.parametrize("name", ["mod", "modification", "distilled"])
def test_a_sum_over_blocks_weighs_every_block_alike(name: str) -> None:
    losses = {"membership": 1.0} if name == "mod" else mmod.preset(name).losses
    wide = mmod.preset(name, blocks=(1, 2, 3, 4, 5), losses=losses, router={"init_std": 1.0})
    model = trained(wide)
    terms = [
        weight * LOSSES[loss](block.mod_state.routing, block.router)
        for block in mmod.routed_blocks(model).values()
        for loss, weight in losses.items()
    ]
    assert len(terms) == 5
    torch.testing.assert_close(mmod.auxiliary_loss(model), torch.stack(terms).sum())


@pytest.mark.parametrize("loss", ["membership", "load", "capacity", "importance"])
@pytest.mark.parametrize("protects", ["leading", "marked"])
def test_padding_and_protected_tokens_do_not_count(loss: str, protects: str) -> None:
    torch.manual_seed(0)
    config = RoutingConfig(
        router=mmod.score("linear", normalize=False), gate="sigmoid", capacity=0.5, losses={loss: 1.0}
    )
    router = Router(config, dim=4, block=0, capacity=0.5, prefix=2)
    torch.nn.init.normal_(router.score.weight)
    rows = [(7, (0, 6)), (11, (0, 10)), (24, (0, 23))] if protects == "marked" else [(7, (0, 1)), (11, (0, 1))]
    terms = []
    tokens = 24
    x, importance = torch.randn(len(rows), tokens, 4), torch.rand(len(rows), tokens)
    valid, protect = torch.zeros(len(rows), tokens, dtype=torch.bool), torch.zeros(len(rows), tokens, dtype=torch.bool)
    singles = []
    for row, (length, kept) in enumerate(rows):
        valid[row, :length] = True
        protect[row, list(kept)] = True
        marked = protect[row : row + 1, :length] if protects == "marked" else None
        alone = router(x[row : row + 1, :length], importance[row : row + 1, :length], TokenMarks(None, marked))
        singles.append(alone)
        terms.append((LOSSES[loss](alone, router), length, length - 2))
    for garbage in (0.0, 100.0):
        filled = torch.where(valid.unsqueeze(-1), x, garbage).requires_grad_()
        weight = torch.where(valid, importance, garbage)
        batch = router(filled, weight, TokenMarks(valid, protect if protects == "marked" else None))
        for row, alone in enumerate(singles):
            assert torch.equal(batch.keep_BN[row, : rows[row][0]], alone.keep_BN[0])
        loss_value = LOSSES[loss](batch, router)
        if loss in ("membership", "importance"):
            total = sum(value * count for value, _, count in terms)
            torch.testing.assert_close(loss_value, total / sum(count for *_, count in terms))
        if loss == "capacity":
            share = sum(int(alone.keep_BN.sum()) for alone in singles) / sum(length for _, length, _ in terms)
            torch.testing.assert_close(loss_value.item(), abs(share - 0.5))
        loss_value.backward()
        assert filled.grad[~valid].abs().max() == 0
        if loss != "capacity":
            marked = protect if protects == "marked" else torch.arange(tokens).expand(len(rows), -1) < 2
            assert filled.grad[marked].abs().max() == 0
        assert filled.grad[valid].abs().max() > 0


def test_frozen_blocks_in_evaluation_hand_over_the_importance_of_this_batch() -> None:
    model = mmod.route_(make_model(NAME), mmod.preset("distilled")).train()
    model(make_images(NAME, 2, seed=1))
    model.blocks[0].eval()
    images = make_images(NAME, 2, seed=2)
    model(images)
    importance_BN = mmod.routed_blocks(model)["blocks.1"].mod_state.routing.evidence.importance_BN
    twin = mmod.route_(make_model(NAME), mmod.preset("distilled")).train()
    twin(images)
    torch.testing.assert_close(
        importance_BN, mmod.routed_blocks(twin)["blocks.1"].mod_state.routing.evidence.importance_BN
    )


@pytest.mark.parametrize(
    "method",
    [
        RoutingConfig(),
        "gradual",
        mmod.methods.Merge(r=2),
        mmod.methods.Experts(),
    ],
    ids=repr,
)
def test_a_model_without_losses_adds_0_before_and_after_a_pass(method: Any) -> None:
    model = mmod.apply_(make_model(NAME), method).train()
    assert mmod.auxiliary_loss(model) == 0
    for _ in range(2):
        loss = model(make_images(NAME, 2)).square().mean()
        total = loss + mmod.auxiliary_loss(torch.nn.Sequential(model)) + mmod.auxiliary_loss(model)
        assert torch.equal(total, loss)
        total.backward()


def test_0_is_on_the_device_of_the_model() -> None:
    model = mmod.route_(make_model(NAME), "a-mod").to("meta")
    assert mmod.auxiliary_loss(model).device.type == "meta"


class TestErrors:
    def test_nothing_routed(self) -> None:
        with pytest.raises(ValueError, match="nothing in this VisionTransformer is routed"):
            mmod.auxiliary_loss(make_model(NAME))

    def test_part_of_a_model_whose_methods_are_unknown(self) -> None:
        model = mmod.apply_(make_model(NAME), mmod.methods.Merge(r=2))
        with pytest.raises(ValueError, match="no auxiliary loss: the model did not run in training mode"):
            mmod.auxiliary_loss(model.blocks)

    def test_no_forward_pass_since_the_last_collection(self) -> None:
        model = mmod.route_(make_model(NAME), mmod.preset("distilled")).train()
        with pytest.raises(RuntimeError, match=r"blocks\.1 has routed nothing in training mode"):
            mmod.auxiliary_loss(model)
        model(make_images(NAME, 1))
        mmod.auxiliary_loss(model)
        with pytest.raises(RuntimeError, match="since its loss was last collected"):
            mmod.auxiliary_loss(model)

    def test_graph_gone(self) -> None:
        model = mmod.route_(make_model(NAME), mmod.preset("distilled")).train()
        with torch.no_grad():
            model(make_images(NAME, 1))
        with pytest.raises(RuntimeError, match="carry no gradient"):
            mmod.auxiliary_loss(model)
