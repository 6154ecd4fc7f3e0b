"""Blocks that are containers run their own children, and no module that a method adds to them."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mmod
from mmod import RoutingConfig
from mmod.blocks import Container
from mmod.lab import Experts, Recursions
from mmod.methods import Exit, Merge, Method
from tests.kit.cover import in_turn
from tests.kit.own_vits import Chunk, HalvesInSequence, IndexedChunk, OwnBlock, OwnViT, make_own_images

BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "halves in sequence": HalvesInSequence,
    "chunks": lambda: Chunk([nn.Identity(), OwnBlock(), OwnBlock()]),
    "chunks by number": lambda: IndexedChunk([nn.Identity(), OwnBlock(), OwnBlock()]),
}
# A change, and the same with nothing to do.
CHANGES: dict[str, tuple[RoutingConfig | Method, RoutingConfig | Method]] = {
    "linear": (
        RoutingConfig(router="linear", blocks=(1, 3), capacity=0.5, gate="identity"),
        RoutingConfig(router="linear", blocks=(1, 3), capacity=1, gate="identity"),
    ),
    "attention": (
        RoutingConfig(router="attention", blocks=(2, 3), capacity=0.5),
        RoutingConfig(router="attention", blocks=(2, 3), capacity=1),
    ),
    "merging": (
        RoutingConfig(router="redundancy", blocks=(2, 3), capacity=0.5, skipped="merge"),
        RoutingConfig(router="redundancy", blocks=(2, 3), capacity=1, skipped="merge"),
    ),
    "recursions": (Recursions(recursions=2, last=0), Recursions(recursions=2, last=0, choice="tokens")),
    "exit": (Exit(1e-3, (0, 2)), Exit(1.0, (0, 2))),
}


def make(name: str, depth: int = 5) -> Any:
    torch.manual_seed(0)
    model = OwnViT(lambda _: BLOCKS[name](), depth=depth)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


@pytest.mark.parametrize(("change", "name"), in_turn(CHANGES, BLOCKS))
@torch.no_grad()
def test_a_container_runs_its_own_children(change: str, name: str) -> None:
    torch.manual_seed(0)
    images = make_own_images(3)
    model = make(name)
    expected, keys = model(images), list(model.state_dict())
    children = [list(stage) for stage in model.stages]
    reducing, neutral = CHANGES[change]
    mmod.apply_(model, neutral).eval()
    if change != "recursions":
        torch.testing.assert_close(model(images), expected)
        assert [key for key in model.state_dict() if key in set(keys)] == keys
        assert [list(stage) for stage in model.stages] == children
        assert [len(stage) for stage in model.stages] == [len(stage) for stage in children]
    mmod.undo_(model)
    assert not any(isinstance(module, Container) for module in model.modules())
    mmod.apply_(model, reducing).eval()
    actual = model(images)
    assert not torch.allclose(actual, expected)
    torch.testing.assert_close(actual, torch.cat([model(image[None]) for image in images]))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(images), actual)
    mmod.undo_(model)
    assert list(model.state_dict()) == keys
    assert torch.equal(model(images), expected)


@torch.no_grad()
def test_parts_of_a_container_are_those_of_the_host() -> None:
    model = mmod.route_(make("halves in sequence"), CHANGES["linear"][0])
    stage, (first, second) = model.stages[1], make("halves in sequence").stages[1]
    assert [type(module) for module in (stage[0], stage[-1])] == [type(first), type(second)]
    assert isinstance(stage[1:], nn.Sequential)
    assert list(stage[1:]) == [stage[1]]
    assert stage.router not in stage


@pytest.mark.parametrize("what", ["module", "flag", "method", "property"])
@pytest.mark.parametrize(
    ("change", "adds"),
    [
        (CHANGES["linear"][0], "router"),
        (Exit(1.0, (1,)), "exit"),
        (Experts(experts=2), "router"),
        (Experts(experts=2), "others"),
        (Experts(experts=2), "predictors"),
    ],
)
def test_what_the_host_has_of_a_name_is_not_replaced(change: RoutingConfig | Method, adds: str, what: str) -> None:
    model = OwnViT(lambda _: OwnBlock()).eval()
    for block in model.stages:
        holder: Any = block.channels if isinstance(change, Experts) else block
        if what == "module":
            holder.add_module(adds, nn.Identity())
        elif what == "flag":
            setattr(holder, adds, False)
        else:
            kinds: dict[str, Any] = {"method": lambda self: 2, "property": property(lambda self: 2)}
            holder.__class__ = type(type(holder).__name__, (type(holder),), {adds: kinds[what]})
    keys, held = [name for name, _ in model.named_modules()], [dict(vars(block)) for block in model.stages]
    with pytest.raises(ValueError, match=f"has an attribute '{adds}' of its own"):
        mmod.apply_(model, change)
    assert [name for name, _ in model.named_modules()] == keys
    assert [dict(vars(block)) for block in model.stages] == held


@pytest.mark.parametrize("change", [*[change for change, _ in CHANGES.values()][:3], CHANGES["exit"][0], Merge(3)])
def test_a_list_of_batches_is_refused_by_name(change: RoutingConfig | Method) -> None:
    class Listed(OwnBlock):
        def forward(self, x: Any) -> Any:
            return [super(Listed, self).forward(one) for one in x] if isinstance(x, list) else super().forward(x)

    model: Any = mmod.apply_(OwnViT(lambda _: Listed()).eval(), change)
    x = [torch.randn(2, 65, 32), torch.randn(1, 17, 32)]
    with pytest.raises(ValueError, match=r"Listed takes tokens \(images, tokens, channels\), got a list of 2: call"):
        functools.reduce(lambda y, stage: stage(y), model.stages, x)
