from __future__ import annotations

import copy
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor

import mmod
from mmod import RoutingConfig
from mmod.blocks import record
from mmod.config import LOSSES
from mmod.routing import Kept, Router, Routing, TokenMasks
from tests.kit.interrupts import Interrupt
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
    routing = Routing(Kept(torch.tensor([[0, 2]])), score)
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
    importance = block.mod_state.routing.importance_BN
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
    assert all(routing.importance_BN is None for routing in decisions.values())
    with pytest.raises(ValueError, match="importance of the block in front, which did not run in training"):
        model.train().blocks[1](torch.randn(1, 5, model.embed_dim))


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
        alone = router(x[row : row + 1, :length], importance[row : row + 1, :length], TokenMasks(None, marked))
        singles.append(alone)
        terms.append((LOSSES[loss](alone, router), length, length - 2))
    for garbage in (0.0, 100.0):
        filled = torch.where(valid.unsqueeze(-1), x, garbage).requires_grad_()
        weight = torch.where(valid, importance, garbage)
        batch = router(filled, weight, TokenMasks(valid, protect if protects == "marked" else None))
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
    importance_BN = mmod.routed_blocks(model)["blocks.1"].mod_state.routing.importance_BN
    twin = mmod.route_(make_model(NAME), mmod.preset("distilled")).train()
    twin(images)
    torch.testing.assert_close(importance_BN, mmod.routed_blocks(twin)["blocks.1"].mod_state.routing.importance_BN)


@pytest.mark.parametrize(
    "method",
    [
        RoutingConfig(),
        None,
        "gradual",
        mmod.methods.Merge(r=2),
        mmod.lab.Experts(),
    ],
    ids=repr,
)
def test_a_model_without_losses_adds_0_before_and_after_a_pass(method: Any) -> None:
    model = make_model(NAME).train()
    if method is not None:
        mmod.apply_(model, method)
    assert mmod.auxiliary_loss(model) == 0
    for _ in range(2):
        loss = model(make_images(NAME, 2)).square().mean()
        total = loss + mmod.auxiliary_loss(torch.nn.Sequential(model)) + mmod.auxiliary_loss(model)
        assert torch.equal(total, loss)
        total.backward()


def test_0_is_on_the_device_of_the_model() -> None:
    model = mmod.route_(make_model(NAME), "a-mod").to("meta")
    assert mmod.auxiliary_loss(model).device.type == "meta"


WITH_LOSSES = {
    "membership": RoutingConfig(router=mmod.score("linear", init_std=0.3), losses={"membership": 0.1, "capacity": 1.0}),
    "distilled": mmod.preset("distilled", blocks="late", capacity=0.5),
    "experts": mmod.lab.Experts(choice="tokens"),
    "recursions": mmod.lab.Recursions(choice="tokens", recursions=2),
}
with_losses = pytest.mark.parametrize("method", WITH_LOSSES.values(), ids=WITH_LOSSES)


def learning(method: Any) -> tuple[torch.nn.Module, list[Tensor], list[Tensor]]:
    """Return a model in training mode, two batches, and the losses of each."""
    model = mmod.apply_(make_model(NAME), method).train()
    views = [make_images(NAME, 2, seed=seed) for seed in (1, 2)]
    losses = []
    for x in views:
        model(x)
        losses.append(mmod.auxiliary_loss(model).detach())
    return model, views, losses


