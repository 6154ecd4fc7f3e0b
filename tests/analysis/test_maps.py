"""Pictures show what they should."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

import mmod
from mmod.analysis.maps import VEIL_OPACITY
from mmod.analysis.tracing import draw_sample_maps
from tests.kit.own_vits import DIM, GRID, PATCH, make_own, make_own_images
from tests.kit.vlm_zoo import IMAGE, make_joint, prompt


@pytest.fixture
def traced() -> tuple[torch.Tensor, mmod.Trace]:
    model = mmod.route_(timm.create_model("test_vit", img_size=64).eval(), mmod.RoutingConfig(router="norm"))
    images = torch.rand(2, 3, 64, 64)
    with mmod.trace(model) as decisions, torch.no_grad():
        model(images)
    return images, decisions


def test_maps_keep_kept_patches_and_veil_the_rest(traced: tuple[torch.Tensor, mmod.Trace]) -> None:
    images, decisions = traced
    figure = decisions.plot(images, ["cat", "dog"])
    axes = np.array(figure.axes).reshape(2, 4)
    kept = decisions.maps(1, (4, 4))
    for row in range(2):
        original = axes[row, 0].images[0].get_array()
        assert np.allclose(original, images[row].permute(1, 2, 0))
        for column in range(3):
            shown = axes[row, column + 1].images[0].get_array()
            same = np.isclose(shown, original).all(axis=-1)
            mask = kept[column, row].repeat_interleave(16, 0).repeat_interleave(16, 1).numpy()
            assert (same == mask).all()
            contrast = np.ptp(shown[~mask]) / np.ptp(original[~mask])
            assert contrast == pytest.approx(1 - VEIL_OPACITY, abs=0.2)
    assert axes[0, 1].get_title().startswith("block 1\n")
    assert axes[1, 0].get_ylabel() == "dog"


@pytest.mark.parametrize("is_named", [False, True])
def test_blocks_of_one_decision_share_a_map_and_a_line(is_named: bool) -> None:
    model = timm.create_model("test_vit", img_size=64).eval()
    if is_named:
        model = make_own("norms behind, named blocks")
    mmod.route_(model, mmod.RoutingConfig(router="attention", blocks="late", capacity=0.5))
    images = torch.rand(2, 3, 64, 64)
    with mmod.trace(model) as decisions, torch.no_grad():
        model(images)
    names = list(decisions)
    assert len(names) > 1
    first, last = (name.split(".")[1] for name in (names[0], names[-1]))
    axes = decisions.plot(images).axes
    assert [axis.get_title().split("\n")[0] for axis in axes[:2]] == ["image", f"blocks {first} to {last}"]
    assert len(axes) == 4
    title, *_, line = str(decisions).splitlines()
    assert title.startswith(f"1 decision of {len(names)} blocks, {0.492 if is_named else 0.471} of the tokens")
    assert line.split()[1:4] == [names[0], "to", last]


def test_parts_with_other_tokens_are_drawn_one_by_one() -> None:
    model = make_joint("llava").eval()
    mmod.route_(model, image="pixelprune", language="pixelprune-language")
    inputs = prompt("llava", (1, 1))
    with mmod.trace(model) as decisions, torch.no_grad():
        model(**inputs)
    with pytest.raises(ValueError, match=r"sequences of other lengths: trace one part alone"):
        decisions.plot(inputs["pixel_values"])
    with mmod.trace(model.model.vision_tower) as decisions, torch.no_grad():
        model(**inputs)
    assert decisions.plot(inputs["pixel_values"]).axes


def test_maps_take_grey_images(traced: tuple[torch.Tensor, mmod.Trace]) -> None:
    assert len(traced[1].plot(traced[0][:, :1]).axes) == 8


def test_normalised_images_are_shown_from_their_lowest_value_to_their_highest(
    traced: tuple[torch.Tensor, mmod.Trace],
) -> None:
    images, decisions = traced
    shown = decisions.plot(images * 4 - 2).axes[0].images[0].get_array()
    expected = (images - images.min()) / (images.max() - images.min())
    assert np.allclose(shown, expected[0].permute(1, 2, 0), atol=1e-6)


def test_maps_refuse_what_they_cannot_show(traced: tuple[torch.Tensor, mmod.Trace]) -> None:
    images, decisions = traced
    with pytest.raises(ValueError, match="decisions for 2 images, got 1"):
        decisions.plot(images[:1])
    with pytest.raises(ValueError, match="3 x 4 does not hold 16"):
        decisions.plot(images, grid=(3, 4))
    with pytest.raises(ValueError, match="2 images need as many labels, got 1"):
        decisions.plot(images, ["one"])


def test_samples_have_a_map_for_each_block() -> None:
    routing = mmod.RoutingConfig(router="norm", capacity=0.5)
    model = mmod.route_(timm.create_model("test_vit", img_size=64).eval(), routing)
    images = torch.randn(2, 3, 64, 64)
    axes = draw_sample_maps(model, images).axes
    blocks = [f"block {name.rpartition('.')[2]}" for name in mmod.routed_blocks(model)]
    assert [axis.get_title().partition("\n")[0] for axis in axes[: 1 + len(blocks)]] == ["image", *blocks]
    assert len(axes) == 2 * (1 + len(blocks))


def test_maps_of_images_among_text() -> None:
    model: Any = mmod.route_(
        make_joint("llava"), language=mmod.preset("mod", language={"tokens": "image"}, capacity=1 / 3)
    )
    batch = prompt("llava", (1, 0, 2))
    with mmod.trace(model) as decisions, torch.no_grad():
        model(**batch)
    image_BN = batch["input_ids"] == IMAGE
    maps = decisions.maps(0, (3, 3), image_BN)
    assert maps.shape[1:] == (3, 3, 3)
    for routing, kept in zip(decisions.values(), maps, strict=True):
        assert torch.equal(kept.flatten(), routing.keep_BN[image_BN])
        # A third of the first sample's 9 image tokens, and of the last one's 18.
        assert [int(kept[:1].sum()), int(kept[1:].sum())] == [3, 6]
    figure = decisions.plot(torch.rand(3, 3, 12, 12), prefix=0, grid=(3, 3), image_BN=image_BN)
    assert figure.axes[1].get_title().endswith("33% kept")
    with pytest.raises(ValueError, match="grids of 2 x 5 do not hold 27 image tokens"):
        decisions.maps(0, (2, 5), image_BN)


@pytest.mark.parametrize("size", [(64, 144), (96, 96), (32, 128)])
def test_samples_are_drawn_on_the_grid_of_their_pass(size: tuple[int, int]) -> None:
    model = timm.create_model("test_vit", img_size=64, dynamic_img_size=True).eval()
    mmod.route_(model, mmod.RoutingConfig(router="norm", blocks=(1,), capacity=0.5))
    images = torch.rand(1, 3, *size)
    with mmod.trace(model) as decisions, torch.no_grad():
        model(images)
    kept = decisions["blocks.1"].keep_BN[0, 1:].unflatten(0, (size[0] // 16, size[1] // 16))
    picture, shown = (axis.images[0].get_array() for axis in draw_sample_maps(model, images).axes)
    same = np.isclose(shown, picture).all(axis=-1)
    assert (same == kept.repeat_interleave(16, 0).repeat_interleave(16, 1).numpy()).all()


class Folded(nn.Module):
    """Patches without a convolution: no feature map shows their grid."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.unfold(images, PATCH, stride=PATCH)[:, :DIM].unflatten(-1, (-1, 1))


