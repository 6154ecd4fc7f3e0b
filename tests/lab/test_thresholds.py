"""Calibrated thresholds: a mean budget, images by themselves, and groups that differ in number, against a slow loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mmod
from mmod.lab import calibrate_thresholds
from mmod.planning.schedules import falling
from mmod.routing import Router
from tests.kit.attention_oracle import attention_of
from tests.kit.zoo import make_model

SIDE = 80
NAME = "vit_tiny_patch16_224"


def easy_and_hard(count: int, seed: int = 1) -> Tensor:
    """Return images of which every second consists of four uniform areas."""
    images = torch.randn(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))
    images[::2] = F.interpolate(images[::2, :, :2, :2], size=(SIDE, SIDE))
    return images


def decided(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor, Any]:
    """Return a model's output, how many tokens every block keeps of every image (blocks, images), and the trace."""
    with torch.no_grad(), mmod.trace(model) as decisions:
        out = model(images)
    return out, torch.stack([routing.keep_BN.sum(1) for routing in decisions.values()]), decisions


def regrouped(rows: Tensor, groups: list[list[int]], threshold: float) -> list[list[int]]:
    """Return the groups after a decision: rows like one before them in an evenly spread order join the most similar."""
    patches = range(1, len(rows))
    # Places whose bits, read backwards, are smaller come before.
    order = {row: int(f"{row - 1:020b}"[::-1], 2) for row in patches}
    alike = F.cosine_similarity(rows[:, None], rows[None], dim=-1).tolist()
    kept = [0]
    for row in patches:
        before = [alike[row][other] for other in patches if order[other] < order[row]]
        if 1 - max(before, default=-1.0) >= threshold:
            kept.append(row)
    merged = {row: list(groups[row]) for row in kept}
    for row in patches:
        if row not in kept:
            merged[max(kept[1:], key=lambda other: alike[row][other])] += groups[row]
    return list(merged.values())


def merged_by_hand(model: Any, image: Tensor, config: mmod.RoutingConfig) -> tuple[Tensor, list[int]]:
    """Return the logits of one image, and the number of rows after every routed block."""
    tokens = model.norm_pre(model._pos_embed(model.patch_embed(image[None])))[0]
    groups = [[token] for token in range(len(tokens))]
    thresholds = dict(zip(config.blocks, config.select.threshold))
    counts = []
    earlier = None

    def add(update: Tensor) -> Tensor:
        return tokens + update[slots()]

    def slots() -> list[int]:
        return [next(place for place, group in enumerate(groups) if token in group) for token in range(len(tokens))]

    def rows() -> Tensor:
        return torch.stack([tokens[group].mean(0) for group in groups])

    for number, block in enumerate(model.blocks):
        size_N = torch.tensor([len(group) for group in groups], dtype=tokens.dtype)
        tokens = add(attention_of(block, rows(), config.skipped.size_power * size_N.log())[0])
        if thresholds.get(number, earlier) != earlier:
            groups = regrouped(rows(), groups, thresholds[number])
            earlier = thresholds[number]
        if number in thresholds:
            counts.append(len(groups))
        tokens = add(block.mlp(block.norm2(rows())))
    return model.forward_head(model.norm(tokens[None]))[0], counts


@pytest.mark.parametrize(("power", "start"), [(0.5, 0), (0.0, 2)])
def test_groups_are_those_of_a_loop_over_tokens(power: float, start: int) -> None:
    model = make_model(NAME, img_size=SIDE, depth=6).double()
    images = easy_and_hard(3).double()
    shape = mmod.preset("gradual", depth=6, start=start, router={"channels": None}, skipped={"size_power": power})
    shape = shape.replace(capacity=falling(6, 0.6, steps=2, start=start).capacity)
    config = calibrate_thresholds(model, images, 0.75, shape)
    assert config.blocks[0] == start
    assert len(set(config.select.threshold)) == 2
    out, kept, _ = decided(mmod.route_(model, config), images)
    mmod.unroute_(model)
    for place, image in enumerate(images):
        with torch.no_grad():
            expected, counts = merged_by_hand(model, image, config)
        assert kept[:, place].tolist() == counts
        # Thresholds and weights of groups are of single precision.
        torch.testing.assert_close(out[place], expected, rtol=1e-7, atol=1e-7)


def test_a_mean_budget_is_kept_and_easy_images_cost_less() -> None:
    # Several prefix tokens; what routing does with each other model, the invariants say.
    model = make_model("vit_little_patch16_reg4_gap_256", img_size=SIDE)
    images = easy_and_hard(8)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    config = calibrate_thresholds(model, images, 0.7, mmod.preset("gradual", skipped={"before": "block"}))
    assert not mmod.is_routed(model)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert mmod.RoutingConfig.from_dict(config.to_dict()) == config
    mmod.route_(model.double(), config)
    out, kept, decisions = decided(model, images.double())
    tokens = kept.shape[1] * next(iter(decisions.values())).score_BN.shape[1]
    for share, capacity in zip(kept.sum(1) / tokens, config.capacity):
        assert float(share) == pytest.approx(capacity, abs=0.04)
    assert mmod.flops(model, SIDE, decisions).share == pytest.approx(0.7, abs=0.02)
    assert kept[:, ::2].sum() < kept[:, 1::2].sum()
    # Neither other images nor padded slots change an image; nor do all tokens between blocks.
    single = torch.cat([model(image[None]) for image in images.double()])
    torch.testing.assert_close(out, single, rtol=1e-9, atol=1e-9)
    model.blocks[1].register_forward_hook(lambda *passed: None)
    torch.testing.assert_close(out, model(images.double()), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("router", "skipped"), [("attention", "merge"), ("cells", "follow")])
