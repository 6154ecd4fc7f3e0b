"""What becomes of tokens that are not kept: they pass by, follow a kept token, or merge with it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mmod
from tests.kit.zoo import ZOO, make_images, make_model

# Attention outside the fused call, sizes that the model's own mask of patches does not describe.
NAFLEX = [name for name in ZOO if name.startswith("naflexvit")]
FALLING = (0.8, 0.55, 0.45)
SPAN = {"blocks": (1, 2, 3), "capacity": FALLING}


def routed(name: str, double: bool = True, **fields: object) -> nn.Module:
    model = make_model(name)
    return mmod.route_(model.double() if double else model, mmod.RoutingConfig(**fields)).eval()


def run_with_all_tokens(model: nn.Module, images: Tensor) -> Tensor:
    """Run a model with all tokens between its blocks, as whatever reads them there has it."""
    handle = model.blocks[2].register_forward_hook(lambda *_: None)
    with torch.no_grad():
        out = model(images)
    handle.remove()
    return out


@pytest.mark.parametrize("capacity", [0.5, FALLING, (0.5, 0.25, 0.5), (1.0, 0.5, 0.5)])
@pytest.mark.parametrize("router", ["attention", "random", "redundancy", "stride", "norm"])
def test_rows_handed_on_are_exact_where_tokens_pass_by(router: str, capacity: float | tuple[float, ...]) -> None:
    for name in ("vit_tiny_patch16_224", "eva02_tiny_patch14_224", "beit_base_patch16_224"):
        model, images = (
            routed(name, double=False, router=router, blocks=(1, 2, 3), capacity=capacity),
            make_images(name, 2),
        )
        with torch.no_grad():
            assert torch.equal(model(images), run_with_all_tokens(model, images))


@pytest.mark.parametrize("router", ["redundancy", "cells"])
@pytest.mark.parametrize("skipped", ["follow", "merge"])
def test_the_update_goes_to_all_that_joined(skipped: str, router: str) -> None:
    name = "vit_tiny_patch16_224"
    model, images = routed(name, router=router, skipped=skipped, **SPAN), make_images(name, 3).double()
    recorded: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: recorded.append(args[0]))
    with mmod.trace(model) as decisions, torch.no_grad():
        model(images)
    before = set(range(recorded[0].shape[1]))
    for index, routing in zip((1, 2, 3), decisions.values()):
        x, y = recorded[index], recorded[index + 1] if index < 3 else None
        kept = int(recorded[0].shape[1] * FALLING[index - 1])
        assert routing.kept.index_BK.shape[1] == kept
        assert routing.joined.slot_BN is not None
        for image in range(3):
            join = routing.joined.slot_BN[image]
            assert set(routing.kept.index_BK[image].tolist()) <= before
            assert torch.equal(join[routing.kept.index_BK[image]], torch.arange(kept))
            # Nothing joins the class token.
            assert (join == 0).sum() == 1
            if routing.joined.size_BK is not None:
                assert torch.equal(routing.joined.size_BK[image].long(), join.bincount(minlength=kept))
            if y is not None:
                update = (y - x)[image]
                torch.testing.assert_close(update, update[routing.kept.index_BK[image]][join], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("skipped", ["pass", "follow", "merge"])
@pytest.mark.parametrize("name", NAFLEX)
def test_padding_changes_nothing(name: str, skipped: str) -> None:
    model = routed(name, router="redundancy", skipped=skipped, blocks=(1, 2), capacity=0.5)
    patches = torch.randn(1, 20, 16 * 16 * 3, dtype=torch.float64)
    places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(5), indexing="ij"), dim=-1).view(1, 20, 2)
    padded = {
        "patches": torch.cat([patches, torch.randn(1, 9, 768, dtype=torch.float64)], dim=1),
        "patch_coord": torch.cat([places, places.new_zeros(1, 9, 2)], dim=1),
        "patch_valid": torch.arange(29)[None] < 20,
    }
    plain = {"patches": patches, "patch_coord": places, "patch_valid": torch.ones(1, 20, dtype=torch.bool)}
    with torch.no_grad():
        torch.testing.assert_close(model(padded), model(plain), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("skipped", ["follow", "merge"])
@pytest.mark.parametrize("router", ["redundancy", "random"])
def test_uneven_images_that_a_later_block_evens_out_are_as_if_alone(router: str, skipped: str) -> None:
    select = mmod.Threshold((0.4, 3.0, 3.0), min_tokens=4)
    model = routed(NAFLEX[0], router=router, skipped=skipped, blocks=(1, 2, 3), select=select)
    sizes = ((4, 5), (5, 3), (3, 4))
    alone = []
    for height, width in sizes:
        places = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"), dim=-1)
        alone.append(
            {
                "patches": torch.randn(1, height * width, 768, dtype=torch.float64),
                "patch_coord": places.view(1, -1, 2),
                "patch_valid": torch.ones(1, height * width, dtype=torch.bool),
            }
        )
    batch = {name: nn.utils.rnn.pad_sequence([image[name][0] for image in alone], True) for name in alone[0]}
    with torch.no_grad():
        expected = torch.cat([model(image) for image in alone])
        torch.testing.assert_close(model(batch), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("gate", ["tanh", "sigmoid", "linear"])
@pytest.mark.parametrize("skipped", ["follow", "merge"])
def test_scores_that_learn_get_a_gradient(skipped: str, gate: str) -> None:
    name = "deit_tiny_patch16_224"
    model = routed(name, double=False, router="linear", gate=gate, skipped=skipped).train()
    model(make_images(name, 2)).square().sum().backward()
    assert all(block.router.score.weight.grad.any() for block in mmod.routed_blocks(model).values())


@torch.no_grad()
def test_features_are_whole_and_a_failed_call_leaves_nothing() -> None:
    name = "vit_tiny_patch16_224"
    model, images = routed(name, double=False, router="redundancy", skipped="merge", **SPAN), make_images(name, 2)
    features = model.forward_intermediates(images, indices=[1, 2], norm=False, intermediates_only=True)
    assert [feature.shape for feature in features] == [(2, 64, 4, 4)] * 2
    expected = model(images)
    with pytest.raises(AssertionError):
        model(torch.zeros(1, 3, 32, 32))
    assert torch.equal(model(images), expected)


def test_capacities_that_cannot_be_are_refused() -> None:
    name, images = "vit_tiny_patch16_224", make_images("vit_tiny_patch16_224", 1)
    fields = {"router": "redundancy", "skipped": "merge", "blocks": (1, 2)}
    with pytest.raises(ValueError, match=r"not rise: 0\.4 in blocks\.1, 0\.6 in the next"):
        routed(name, double=False, capacity=(0.4, 0.6), **fields)
    model = routed(name, double=False, capacity=(0.6, 0.4), **fields)
    mmod.set_capacity_(model, (0.4, 0.6))
    with pytest.raises(ValueError, match=r"6 of 17 tokens are left for a capacity of 0\.6"):
        model(images)
    mmod.set_capacity_(model, 0.05)
    with pytest.raises(ValueError, match="needs a kept token beside the 1 that are always kept"):
        model(images)


@torch.no_grad()
def test_capacities_may_rise_by_less_than_a_token() -> None:
    name, images = "vit_tiny_patch16_224", make_images("vit_tiny_patch16_224", 1)
    fields = {"double": False, "router": "redundancy", "skipped": "merge", "blocks": (1, 2)}
    level = routed(name, capacity=(0.5, 0.52), **fields)
    with mmod.trace(level) as decisions:
        level(images)
    assert [routing.kept.index_BK.shape for routing in decisions.values()] == [(1, 8), (1, 8)]
    rising = routed(name, capacity=(0.5, 0.53), **fields)
    with pytest.raises(ValueError, match=r"8 of 17 tokens are left for a capacity of 0\.53"):
        rising(images)
