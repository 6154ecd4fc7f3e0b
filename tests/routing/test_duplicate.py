"""Patches whose pixels another patch shows: which are kept, which they join, and what a tower makes of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mmod
from mmod.adapters import find_stack
from mmod.blocks.grid import cut_patches
from mmod.ops import find_duplicates
from mmod.routing import Routing
from tests.kit.clip_zoo import make_clip
from tests.kit.cover import in_turn
from tests.kit.oracle import duplicates_by_loop
from tests.kit.vision_zoo import make_vision
from tests.kit.zoo import make_model

CONFIG = mmod.preset("pixelprune")
TIMM = (
    *("test_vit", "vit_base_patch16_siglip_224", "vit_small_patch14_dinov2", "vit_small_patch14_reg4_dinov2"),
    *("vit_small_patch16_dinov3", "eva02_tiny_patch14_224", "beit_base_patch16_224"),
)
TRANSFORMERS = ("vit", "dinov2", "dinov2 with registers", "dinov3", "siglip", "clip", "yolos")


def page(side: int, seed: int = 0, patch: int = 8) -> Tensor:
    """Return a picture (1, 3, side, side) of mostly equal patches: blocks of few colours, and a noisy corner."""
    generator = torch.Generator().manual_seed(seed)
    colours = torch.randint(0, 3, (1, 1, 3, 3), generator=generator).float() - 1
    picture = nn.functional.interpolate(colours, size=side, mode="nearest").repeat(1, 3, 1, 1)
    picture[..., : 2 * patch, : 3 * patch] = torch.randn(1, 3, 2 * patch, 3 * patch, generator=generator)
    return picture


def make_host(name: str) -> tuple[Any, str, int]:
    """Return a model, its part that reads images, and the side of its images."""
    if name == "open_clip":
        model: Any = make_clip("ViT-B-32").visual
        return model, "image", int(model.image_size[0])
    if name in TIMM:
        model = make_model(name)
        embed: Any = model.patch_embed
        return model, "image", int(embed.img_size[0])
    model = make_vision(name)
    return model, "image", int(model.config.image_size[0] if name == "yolos" else model.config.image_size)


def output(model: Any, images: Tensor) -> Tensor:
    y = model(images)
    if isinstance(y, Tensor):
        return y
    return y[0]


@torch.no_grad()
def route(model: nn.Module, part: str, **changes: Any) -> Any:
    parts: dict[str, Any] = {part: CONFIG.replace(**changes)}
    return mmod.route_(model, **parts)


@torch.no_grad()
def decide(model: nn.Module, images: Tensor) -> Routing:
    """Return the decision of the first block, which all blocks share."""
    with mmod.trace(model) as decisions:
        model(images)
    first, *others = decisions.values()
    for other in others:
        torch.testing.assert_close(other.kept.index_BK, first.kept.index_BK)
    return first


def test_the_fast_rule_is_the_slow_one() -> None:
    draw = random.Random(0)
    for _ in range(120):
        generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
        rows, columns, channels = draw.randint(1, 9), draw.randint(1, 9), draw.choice([1, 3])
        cell = draw.choice([None, 2, 3, 4, 8])
        tolerance = draw.choice([-1.0, 0.0, 1.5, 3.0])
        # Exact in fp32, so that ties are ties.
        levels = tuple(draw.choice([32.0, 64.0, 80.0]) for _ in range(channels))
        frames = draw.choice([1, 1, 2, 4])
        pixels = torch.randint(0, 4, (2 * frames, rows, columns, channels, 2), generator=generator).double() / 64
        # Rows that repeat: runs begin and end.
        repeats = torch.rand(2 * frames, rows - 1, columns, 1, 1) < 0.4
        pixels[:, 1:] = torch.where(repeats, pixels[:, :-1], pixels[:, 1:])
        # And patches that stand still.
        stay = torch.rand(2 * frames - 1, rows, columns, 1, 1) < 0.4
        pixels[1:] = torch.where(stay, pixels[:-1], pixels[1:])
        if draw.random() < 0.2:
            pixels[0, -1, -1] = draw.choice([torch.nan, torch.inf, 1e30])
        actual = find_duplicates(pixels.float(), tolerance, cell, torch.tensor(levels), frames)
        for number, video in enumerate(pixels.split(frames)):
            own = slice(number * frames, (number + 1) * frames)
            expected, stands = duplicates_by_loop(video, tolerance, cell, levels)
            assert actual.stands_BN[own].flatten().tolist() == stands
            difference = actual.difference_BN[own].flatten()
            torch.testing.assert_close(difference, torch.tensor(expected), atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_equal_pixels_are_equal_in_every_dtype(dtype: torch.dtype) -> None:
    pixels = cut_patches(nn.Conv2d(3, 8, 8, 8), page(64))
    expected = find_duplicates(pixels, 0.0, 4, torch.ones(3)).stands_BN
    assert torch.equal(find_duplicates(pixels.to(dtype), 0.0, 4, torch.ones(3)).stands_BN, expected)
    assert 0 < int((expected == torch.arange(64)).sum()) < 40


WAYS = (("merge", "threshold"), ("follow", "threshold"), ("pass", "threshold"), ("merge", "topk"))


@pytest.mark.parametrize(("name", "way"), in_turn([*TIMM, *TRANSFORMERS, "open_clip"], WAYS))
@torch.no_grad()
def test_a_tower_that_keeps_all_is_dense_and_a_batch_is_its_images(name: str, way: tuple[str, str]) -> None:
    skipped, select = way
    model, part, side = make_host(name)
    images = torch.cat([page(side, seed) for seed in range(3)])
    images[2] = 0.5
    dense = output(model, images)
    route(model, part, skipped=skipped, select=select, capacity=1.0, router={"tolerance": -1.0})
    torch.testing.assert_close(output(model, images), dense, atol=2e-5, rtol=2e-5)
    mmod.undo_(model)
    route(model, part, skipped=skipped, select=select, capacity=0.6)
    actual = output(model, images)
    assert actual.shape == dense.shape
    assert not torch.allclose(actual, dense, atol=1e-6)
    alone = torch.cat([output(model, image) for image in images.split(1)])
    torch.testing.assert_close(actual, alone, atol=2e-5, rtol=2e-5)


def test_a_skipped_patch_joins_the_kept_one_of_its_run_or_of_its_cell() -> None:
    model = make_model("test_vit")
    images = torch.cat([page(96, seed, 16) for seed in range(4)])
    pixels = cut_patches(nn.Conv2d(3, 8, 16, 16), images)
    duplicates = find_duplicates(pixels, 0.0, 4, torch.full((3,), 127.5))
    place_N = torch.arange(36)
    first_N = place_N // 6 // 4 * 4 * 6 + place_N % 6 // 4 * 4
    for capacity in (None, 0.2, 0.5, 0.8):
        select = "threshold" if capacity is None else "topk"
        route(model, "image", select=select, capacity=0.5 if capacity is None else capacity)
        routing = decide(model, images)
        mmod.undo_(model)
        assert routing.joined.slot_BN is not None
        joined_BN = routing.kept.index_BK.gather(1, routing.joined.slot_BN)[:, 1:] - 1
        keep_BN = routing.keep_BN[:, 1:]
        if capacity is None:
            assert torch.equal(keep_BN, duplicates.stands_BN == place_N)
        else:
            # The K patches that differ most, ties to the first.
            assert keep_BN.sum(dim=1).tolist() == [int(37 * capacity) - 1] * 4
            order_BN = duplicates.difference_BN.argsort(dim=1, descending=True, stable=True)
            best_BK = order_BN[:, : int(37 * capacity) - 1]
            assert bool(keep_BN.gather(1, best_BK).all())
        stands_is_kept_BN = keep_BN.gather(1, duplicates.stands_BN)
        expected_BN = torch.where(stands_is_kept_BN, duplicates.stands_BN, first_N)
        assert torch.equal(joined_BN, torch.where(keep_BN, place_N, expected_BN))


def test_the_tolerance_is_in_grey_levels_of_the_picture() -> None:
    """A patch that differs by 5 of 255 is a duplicate within 6, whatever pixels were divided by."""
    std = torch.tensor([0.229, 0.5, 0.1]).view(3, 1, 1)
    for levels, kept in ((5, 2), (6, 2), (7, 3)):
        picture = torch.full((1, 3, 64, 64), 0.4)
        picture[:, :, 8:16, 8:16] += levels / 255
        model = route(make_vision("vit"), "image", router={"tolerance": 6, "std": tuple(std.flatten().tolist())})
        assert int(decide(model, (picture - 0.5) / std).keep_BN[0, 1:17].sum()) == kept
    # timm's models say it themselves.
    dense: Any = make_model("test_vit")
    dense.pretrained_cfg = {**dense.pretrained_cfg, "std": (0.229, 0.5, 0.1)}
    assert route(dense, "image", router={"tolerance": 6.0}).patch_embed.proj._forward_hooks


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e30])
@torch.no_grad()
def test_a_pixel_that_is_no_number_spoils_no_other_picture(value: float) -> None:
    model = route(make_model("test_vit"), "image")
    images = page(96).repeat(2, 1, 1, 1)
    expected = output(model, images[1:])
    images[0, 1, 90, 90] = value
    torch.testing.assert_close(output(model, images)[1:], expected)
    # No patch joins the last one, and it joins none.
    assert bool(decide(model, images).keep_BN[0, -1])


def test_gradients_of_a_tower_that_keeps_all_are_dense_and_those_of_others_are_finite() -> None:
    model = make_model("vit_small_patch14_dinov2").double()
    images = torch.cat([page(56, seed, 14) for seed in range(2)]).double()
    gradients = []
    for changes in (None, {"tolerance": -1.0}, {}):
        if changes is not None:
            route(model, "image", router=changes)
        model.zero_grad()
        model(images).square().sum().backward()
        gradients.append([weight.grad.clone() for weight in model.parameters() if weight.grad is not None])
        if changes is not None:
            mmod.undo_(model)
    torch.testing.assert_close(gradients[0], gradients[1])
    assert len(gradients[2]) == len(gradients[0])
    assert all(bool(gradient.isfinite().all()) for gradient in gradients[2])


@pytest.mark.parametrize("is_exported", [False, True])
@torch.no_grad()
def test_a_graph_reads_the_pixels_of_its_images(is_exported: bool) -> None:
    model, part, side = make_host("test_vit")
    # What is traced grows with the depth.
    blocks = model.get_submodule(find_stack(model).names[0].rpartition(".")[0])
    del blocks[1:]
    route(model, part, select="topk", capacity=0.5)
    first, second = page(side, 1).repeat(2, 1, 1, 1), torch.cat([page(side, 2), page(side, 3)])
    expected = [output(model, images) for images in (first, second)]
    torch._dynamo.reset()
    graph: Any = torch.compile(model, backend="eager", fullgraph=True)
    if is_exported:
        graph = torch.export.export(model, (first,)).module()
    for images, y in zip((first, second), expected):
        torch.testing.assert_close(output(graph, images), y, atol=2e-5, rtol=2e-5)


def test_one_graph_serves_grids_of_any_size() -> None:
    torch._dynamo.reset()
    graph = torch.compile(find_duplicates, backend="eager", fullgraph=True, dynamic=True)
    for rows, columns, stance in ((4, 5, "default"), (7, 6, "fail_on_recompile")):
        pixels = torch.randint(0, 2, (2, rows, columns, 1, 2)).float()
        expected = find_duplicates(pixels, 0.0, 2, torch.ones(1))
        with torch.compiler.set_stance(stance):
            actual = graph(pixels, 0.0, 2, torch.ones(1))
        assert all(map(torch.equal, actual, expected))


def with_stem() -> nn.Module:
    """A model whose patches share pixels."""
    model: Any = make_model("test_vit")
    model.patch_embed.proj = nn.Conv2d(3, model.embed_dim, 18, 16, padding=1)
    return model


@pytest.mark.parametrize(
    ("make", "part", "options", "message"),
    [
        (with_stem, "image", {}, r"made by a Conv2d\(3, 64, kernel_size=\(18, 18\), stride=\(16, 16\)"),
        (lambda: make_model("vit_tiny_r_s16_p8_224"), "image", {}, r"made by a Conv2d\(64, "),
        (lambda: make_model("naflexvit_base_patch16_gap"), "image", {}, "made by a NaFlexEmbeds"),
        (lambda: make_vision("siglip2"), "image", {}, "needs the rows and columns of an image's patches"),
        (lambda: make_vision("vit"), "image", {"tolerance": 6.0}, r"router\.tolerance=6\.0 is in grey levels.*std"),
        (lambda: make_model("test_vit"), "image", {"std": (0.5, 0.5)}, "one for each of 3 channels, got"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_changes(
    make: Any, part: str, options: dict[str, Any], message: str
) -> None:
    model = make()
    with pytest.raises(ValueError, match=message):
        route(model, part, router=options)
    assert not mmod.is_routed(model)


@torch.no_grad()
def test_a_pass_whose_pixels_are_unknown_is_refused_and_the_next_one_is_not() -> None:
    model: Any = route(make_model("test_vit"), "image")
    images = page(96)
    expected = model(images)
    with pytest.raises(ValueError, match="compares the pixels that the patch embedding gets, and knows none"):
        model.blocks[0](torch.randn(1, 37, model.embed_dim))
    tokens = [model._pos_embed(model.patch_embed(x)) for x in (images, images.flip(-1))]
    with pytest.raises(ValueError, match="one batch after the other"):
        model.blocks[0](tokens[0])
    torch.testing.assert_close(model(images), expected)
    # Patches that were looked at alone are none of the next call's.
    model.patch_embed(images.flip(-1))
    torch.testing.assert_close(model(images), expected)
    # Half as many pictures as there are patches of.
    tokens = [model._pos_embed(model.patch_embed(images.repeat(2, 1, 1, 1)))[:1]]
    with pytest.raises(
        ValueError,
        match=r"has seen the pixels of \(2, 36\).*got 1 images of 37 tokens, 1 of which are no patches: patch dropout",
    ):
        model.blocks[0](tokens[0])