def test_tokens_join_others_by_any_threshold(router: str, skipped: str) -> None:
    model = make_model(NAME, img_size=SIDE).double()
    images = easy_and_hard(4).double()
    config = mmod.RoutingConfig(router=router, skipped=skipped, blocks=(1, 2, 3), capacity=(0.8, 0.6, 0.45))
    if router == "cells":
        config = config.replace(select=mmod.Threshold((0.0, 0.1, 0.6)))
    else:
        config = calibrate_thresholds(model, images, 0.8, config)
    mmod.route_(model, config)
    out, _, decisions = decided(model, images)
    torch.testing.assert_close(out, torch.cat([model(image[None]) for image in images]), rtol=1e-9, atol=1e-9)
    for routing in decisions.values():
        slot_BN = routing.joined.slot_BN
        assert slot_BN is not None
        assert bool((slot_BN >= 0).all())
        assert bool((slot_BN < routing.keep_BN.sum(1, keepdim=True)).all())
    model.train()(images).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_extreme_thresholds_keep_all_tokens_or_one_beside_the_prefix() -> None:
    images = easy_and_hard(2)
    dense = make_model(NAME, img_size=SIDE)(images)
    everything = mmod.preset("gradual", select=mmod.Threshold(0.0))
    out, kept, _ = decided(mmod.route_(make_model(NAME, img_size=SIDE), everything), images)
    torch.testing.assert_close(out[1], dense[1], rtol=1e-4, atol=1e-4)
    for skipped in ("merge", "follow"):
        config = mmod.preset("gradual", select=mmod.Threshold(5.0), skipped=skipped)
        _, kept, _ = decided(mmod.route_(make_model(NAME, img_size=SIDE), config), images)
        assert set(kept.flatten().tolist()) == {2}
    config = mmod.preset("gradual", select=mmod.Threshold(0.05, max_tokens=20))
    out, kept, _ = decided(model := mmod.route_(make_model(NAME, img_size=SIDE), config), images)
    assert int(kept.max()) <= 20
    torch.testing.assert_close(out, torch.cat([model(image[None]) for image in images]), rtol=1e-4, atol=1e-4)


def test_a_threshold_for_every_block() -> None:
    config = mmod.RoutingConfig(router="norm", blocks=(1, 2, 3), select=mmod.Threshold((0.5, 1.0, 1.0)))
    model = mmod.route_(make_model(NAME, img_size=SIDE), config)
    routers = [block.router for block in mmod.routed_blocks(model).values()]
    assert [router.config.select.threshold for router in routers] == [0.5, 1.0, 1.0]
    assert routers[1].config is routers[2].config
    _, _, decisions = decided(model, easy_and_hard(2))
    for threshold, routing in zip((0.5, 1.0, 1.0), decisions.values()):
        level = routing.score_BN / routing.score_BN.mean(1, keepdim=True)
        assert torch.equal(routing.keep_BN[:, 1:], level[:, 1:] >= threshold)
    assert mmod.routing_config(model).select.threshold == (0.5, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"one number, or one for each of the 3 routed blocks, got \(0.5, 1.0\)"):
        mmod.route_(make_model(NAME), config.replace(select={"threshold": (0.5, 1.0)}))
    with pytest.raises(ValueError, match=r"select\.threshold must be one number here, as a block has, got \(0.5, 1.0"):
        Router(config, dim=8, block=1, capacity=0.5)(torch.zeros(1, 4, 8))
    with pytest.raises(ValueError, match=r"select\.threshold of a learned score"):
        mmod.RoutingConfig(router="linear", select=mmod.Threshold((0.5, 1.5)))


IMAGES = easy_and_hard(2)


@pytest.mark.parametrize(
    ("images", "budget", "config", "message"),
    [
        (
            IMAGES,
            0.3,
            mmod.preset("gradual", start=3),
            r"budget must be at least 0\.\d+ of the dense FLOPs with blocks \[3\]",
        ),
        (IMAGES, 1.5, None, r"budget must be a number in \(0, 1\), got 1.5"),
        (
            IMAGES,
            0.7,
            mmod.preset("gradual", router="cells"),
            "router 'cells' joins tokens of a cell however unlike they are",
        ),
        ([IMAGES], 0.7, None, "images must be one tensor"),
        (IMAGES / 0, 0.7, None, "images must be finite"),
        (IMAGES[0], 0.7, None, r"images must be \(B, C, H, W\), got \(3, 80, 80\)"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(images: Any, budget: float, config: Any, message: str) -> None:
    model = make_model(NAME, img_size=SIDE)
    with pytest.raises((TypeError, ValueError), match=message):
        calibrate_thresholds(model, images, budget, *filter(None, [config]))


def test_a_routed_model_is_not_calibrated() -> None:
    with pytest.raises(ValueError, match="is routed already"):
        calibrate_thresholds(mmod.route_(make_model(NAME, img_size=SIDE), "gradual"), IMAGES, 0.7)