@pytest.mark.parametrize("shows", [True, False], ids=["convolution", "folded"])
@pytest.mark.parametrize("name", ["own softmax", "sdpa, registers", "no class token"])
def test_maps_of_an_own_model_know_its_prefix_and_grid(name: str, shows: bool) -> None:
    model, images = make_own(name), make_own_images(2)
    if not shows:
        model.patchify = Folded()
    mmod.route_(model, mmod.RoutingConfig(router="norm"))
    with mmod.trace(model) as decisions, torch.no_grad():
        model(images)
    figure = decisions.plot(images)
    prefix = model.special.shape[1]
    expected = decisions.maps(prefix, (GRID, GRID))[0, 0]
    picture, shown = (axis.images[0].get_array() for axis in figure.axes[:2])
    same = np.isclose(shown, picture).all(axis=-1)
    assert (same == expected.repeat_interleave(PATCH, 0).repeat_interleave(PATCH, 1).numpy()).all()
    assert decisions.prefix == prefix
    if not shows:
        with pytest.raises(ValueError, match=r"grid=\(10, 10\)"):
            decisions.maps()


def test_a_model_of_which_nothing_is_known_is_asked_for_prefix_and_grid_at_once() -> None:
    models = nn.ModuleList([mmod.route_(make_own("own softmax"), mmod.RoutingConfig(router="norm")) for _ in range(2)])
    images = make_own_images(1)
    with mmod.trace(models) as decisions, torch.no_grad():
        models[1](images)
    with pytest.raises(ValueError, match=r"prefix=1, grid=\(10, 10\)"):
        decisions.plot(images)