def pass_without_training(model: torch.nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model(x)
        model.eval()(x)
    with mmod.trace(model):
        model(x)
    model.train()


@with_losses
def test_losses_of_two_passes_are_added_and_of_passes_that_train_nothing_are_not(method: Any) -> None:
    model, views, losses = learning(method)
    outputs = []
    for x in views:
        with mmod.trace(model):
            outputs.append(model(x))
        pass_without_training(model, x)
    both = mmod.auxiliary_loss(model)
    torch.testing.assert_close(both, sum(losses))
    (both + sum(output.square().mean() for output in outputs)).backward()
    with pytest.raises(RuntimeError, match="since its loss was last collected"):
        mmod.auxiliary_loss(model)


@with_losses
def test_a_pass_whose_backward_pass_went_without_its_loss_adds_none(method: Any) -> None:
    model, (first, second), losses = learning(method)
    model(first).square().mean().backward()
    loss = model(second).square().mean()
    auxiliary = mmod.auxiliary_loss(model)
    torch.testing.assert_close(auxiliary, losses[1])
    (loss + auxiliary).backward()
    # Its graph is there still.
    model(first).square().mean().backward(retain_graph=True)
    model(second)
    auxiliary = mmod.auxiliary_loss(model)
    torch.testing.assert_close(auxiliary, sum(losses))
    auxiliary.backward()


@with_losses
def test_a_pass_that_was_interrupted_leaves_no_loss(method: Any) -> None:
    model, (first, second), losses = learning(method)
    with Interrupt() as counted:
        model(first)
    mmod.auxiliary_loss(model)
    for at in range(3, counted.places + 1, counted.places // 4):
        # A pass before it keeps its loss.
        model(first)
        with pytest.raises(KeyboardInterrupt), Interrupt(at):
            model(second)
        torch.testing.assert_close(mmod.auxiliary_loss(model), losses[0])


def test_an_interrupted_pass_leaves_no_loss_where_another_method_was_taken_off() -> None:
    model = mmod.apply_(make_model(NAME).train(), WITH_LOSSES["experts"])
    # Its blocks share nothing, so that it owns none.
    mmod.route_(model, RoutingConfig(router="norm", capacity=0.5, blocks=(1, 2), training_only=True))
    model.eval().train()
    images = make_images(NAME, 2)
    with Interrupt() as counted:
        model(images)
    mmod.auxiliary_loss(model)
    # In the head, behind all blocks.
    with pytest.raises(KeyboardInterrupt), Interrupt(counted.places - 2):
        model(images)
    with pytest.raises(RuntimeError, match="since its loss was last collected"):
        mmod.auxiliary_loss(model)


def test_a_method_with_losses_may_be_taken_off_behind_another_one() -> None:
    model = mmod.apply_(make_model(NAME).train(), WITH_LOSSES["experts"])
    mmod.route_(model, RoutingConfig(router="linear", gate="linear", blocks=(1, 2), losses={"load": 0.1}))
    mmod.unroute_(model)
    model(make_images(NAME, 2))
    assert mmod.auxiliary_loss(model) > 0


@with_losses
@pytest.mark.parametrize("trains", [True, False], ids=["with backward passes", "without"])
def test_the_losses_of_so_many_passes_are_kept_and_more_are_told_once(
    method: Any, trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert record.UNCOLLECTED == 16
    monkeypatch.setattr(record, "UNCOLLECTED", 3)
    model, (x, _), losses = learning(method)

    def run(passes: int) -> None:
        for _ in range(passes):
            loss = model(x).square().mean()
            if trains:
                loss.backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(3)
    with pytest.warns(UserWarning, match=r"more than 3 forward passes.*were not collected.*auxiliary_loss") as told:
        run(3)
    assert len(told) == 1
    kept = 1 if trains else 3
    torch.testing.assert_close(mmod.auxiliary_loss(model).detach(), kept * losses[0])


@with_losses
def test_collection_after_each_pass_accumulates_the_gradients_of_single_passes_bitwise(method: Any) -> None:
    model, views, _ = learning(method)
    accumulated = []
    for groups in ([views], [views[:1], views[1:]]):
        total = [torch.zeros_like(weight) for weight in model.parameters()]
        for group in groups:
            model.zero_grad()
            for x in group:
                (model(x).square().mean() + mmod.auxiliary_loss(model)).backward()
            for value, weight in zip(total, model.parameters(), strict=True):
                value += 0 if weight.grad is None else weight.grad
        accumulated.append(total)
    assert all(map(torch.equal, *accumulated))


@with_losses
def test_threads_collect_the_losses_of_their_own_passes(method: Any) -> None:
    model, views, losses = learning(method)

    def collect(x: Tensor) -> Tensor:
        model(x)
        model(x)
        return mmod.auxiliary_loss(model).detach()

    with ThreadPoolExecutor(2) as pool:
        for found, loss in zip(pool.map(collect, views), losses, strict=True):
            torch.testing.assert_close(found, 2 * loss)


@with_losses
def test_a_forgotten_loss_keeps_no_graph_that_a_backward_pass_freed(method: Any) -> None:
    model, (x, _), _ = learning(method)
    kept = []
    for _ in range(3):
        output = model(x)
        marker = torch.nn.Identity()
        kept.append(weakref.ref(marker))
        assert output.grad_fn is not None
        output.register_hook(partial(lambda gradient, held: None, held=marker))
        output.square().mean().backward()
        del output, marker
    assert [marker() for marker in kept] == [None] * 3


SCORED: dict[str, tuple[Any, Any]] = {
    **{name: (partial(timm.create_model, NAME, img_size=64), method) for name, method in WITH_LOSSES.items()},
    "gate": (partial(timm.create_model, NAME, img_size=64), RoutingConfig(router="linear", gate="sigmoid")),
    "channels": (
        partial(timm.create_model, "resnet18", layers=(2, 1, 1, 1), channels=(16, 16, 16, 16)),
        mmod.lab.Channels(divisor=4),
    ),
}


@pytest.mark.parametrize(("make", "method"), SCORED.values(), ids=SCORED)
def test_what_decides_and_is_frozen_as_it_was_drawn_is_told_once(make: Any, method: Any) -> None:
    def frozen() -> torch.nn.Module:
        model = mmod.apply_(make(), method).train()
        for part, weight in model.named_parameters():
            weight.requires_grad_(not any(word in part for word in ("router", "selector")))
        return model

    x = torch.randn(2, 3, 64, 64)
    # A copy in another dtype is the same model.
    model = copy.deepcopy(frozen().bfloat16())
    with pytest.warns(UserWarning, match=r"is frozen at the weights drawn.*modules_to_save=\['") as told:
        model(x.bfloat16())
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x.bfloat16())
        # Nothing trains, and what was loaded is not random.
        with torch.no_grad():
            frozen()(x)
        frozen().eval()(x)
        loaded = frozen()
        loaded.load_state_dict({key: value + 0.01 for key, value in loaded.state_dict().items()})
        loaded(x)
        mmod.undo_(loaded)(x)


class TestErrors:
    def test_no_forward_pass_since_the_last_collection(self) -> None:
        model = mmod.route_(make_model(NAME), mmod.preset("distilled")).train()
        with pytest.raises(RuntimeError, match=r"no pass of blocks\.1 in training mode"):
            mmod.auxiliary_loss(model)
        model(make_images(NAME, 1))
        mmod.auxiliary_loss(model)
        with pytest.raises(RuntimeError, match="since its loss was last collected"):
            mmod.auxiliary_loss(model)

    def test_graph_gone(self) -> None:
        model = mmod.route_(make_model(NAME), mmod.preset("distilled")).train()
        with torch.no_grad():
            model(make_images(NAME, 1))
        with pytest.raises(RuntimeError, match="leaves none under no_grad"):
            mmod.auxiliary_loss(model)
