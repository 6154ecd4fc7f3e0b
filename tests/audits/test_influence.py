"""What a router uses is told from what the data favours: planted routers, on data with a centre bias and without."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mmod
from mmod.audits.information import Influence, influence_of, roll_patches, rolled_twice
from mmod.audits.result import Audit
from tests.kit.decisions import decided
from tests.kit.planted import PATCH, SIDE, TOKENS, batches_of, content, plant, position
from tests.kit.zoo import make_images, make_model

SMALL = "vit_tiny_patch16_224"
SEEDS = 2
# The share of objects that stand in the middle.
DATA = {"centred": 0.95, "even": 0.0}


def standard(score_BN: Tensor) -> Tensor:
    return (score_BN - score_BN.mean(1, keepdim=True)) / score_BN.std(1, keepdim=True)


def chance(x_BND: Tensor) -> Tensor:
    return torch.randn(x_BND.shape[:2])


def noisy_content(x_BND: Tensor) -> Tensor:
    return standard(content(x_BND)) + chance(x_BND)


def noisy_position(x_BND: Tensor) -> Tensor:
    return position(x_BND) + 0.5 * chance(x_BND)


def mixture(x_BND: Tensor) -> Tensor:
    return standard(content(x_BND)) + 2 * position(x_BND)


ROUTERS: dict[str, tuple[Any, str]] = {
    "content": (content, "content"),
    "norm": ("norm", "content"),
    "noisy content": (noisy_content, "content"),
    "position": (position, "position"),
    "noisy position": (noisy_position, "position"),
    "mixture": (mixture, "both"),
    "hashed": ("random", "no better than random"),
    "drawn anew": (chance, "no better than random"),
}


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("router", ROUTERS)
def test_planted_routers_are_told_apart_whatever_the_data(router: str, data: str) -> None:
    score, kind = ROUTERS[router]
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        batches = batches_of(300, seed, favour=DATA[data])
        audit = mmod.audit(
            plant(score),
            batches,
            mmod.AuditConfig(conditions=["random", "centre", "mean mask"], draws=1, resamples=200),
        )
        assert audit.kind == kind, audit.verdict
        assert Audit.from_dict(json.loads(json.dumps(audit.to_dict()))) == audit


def test_a_fixed_position_that_would_do_as_well_is_a_fact_of_the_data() -> None:
    torch.manual_seed(0)
    very_noisy = plant(lambda x_BND: standard(content(x_BND)) + 2 * chance(x_BND))
    audit = mmod.audit(very_noisy, batches_of(1000, 0, favour=1.0), mmod.AuditConfig(draws=2, resamples=300))
    assert audit.explained is not None
    assert audit.explained.value > 0.9
    assert audit.kind == "content"
    assert audit.verdict.startswith(
        "The router uses content: where images are rolled by whole patches, content decides"
    )
    assert "On this data a fixed position would do as well: 'centre' reaches" in audit.verdict


def test_a_position_that_is_worth_nothing_on_the_data_is_still_what_the_router_uses() -> None:
    audit = mmod.audit(plant(position), batches_of(800, 0, favour=0.0), mmod.AuditConfig(draws=1, resamples=200))
    assert audit.kind == "position"
    assert "Its choice is no better than random" in audit.verdict


def audited_influence(model: nn.Module, size: int = 60) -> Influence:
    batches = list(zip(make_images(SMALL, 60).split(size), (torch.arange(60) % 7).split(size)))
    influence = mmod.audit(model, batches, mmod.AuditConfig(conditions=["random"], draws=1, resamples=100)).influence
    assert influence is not None
    assert influence.images == 60
    return influence


def test_shares_are_exact_where_one_of_them_decides_all() -> None:
    only = {"blocks": (0,), "gate": "identity", "capacity": 0.3}
    by_content = audited_influence(
        mmod.route_(make_model(SMALL, pos_embed="none"), mmod.RoutingConfig(router="norm", **only))
    )
    assert by_content.content.value == pytest.approx(1, abs=0.02)
    assert abs(by_content.position.value) < 0.02
    by_position = audited_influence(mmod.route_(make_model(SMALL), mmod.RoutingConfig(router=position, **only)))
    assert by_position.position.value == pytest.approx(1)
    assert by_position.content.low < 0 < by_position.content.high
    assert by_position.position_share.low < 1 < by_position.position_share.high


def test_content_moves_on_the_grid_of_the_images() -> None:
    model = make_model(SMALL, pos_embed="none", dynamic_img_size=True)
    mmod.route_(model, mmod.RoutingConfig(router="norm", blocks=(0,), gate="identity", capacity=0.3))
    # 2 x 8 patches are as many as a square of 4 x 4, whose steps would cut patches.
    images = torch.randn(60, 3, 32, 128, generator=torch.Generator().manual_seed(0))
    config = mmod.AuditConfig(conditions=["random", "centre"], draws=1, resamples=100)
    influence = mmod.audit(model, [(images, torch.arange(60) % 7)], config).influence
    assert influence is not None
    assert influence.content.value == pytest.approx(1, abs=0.02)


def test_shares_of_a_known_mixture_are_those_of_its_variance() -> None:
    """A token is kept where a bit of its content, of its place or of both says so, mixed by chance."""
    rng, images = np.random.default_rng(0), 4000
    grid = (4, 4)
    bits = torch.from_numpy(rng.random((images, 1, *grid)) < 0.5).float()
    even = torch.arange(16) % 2 == 0

    def decide(batch: Tensor) -> Tensor:
        picked = torch.from_numpy(rng.random((len(batch), 16)))
        drawn = torch.from_numpy(rng.random((len(batch), 16)) < 0.5)
        by_content = batch.flatten(1) > 0
        return torch.where(picked < 0.6, by_content, torch.where(picked < 0.9, even, drawn))

    moved = {"block": [decide(rolled) for rolled in rolled_twice(bits, grid, range(images))]}
    everything = torch.ones(images, 16, dtype=torch.bool)
    influence = influence_of(decided({"block": everything}, everything, sizes=8 * [500], moved=moved, grid=grid))
    assert influence is not None
    # Of a bit that decides with probability p, the share of the variance is p squared.
    assert influence.content.value == pytest.approx(0.36, abs=0.02)
    assert influence.position.value == pytest.approx(0.09, abs=0.01)
    assert influence.position_share.low < 0.2 < influence.position_share.high


def test_batches_do_not_matter() -> None:
    model = mmod.route_(make_model(SMALL), mmod.RoutingConfig(router="linear", capacity=0.4))
    assert audited_influence(model, 60) == audited_influence(model, 7)


def test_images_are_rolled_by_whole_patches_and_nothing_else_changes() -> None:
    images, targets = make_images(SMALL, 3), torch.arange(3)
    shifts = torch.tensor([[0, 0], [1, 0], [2, 3]])
    grid = (4, 4)
    rolled, kept = roll_patches({"x": (images, "name"), "y": targets}, shifts, grid)["x"], targets
    assert rolled[1] == "name"
    assert torch.equal(kept, targets)
    step = images.shape[2] // 4
    for image, moved, (rows, columns) in zip(images, rolled[0], shifts.tolist()):
        assert torch.equal(moved, image.roll((rows * step, columns * step), (1, 2)))
    assert roll_patches(targets, shifts, grid) is None
    assert roll_patches(images[:, :, :-1], shifts, grid) is None


@pytest.mark.parametrize("arrange", [lambda x, y: {"x": x, "y": y}, lambda x, y: [[x], y]], ids=["dict", "lists"])
def test_images_are_found_in_batches_of_any_form(arrange: Callable[[Tensor, Tensor], Any]) -> None:
    def evaluate(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        images, targets = (batch["x"], batch["y"]) if isinstance(batch, dict) else (batch[0][0], batch[1])
        return mmod.audits.evaluate_classes(model, (images, targets))

    batches = [arrange(*batch_parts) for batch_parts in batches_of(200, 0)]
    assert (
        mmod.audit(
            plant(position), batches, mmod.AuditConfig(conditions=["random"], resamples=100), evaluate=evaluate
        ).kind
        == "position"
    )


def test_without_a_grid_the_verdict_speaks_of_the_data_alone() -> None:
    """Images in rows of patches that nobody knows the grid of are not moved."""

    def evaluate(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        rows, targets = batch
        images = rows.reshape(-1, SIDE, SIDE, PATCH, PATCH).transpose(2, 3).reshape(-1, 1, SIDE * PATCH, SIDE * PATCH)
        return mmod.audits.evaluate_classes(model, (images, targets))

    flat = [
        (images.reshape(-1, SIDE, PATCH, SIDE, PATCH).transpose(2, 3).reshape(-1, TOKENS, PATCH * PATCH), targets)
        for images, targets in batches_of(800, 0, favour=0.95)
    ]
    config = mmod.AuditConfig(["random", "centre"], draws=1, resamples=200)
    for score in (content, position):
        audit = mmod.audit(plant(score), flat, config, evaluate=evaluate)
        assert audit.influence is None
        assert audit.kind == "inconclusive"
        assert "its content was not moved" in audit.verdict
    assert mmod.audit(plant("random"), flat, config, evaluate=evaluate).kind == "no better than random"
