"""Rows and columns of patches come from the host, in every forward pass, and are never guessed from a number."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import open_clip
import pytest
import timm
import torch
from torch import Tensor, nn

import mmod
from mmod.adapters import find_library, watch_grid
from mmod.routing import Routing
from tests.kit.clip_zoo import make_clip
from tests.kit.vision_zoo import make_vision
from tests.kit.zoo import make_model

CELLS = mmod.RoutingConfig(router="cells", blocks=(1, 2), capacity=0.5, skipped="merge")
# Pairs of equally many patches, one of which a square would hold.
SIZES = ((128, 128), (64, 256), (256, 64), (48, 80))


def dynamic(**options: Any) -> nn.Module:
    return make_model("test_vit", dynamic_img_size=True, **options)


def check_cells(routing: Routing, grid: tuple[int, int], prefix: int) -> None:
    """Assert that every token joined the first token of its cell of 2 x 2 in a grid, which is kept."""
    kept, slot_BN = routing.kept.index_BK, routing.joined.slot_BN
    assert slot_BN is not None
    joined_BN = kept.gather(1, slot_BN) - prefix
    for row, column in itertools.product(range(grid[0]), range(grid[1])):
        token = row * grid[1] + column
        first = (row - row % 2) * grid[1] + column - column % 2
        joined = set(joined_BN[:, prefix + token].tolist())
        assert joined <= {token, first}
        assert bool(routing.keep_BN[:, prefix + first].all())


@pytest.mark.parametrize("size", SIZES)
def test_cells_are_those_of_the_images_of_each_call(size: tuple[int, int]) -> None:
    for model in (dynamic(), make_model("test_vit", img_size=size)):
        mmod.route_(model, CELLS)
        with mmod.trace(model) as decisions, torch.no_grad():
            model(torch.randn(2, 3, *size))
        assert decisions.grid == (size[0] // 16, size[1] // 16)
        for routing in decisions.values():
            check_cells(routing, decisions.grid, 1)
        assert decisions.maps().shape == (2, 2, size[0] // 16, size[1] // 16)


def clip_tower() -> nn.Module:
    vision = {"image_size": (64, 256), "patch_size": 16, "width": 48, "layers": 4, "head_width": 12}
    text = {"width": 48, "heads": 4, "layers": 2, "context_length": 12, "vocab_size": 64}
    return open_clip.CLIP(32, vision, text).eval()


def naflex() -> nn.Module:
    return make_model("naflexvit_base_patch16_gap")


@pytest.mark.parametrize(
    ("make", "part", "patch", "call"),
    [
        (clip_tower, "image", 16, lambda model, x: model.encode_image(x)),
        (partial(make_vision, "clip"), "image", 8, lambda model, x: model(x, interpolate_pos_encoding=True)),
        (partial(make_vision, "siglip"), "image", 8, lambda model, x: model(x, interpolate_pos_encoding=True)),
        (naflex, "image", 16, lambda model, x: model(x)),
    ],
)
def test_every_host_shows_its_grid(
    make: Callable[[], nn.Module], part: str, patch: int, call: Callable[[Any, Tensor], object]
) -> None:
    model = make()
    skipped = "pass" if find_library(model) == "transformers" else "merge"
    mmod.route_(model, **{part: CELLS.replace(skipped=skipped)})
    with mmod.trace(model) as decisions, torch.no_grad():
        call(model, torch.randn(2, 3, 4 * patch, 16 * patch))
    assert decisions.grid == (4, 16)
    for routing in decisions.values():
        prefix = routing.score_BN.shape[1] - 64
        # The first tokens of cells of 2 x 2 have the score of tokens that are always kept.
        firsts = (routing.score_BN[:, prefix:] == 2).unflatten(1, (4, 16))
        assert bool(firsts[:, ::2, ::2].all())
        assert int(firsts.sum()) == 2 * 16


@pytest.mark.parametrize("thread", ["the same thread", "a new thread"])
def test_a_recomputed_block_has_the_grid_of_its_own_pass(thread: str) -> None:
    model = mmod.route_(dynamic(), CELLS).double().train()
    images = [torch.randn(1, 3, *size, dtype=torch.float64) for size in SIZES[:3]]
    gradients = []
    for checkpointing in (False, True):
        model.set_grad_checkpointing(checkpointing)
        model.zero_grad()
        # All passes are backpropagated after the last one, in which a stale grid has as many patches.
        loss = sum(model(x).square().sum() for x in images)
        if thread == "a new thread":
            # It meets the blocks for the first time while it recomputes them.
            with ThreadPoolExecutor(1) as others:
                others.submit(loss.backward).result()
        else:
            loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    torch.testing.assert_close(*gradients)


def test_a_checkpointed_model_has_the_grid_of_its_own_pass() -> None:
    model = mmod.route_(dynamic(), CELLS).double().train()
    for size in SIZES[:3]:
        x = torch.randn(1, 3, *size, dtype=torch.float64)
        gradients = []
        for checkpointing in (False, True):
            model.zero_grad()
            y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False) if checkpointing else model(x)
            y.square().sum().backward()
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        torch.testing.assert_close(*gradients)


def test_graphs_have_the_grid_of_their_images() -> None:
    # What is traced grows with the depth. Both sizes have as many patches.
    model = mmod.route_(dynamic(depth=1), CELLS.replace(blocks=(0,)))
    first, second = (torch.randn(2, 3, *size) for size in SIZES[1:3])
    with torch.no_grad():
        expected = [copy.deepcopy(model)(x) for x in (first, second)]
        exported = torch.export.export(model, (second,)).module()
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(first), expected[0])
        torch.testing.assert_close(exported(second), expected[1])


def test_patches_that_are_no_full_grid_are_refused() -> None:
    # 36 of 64 patches are left, a square number.
    model = mmod.route_(dynamic(patch_drop_rate=0.43), CELLS).train()
    with pytest.raises(ValueError, match=r"all 36 patches in rows and columns, .*\(8, 8\): .* patch dropout"):
        model(torch.randn(1, 3, 128, 128))
    with torch.no_grad():
        model.eval()(torch.randn(1, 3, 128, 128))


def test_blocks_that_run_alone_and_batches_of_several_sizes_are_refused() -> None:
    model = mmod.route_(dynamic(), CELLS)
    x = torch.randn(1, 3, 128, 128)
    with torch.no_grad():
        model(x)
        with pytest.raises(ValueError, match="needs all 64 patches in rows and columns, and the grid is None"):
            model.blocks[1](torch.randn(1, 65, model.embed_dim))
    model = mmod.route_(naflex(), CELLS)
    places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"), dim=-1).view(1, 16, 2)
    batch = {
        "patches": torch.randn(1, 16, 768),
        "patch_coord": places,
        "patch_valid": torch.ones(1, 16, dtype=torch.bool),
    }
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"a full grid .* in every image; some of these are padding"),
    ):
        model(batch)


@pytest.mark.parametrize(
    ("make", "parts", "message"),
    [
        (lambda: make_clip("ViT-B-32"), {"text": CELLS.replace(skipped="pass")}, "needs the rows and columns"),
        (dynamic, {"image": CELLS.replace(protect_prefix=False)}, "protect_prefix must be True"),
    ],
)
def test_models_without_a_grid_are_refused_before_anything_changes(
    make: Callable[[], nn.Module], parts: dict[str, mmod.RoutingConfig], message: str
) -> None:
    model = make()
    with pytest.raises(ValueError, match=message):
        mmod.route_(model, **parts)
    assert not mmod.is_routed(model)


def test_a_width_that_is_not_the_models_is_refused() -> None:
    config = CELLS.replace(router={"name": "cells", "width": 8})
    model = mmod.route_(dynamic(), config)
    with torch.no_grad():
        model(torch.randn(1, 3, 128, 128))
        with pytest.raises(ValueError, match=r"at router\.width=8, and the grid is \(4, 16\)"):
            model(torch.randn(1, 3, 64, 256))


def test_watching_leaves_nothing_behind() -> None:
    for model in (dynamic(), timm.create_model("resnet18"), nn.Linear(2, 2)):
        before = [len(module._forward_hooks) for module in model.modules()]
        with watch_grid(model) as grid:
            assert grid.grid is None
        assert [len(module._forward_hooks) for module in model.modules()] == before
