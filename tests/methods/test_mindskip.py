"""Whole images, or tokens, that skip attention, MLP or a block by a hard threshold (MindSkip)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmod
from mmod.analysis import flops
from mmod.ops.gate import step_gate
from tests.kit.cover import in_turn
from tests.kit.vlm_zoo import make_language, words
from tests.kit.zoo import PLAIN, make_images, make_model

OPERATORS = ("block", "attention", "mlp")


def config_for(operator: str, **changes: Any) -> mmod.RoutingConfig:
    fields = {"router": {"init_std": 0.5}, "blocks": (1, 2), "operator": operator, **changes}
    return mmod.preset("mindskip", depth=4, **fields)


def split_images(model: Any, images: Tensor) -> None:
    """Set each router's threshold so that about half of the images run, whatever reaches its block."""
    for block in mmod.routed_blocks(model).values():
        with torch.no_grad(), mmod.trace(model) as decisions:
            model(images)
        name = next(name for name, other in mmod.routed_blocks(model).items() if other is block)
        level_B = decisions[name].score_BN[:, 0].sigmoid().sort().values
        # Between two images, for rounding differs with what else is in the batch.
        threshold = mmod.Threshold(float(level_B[1:3].double().mean()))
        block.router.config = block.router.config.replace(select=threshold)


def defined(block: Any, x: Tensor, operator: str) -> Tensor:
    """Return a block's output image by image, in a loop over the source's formula."""
    router, outputs = block.router, []
    for image_ND in x:
        normed_ND = image_ND / image_ND.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-9)
        score = (normed_ND.float() @ router.score.weight[0].float()).mean()
        runs = float(score.sigmoid() >= router.config.select.threshold)
        out = image_ND[None]
        for name, branch, norm, scale in (("attention", "attn", "norm1", "ls1"), ("mlp", "mlp", "norm2", "ls2")):
            update = getattr(block, scale)(getattr(block, branch)(getattr(block, norm)(out)))
            out = out + (runs if operator in (name, "block") else 1.0) * update
        outputs.append(out[0])
    return torch.stack(outputs)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("name", ["test_vit", "deit3_small_patch16_224"])
def test_every_block_by_its_definition(name: str, operator: str) -> None:
    images = make_images(name, 5).double()
    model = mmod.route_(make_model(name).double(), config_for(operator))
    split_images(model, images)
    recorded: dict[str, tuple[Tensor, Tensor]] = {}
    for place, block in mmod.routed_blocks(model).items():
        block.register_forward_hook(lambda block, args, out, place=place: recorded.update({place: (args[0], out)}))
    with torch.no_grad(), mmod.trace(model) as decisions:
        model(images)
    thresholds = {place: block.router for place, block in mmod.routed_blocks(model).items()}
    mmod.unroute_(model)
    for place, (x, out) in recorded.items():
        kept_B = decisions[place].keep_BN.any(1)
        assert 0 < int(kept_B.sum()) < 5
        assert torch.equal(decisions[place].keep_BN, kept_B[:, None].expand_as(decisions[place].keep_BN))
        block = model.get_submodule(place)
        block.router = thresholds[place]
        with torch.no_grad():
            torch.testing.assert_close(out, defined(block, x, operator), rtol=1e-6, atol=1e-8)
        if operator == "block":
            assert torch.equal(out[~kept_B], x[~kept_B])


@pytest.mark.parametrize(("name", "operator"), in_turn(PLAIN, OPERATORS))
def test_training_evaluation_and_single_images_agree(name: str, operator: str) -> None:
    images = make_images(name, 4).double()
    model = mmod.route_(make_model(name).double(), config_for(operator))
    split_images(model, images)
    with torch.no_grad():
        actual, single = model(images), torch.cat([model(image[None]) for image in images])
        torch.testing.assert_close(actual, single)
        drops = [module for module in model.modules() if getattr(module, "drop_prob", 0)]
        for module in drops:
            module.drop_prob = 0.0
        torch.testing.assert_close(model.train()(images), actual)
    model.eval()
    for level, expected in ((0.0, make_model(name).double()), (1.0, None)):
        for block in mmod.routed_blocks(model).values():
            block.router.config = block.router.config.replace(select=mmod.Threshold(level))
        with torch.no_grad():
            actual = model(images)
            if expected is not None:
                assert torch.equal(actual, expected(images))
    # Nothing runs, with and without gradients.
    torch.testing.assert_close(model(images), actual)


@pytest.mark.parametrize("operator", OPERATORS)
def test_branches_of_skipped_images_are_not_computed(operator: str) -> None:
    images = make_images("test_vit", 6)
    model = mmod.route_(make_model("test_vit"), config_for(operator))
    split_images(model, images)
    rows: dict[str, int] = {}
    for place in mmod.routed_blocks(model):
        for branch in ("attn.qkv", "mlp.fc1"):
            key = f"{place}.{branch}"
            model.get_submodule(key).register_forward_pre_hook(
                lambda _, args, key=key: rows.update({key: len(args[0])})
            )
    with torch.no_grad(), mmod.trace(model) as decisions:
        model(images)
    for place, routing in decisions.items():
        kept = int(routing.keep_BN.any(1).sum())
        assert rows[f"{place}.attn.qkv"] == (kept if operator != "mlp" else 6)
        assert rows[f"{place}.mlp.fc1"] == (kept if operator != "attention" else 6)


def test_the_straight_through_gradient_by_hand() -> None:
    level = torch.tensor([0.2, 0.5, 0.9], requires_grad=True)
    gate = step_gate(level, 0.5)
    assert gate.tolist() == [0, 1, 1]
    (gate * torch.tensor([3.0, 5.0, 7.0])).sum().backward()
    assert level.grad is not None
    assert level.grad.tolist() == [3, 5, 7]


