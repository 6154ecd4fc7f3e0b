"""Methods on many models: nothing to do is the dense model, images do not meet, undoing restores."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import mmod
from mmod import flops
from mmod.methods import Exit, Merge, Method, Prune, Resize, methods_of, read_method, undo_
from tests.kit.method_zoo import REDUCING
from tests.kit.own_vits import make_own
from tests.kit.zoo import make_images, make_model

IDS = ["prune-fused", "prune-mean", "merge", "exit"]
SMALL = "vit_tiny_patch16_224"
METHODS = [method for method, _ in REDUCING]


def read(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        return model(images)


def test_early_exit_compiles_in_parts() -> None:
    model, images = make_model(SMALL, depth=2).double(), make_images(SMALL, 3).double()
    with mmod.trace(Exit(0.4, (0,)).apply_(model)) as decisions:
        answers = read(model, images)
    assert 0 < decisions.kept_shares()["blocks.1"] < 1
    torch._dynamo.reset()
    torch.testing.assert_close(read(torch.compile(model, backend="eager"), images), answers, rtol=0, atol=1e-12)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"Compile the model without fullgraph=True"):
        torch.compile(model, backend="eager", fullgraph=True)(images)


@pytest.mark.parametrize("place", ["blocks.1", "blocks.2.mlp"])
@torch.no_grad()
def test_a_call_inside_a_call_keeps_the_images_of_both_apart(place: str) -> None:
    model = Exit(0.35, (0, 1, 2)).apply_(make_model(SMALL).double())
    first, second = (make_images(SMALL, number, seed=number).double() for number in (4, 3))
    with mmod.trace(model) as decisions:
        expected = [(model(images), decisions.kept_shares()) for images in (first, second)]
    inside: list[Any] = []

    def call(*_: Any) -> None:
        if not inside:
            inside.append(None)
            inside.append(model(second))

    model.get_submodule(place).register_forward_hook(call)
    with mmod.trace(model) as decisions:
        assert torch.equal(model(first), expected[0][0])
        assert decisions.kept_shares()["blocks.3"] == expected[0][1]["blocks.3"]
    assert torch.equal(inside[1], expected[1][0])


@torch.no_grad()
def test_a_second_batch_in_the_blocks_of_a_running_call_is_refused() -> None:
    model = Exit(0.35, (0, 1, 2)).apply_(make_model(SMALL).double())
    images = make_images(SMALL, 3).double()
    expected = model(images)
    for place in (1, 2):
        other = model.norm_pre(model._pos_embed(model.patch_embed(images)))
        handle = model.blocks[place].mlp.register_forward_hook(lambda *_, other=other: model.blocks[0](other))
        with pytest.raises(RuntimeError, match="call the model itself on a second batch"):
            model(images)
        handle.remove()
        assert torch.equal(model(images), expected)
    handle = model.blocks[0].register_forward_hook(lambda module, args, x: x.repeat(2, 1, 1))
    with pytest.raises(RuntimeError, match="other images than the running call"):
        model(images)
    handle.remove()
    assert torch.equal(model(images), expected)
    model.blocks[1], model.blocks[2] = model.blocks[2], model.blocks[1]
    with pytest.raises(RuntimeError, match=r"twice or after a later one: .*, and run each block once, in the order"):
        model(images)


@torch.no_grad()
def test_no_image_exits_in_blocks_that_run_in_stages() -> None:
    model = make_model(SMALL).double()
    batches = [make_images(SMALL, number, seed=number).double() for number in (2, 3)]
    expected = [model.forward_features(images) for images in batches]
    Exit(1e-9, (0, 1)).apply_(model)
    halfway = [model.blocks[:2](model._pos_embed(model.patch_embed(images))) for images in batches]
    for x, features in zip(halfway, expected):
        assert torch.equal(model.norm(model.blocks[2:](x)), features)


def test_training_deals_a_batch_out_among_exits() -> None:
    model, images = make_model("test_vit").double().train(), make_images("test_vit", 7).double()
    blocks = (1, 3)
    Exit(0.5, blocks).apply_(model)
    count = dict.fromkeys(blocks, 0)
    for index in blocks:
        head = model.blocks[index].exit
        head.register_forward_hook(lambda _, args, out, index=index: count.update({index: len(out)}))
    assert model(images).shape == (7, 7)
    assert count == {1: 3, 3: 2}


@pytest.mark.parametrize("method", METHODS, ids=IDS)
def test_checkpointing_is_refused(method: Method) -> None:
    model = method.apply_(make_model("test_vit").train())
    model.set_grad_checkpointing(True)
    with pytest.raises(RuntimeError, match="gradient checkpointing"):
        model(make_images("test_vit", 3)).sum().backward()


# Class token, mean pooling, registers, rotary positions.
RESIZABLE = ["test_vit", "vit_medium_patch16_gap_240", "vit_small_patch14_reg4_dinov2", "eva02_tiny_patch14_224"]


@pytest.mark.parametrize("name", RESIZABLE)
def test_resized_images_are_those_of_a_smaller_model(name: str) -> None:
    model = make_model(name, dynamic_img_size=True).double()
    images, side = make_images(name, 2).double(), model.patch_embed.patch_size[0]
    dense, keys, classes = read(model, images), list(model.state_dict()), [type(module) for module in model.modules()]
    size = 2 * side
    small = nn.functional.interpolate(images, size=(size, size), mode="bicubic", antialias=True)
    expected = read(model, small)
    with torch.no_grad():
        maps, features = model.forward_intermediates(small, intermediates_only=True), model.forward_features(small)
    mmod.apply_(model, Resize(size))
    assert torch.equal(read(model, images), expected)
    assert torch.equal(read(model, small), expected)
    with torch.no_grad():
        assert torch.equal(model.forward_features(images), features)
        assert all(map(torch.equal, model.forward_intermediates(images, intermediates_only=True), maps))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(read(copied, images), expected)
    assert flops(model, images.shape[-1]).routed < flops(make_model(name), images.shape[-1]).routed
    assert methods_of(model)[0] == read_method({"kind": "resize", "size": size})
    undo_(model)
    assert [type(module) for module in model.modules()] == classes
    assert list(model.state_dict()) == keys
    assert torch.equal(read(model, images), dense)


def test_resizing_compiles_as_one_graph() -> None:
    model, images = make_model(SMALL, depth=1, dynamic_img_size=True).double(), make_images(SMALL, 2).double()
    answers = read(mmod.apply_(model, Resize(32)), images)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(read(compiled, images), answers, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [(48, 112), [64, 144], (96, 224)])
def test_height_and_width_keep_the_aspect_ratio(size: Any) -> None:
    model = make_model("test_vit", dynamic_img_size=True)
    images = torch.randn(2, 3, 128, 288)
    height, width = size
    with torch.no_grad():
        small = torch.nn.functional.interpolate(images, size=(height, width), mode="bicubic", antialias=True)
        expected = model(small)
        mmod.apply_(model, {"kind": "resize", "size": size})
        torch.testing.assert_close(model(images), expected)
        # timm reshapes features to the grid of the resized image.
        (features,) = model.forward_intermediates(images, indices=[1], intermediates_only=True)
    assert features.shape[2:] == (height // 16, width // 16)
    assert methods_of(model) == (read_method(methods_of(model)[0].to_dict()),)


def test_an_aspect_ratio_that_would_change_is_refused() -> None:
    images = torch.randn(1, 3, 128, 288)
    for size in (96, (96, 96), (112, 288)):
        model = mmod.apply_(make_model("test_vit", dynamic_img_size=True), Resize(size))
        with pytest.raises(ValueError, match="changes the aspect ratio of images of 128 x 288 pixels") as refusal:
            model(images)
        advised = re.search(r"Resize\(size=\((\d+), (\d+)\)\)", str(refusal.value))
        assert advised is not None
        mmod.undo_(model)
        mmod.apply_(model, Resize((int(advised[1]), int(advised[2]))))(images)
    with pytest.raises(ValueError, match=r"size=\(48, 50\) is no multiple of 16"):
        mmod.apply_(make_model("test_vit", dynamic_img_size=True), Resize((48, 50)))


@pytest.mark.parametrize("r", [500, 25, 8, 4])
@pytest.mark.parametrize(
    ("make", "images"),
    [
        (lambda: timm.create_model("vit_tiny_patch16_224", embed_dim=12), torch.zeros(1, 3, 224, 224)),
        # Of any size, and made for 100 patches; of a class of one's own, of which a trial shows 64.
        (lambda: timm.create_model("test_vit", dynamic_img_size=True), torch.zeros(1, 3, 160, 160)),
        (lambda: make_own("einsum"), torch.zeros(1, 3, 64, 64)),
    ],
    ids=["one size", "any size", "own"],
)
def test_merging_that_leaves_hardly_a_patch_is_told(
    make: Any, images: Tensor, r: int, recwarn: pytest.WarningsRecorder
) -> None:
    model = mmod.apply_(make().eval(), Merge(r=r))
    told = [str(warning.message) for warning in recwarn if str(warning.message).startswith(f"r={r} leaves ")]
    with mmod.trace(model) as decisions:
        model(images)
    (*_, last) = decisions.values()
    # All have one class token.
    left, patches = last.kept.index_BK.shape[1] - 1, last.keep_BN.shape[1] - 1
    assert bool(told) == (left * 20 < patches)
    assert all(f"r={r} leaves {left} of {patches} patches in the end. Set a smaller r" in line for line in told)


@torch.no_grad()
def test_an_exit_answers_with_weights_of_its_own() -> None:
    dense, images, blocks = make_model("test_vit").double(), make_images("test_vit", 6).double(), (0, 2, 4)
    model = Exit(0.5, blocks).apply_(copy.deepcopy(dense))
    for index in blocks:
        model.blocks[index].exit.head.weight.mul_(3)
    ends = []
    for image, answer in zip(images, model(images)):
        x = dense.norm_pre(dense._pos_embed(dense.patch_embed(image[None])))
        for index, block in enumerate(dense.blocks):
            x = block(x)
            logits = dense.forward_head(dense.norm(x))
            if index in blocks:
                head = model.blocks[index].exit
                logits = head.head(head.fc_norm(head.norm(x)[:, 0]))
                if logits.softmax(dim=-1).max() >= 0.5:
                    break
        ends.append(index)
        torch.testing.assert_close(answer, logits[0], rtol=0, atol=1e-12)
    assert len(set(ends)) > 1


def test_merging_does_not_follow_pruning() -> None:
    model = Prune(0.5, (1,)).apply_(make_model("test_vit"))
    with pytest.raises(ValueError, match=r"call mmod\.undo_ first"):
        Merge(2).apply_(model)
