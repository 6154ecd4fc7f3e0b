"""Rivals on many models: nothing to do is the dense model, images do not meet, undoing restores."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from mmod import RoutingConfig, flops, route_
from mmod.rivals import Exit, Merge, Prune, Rival, read_rival, rival_of, undo_
from tests.rivals.rival_zoo import MODELS, REDUCING
from tests.zoo import make_images, make_model

IDS = ["prune-fused", "prune-mean", "merge", "exit"]
SMALL = "vit_tiny_patch16_224"
RIVALS = [rival for rival, _ in REDUCING]


def read(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        return model(images)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("rival", "idle"), REDUCING, ids=IDS)
def test_invariants(name: str, rival: Rival, idle: Rival) -> None:
    model, images = make_model(name).double(), make_images(name, 3).double()
    dense, keys = read(model, images), list(model.state_dict())
    idle.apply_(model)
    assert torch.equal(read(model, images), dense)
    undo_(model)
    rival.apply_(model)
    answers = read(model, images)
    assert answers.shape == dense.shape
    assert not torch.equal(answers, dense)
    alone = torch.cat([read(model, image[None]) for image in images])
    torch.testing.assert_close(alone, answers, rtol=0, atol=1e-12)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(read(copied, images), answers)
    assert rival_of(model) == rival == read_rival(rival.to_dict())
    undo_(model)
    assert list(model.state_dict()) == keys
    assert rival_of(model) is None
    assert torch.equal(read(model, images), dense)


@pytest.mark.parametrize("name", ["test_vit", "vit_medium_patch16_gap_240", "eva02_tiny_patch14_224"])
@pytest.mark.parametrize("rival", RIVALS, ids=IDS)
def test_every_weight_that_learns_in_the_dense_model_learns(name: str, rival: Rival) -> None:
    model, images = make_model(name).double().train(), make_images(name, 3).double()
    model(images).square().sum().backward()
    learning = {name for name, weight in model.named_parameters() if weight.grad is not None and weight.grad.any()}
    model.zero_grad(set_to_none=True)
    rival.apply_(model)(images).square().sum().backward()
    parameters = dict(model.named_parameters())
    assert all(parameters[name].grad is not None and parameters[name].grad.any() for name in learning)
    heads = [weight.grad for name, weight in parameters.items() if ".exit." in name]
    assert all(grad is not None and grad.any() for grad in heads)


@pytest.mark.parametrize("name", ["test_vit", "vit_medium_patch16_gap_240", "eva02_tiny_patch14_224"])
@pytest.mark.parametrize("rival", RIVALS, ids=IDS)
def test_a_model_that_answers_every_patch_gives_its_whole_grid(name: str, rival: Rival) -> None:
    model, images = make_model(name, global_pool="").double(), make_images(name, 2).double()
    dense = read(model, images)
    assert dense.ndim == 3
    assert read(rival.apply_(model), images).shape == dense.shape


@pytest.mark.parametrize("rival", RIVALS[:3], ids=IDS[:3])
def test_compiled_rivals_are_the_same(rival: Rival) -> None:
    model, images = make_model(SMALL).double(), make_images(SMALL, 2).double()
    answers = read(rival.apply_(model), images)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(read(compiled, images), answers, rtol=0, atol=1e-12)


def test_early_exit_compiles_in_parts() -> None:
    model, images = make_model(SMALL).double(), make_images(SMALL, 3).double()
    answers = read(Exit(0.3, (0, 2)).apply_(model), images)
    torch._dynamo.reset()
    torch.testing.assert_close(read(torch.compile(model, backend="aot_eager"), images), answers, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rival", RIVALS[:3], ids=IDS[:3])
def test_flops_are_those_of_the_tokens_left(rival: Rival) -> None:
    model = make_model(SMALL)
    dense = flops(model, 64).routed
    assert flops(rival.apply_(model), 64).routed < dense


@pytest.mark.parametrize("rival", RIVALS, ids=IDS)
def test_checkpointing_is_refused(rival: Rival) -> None:
    model = rival.apply_(make_model("test_vit").train())
    model.set_grad_checkpointing(True)
    with pytest.raises(RuntimeError, match="gradient checkpointing"):
        model(make_images("test_vit", 3)).sum().backward()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "drop"}, "'prune', 'merge', 'exit'"),
        ({"kind": "prune", "keeps": 0.5}, "keep, blocks, fuse, by"),
        ({"kind": "prune", "keep": 0}, r"keep must be a number in \(0, 1\]"),
        ({"kind": "prune", "by": "patch"}, "'auto', 'class_token', 'mean'"),
        ({"kind": "merge", "r": -1}, "r must be"),
        ({"kind": "exit", "confidence": 0}, "confidence must be"),
    ],
)
def test_bad_values_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_rival(values)


@pytest.mark.parametrize(
    ("name", "rival", "message"),
    [
        ("test_vit", Prune(0.5, (2, 1)), "blocks must ascend"),
        ("test_vit", Prune(0.5, (9,)), "within 0 to 5"),
        ("test_vit", Merge((1, 2)), "2 numbers, the model 6 blocks"),
        ("test_vit", Exit(0.5, (5,)), "saves nothing"),
        ("vit_medium_patch16_gap_240", Prune(0.5, (1,), by="class_token"), "has none"),
        ("vit_small_patch16_18x2_224", Merge(2), "no place between attention and MLP"),
        ("beit_base_patch16_224", Merge(2), "no place between|cannot be read"),
        ("vit_dlittle_patch16_reg1_gap_256", Merge(2), "no place between|cannot be read"),
    ],
)
def test_models_that_cannot_are_left_as_they_are(name: str, rival: Rival, message: str) -> None:
    model = make_model(name)
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=message):
        rival.apply_(model)
    assert [type(module) for module in model.modules()] == classes


def test_one_change_at_a_time() -> None:
    model = Prune(0.5, (1,)).apply_(make_model("test_vit"))
    with pytest.raises(ValueError, match="undo that first"):
        Merge(2).apply_(model)
    with pytest.raises(ValueError, match="already"):
        route_(model, RoutingConfig())
    undo_(model)
    with pytest.raises(ValueError, match="no rival changed"):
        undo_(model)