@pytest.mark.parametrize("per", ["sequence", "token"])
def test_routers_learn_alone_also_from_what_is_skipped(per: str) -> None:
    changes = {"router": {"init_std": 0.5, "per": per}, "context": "kept" if per == "sequence" else "all"}
    model = mmod.route_(make_model("test_vit"), config_for("attention", **changes, losses={"capacity": 0.1}))
    for block in mmod.routed_blocks(model).values():
        block.router.config = block.router.config.replace(select=mmod.Threshold(0.999999))
    mmod.freeze_dense_(model).train()
    images, before = make_images("test_vit", 4), {name: value.clone() for name, value in model.state_dict().items()}
    model(images).square().mean().backward()
    learning = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert learning == {f"{place}.router.score.weight" for place in mmod.routed_blocks(model)}
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    optimizer.step()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == learning
    optimizer.zero_grad()
    model(images)
    loss = mmod.auxiliary_loss(model)
    # Nothing is kept but protected tokens: the capacity, 0.5, is away in each of two blocks.
    protected = 1 / 37 if per == "token" else 0
    assert loss.item() == pytest.approx(0.1 * 2 * (0.5 - protected))
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


def test_capacity_loss_leads_to_the_target_with_frozen_weights() -> None:
    name = "vit_tiny_patch16_224"
    images = make_images(name, 32)
    model = mmod.route_(make_model(name, depth=3), config_for("attention", capacity=0.25))
    optimizer = torch.optim.Adam([p for p in mmod.freeze_dense_(model).parameters() if p.requires_grad], lr=0.02)
    model.train()
    for _ in range(60):
        optimizer.zero_grad()
        model(images)
        mmod.auxiliary_loss(model).backward()
        optimizer.step()
    with torch.no_grad(), mmod.trace(model.eval()) as decisions:
        model(images)
    assert all(abs(share - 0.25) < 0.15 for share in decisions.kept_shares().values())


@pytest.mark.parametrize("operator", OPERATORS)
def test_flops_are_the_mean_over_images(operator: str) -> None:
    model = make_model("vit_tiny_patch16_224")
    dense = {row.name: row.dense for row in flops(model, 64).blocks}
    mmod.route_(model, config_for(operator))
    everything, half, nothing = (flops(model, 64, kept=share).blocks for share in (1.0, 0.5, 0.0))
    for full, some, none in zip(everything, half, nothing):
        router = full.router
        assert full.routed == dense[full.name] + router
        assert some.routed == pytest.approx((full.routed + none.routed) / 2, abs=1)
        if router and operator == "block":
            assert none.routed == router
        elif router:
            assert router < none.routed < full.routed


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_tokens_of_language_models_skip_alike_in_training_and_evaluation(name: str, operator: str) -> None:
    router = mmod.score("linear", init_std=0.5)
    context = "kept" if operator == "mlp" else "all"
    config = config_for(operator, router=router, context=context, language={"tokens": "all"}, blocks=(1, 3))
    model, batch = mmod.route_(make_language(name).double(), language=config), words(3)
    valid = batch["attention_mask"].bool()
    with torch.no_grad(), mmod.trace(model) as decisions:
        expected = model(**batch, use_cache=False).logits
        kept = [routing.keep_BN for routing in decisions.values()]
        logits = model.train()(**batch, use_cache=False).logits
        assert all(torch.equal(keep[valid], other.keep_BN[valid]) for keep, other in zip(kept, decisions.values()))
    assert all(0 < float(keep[valid].double().mean()) < 1 for keep in kept)
    torch.testing.assert_close(logits[valid], expected[valid], rtol=1e-7, atol=1e-8)
    model(**batch, use_cache=False).logits[valid].square().mean().backward()
    assert all(bool(block.router.score.weight.grad.abs().sum() > 0) for block in mmod.routed_blocks(model).values())


def test_tokens_that_all_run_in_training_learn_by_importance() -> None:
    config = mmod.RoutingConfig(
        router="linear",
        gate="step",
        select=mmod.Threshold(0.5),
        context="all",
        losses={"importance": 1.0},
        language={"tokens": "all"},
        blocks=(1, 3),
    )
    model = mmod.route_(make_language("llama"), language=config).train()
    model(**words(3), use_cache=False)
    mmod.auxiliary_loss(model).backward()
    assert all(bool(block.router.score.weight.grad.abs().sum() > 0) for block in mmod.routed_blocks(model).values())


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_coin_skips_as_many_whole_images_by_chance_and_each_image_the_same_way_again(operator: str) -> None:
    name = "vit_tiny_patch16_224"
    images, model = make_images(name, 40).double(), make_model(name).double()
    coin = mmod.RoutingConfig(router="coin", select=mmod.Threshold(0.75), blocks=(1, 2), operator=operator)
    dense = flops(model, tuple(images.shape[1:])).routed
    mmod.route_(model, coin)
    with torch.no_grad(), mmod.trace(model) as decisions:
        actual = model(images)
    kept = [decision.keep_BN for decision in decisions.values()]
    assert not torch.equal(*kept)  # Each block draws for itself.
    # At a chance of a quarter, 20 of 80 draws with a standard deviation of 4.
    assert 6 <= sum(int(own_BN[:, 0].sum()) for own_BN in kept) <= 36
    assert all(torch.equal(own_BN, own_BN[:, :1].expand_as(own_BN)) for own_BN in kept)
    with torch.no_grad():
        torch.testing.assert_close(torch.cat([model(image[None]) for image in images[:3]]), actual[:3])
    costs = [flops(model, tuple(images.shape[1:]), kept=kept).routed for kept in (0.0, decisions, 1.0)]
    assert costs[0] < costs[1] < costs[2] == dense
