"""Trials of blocks in training, where stochastic depth may run a branch on a part of the batch."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mmod
from mmod import RoutingConfig
from mmod.adapters import find_stack, tokens
from mmod.analysis.counting import meta_copy
from mmod.lab import Experts, Recursions
from mmod.methods import Exit, Merge, Method, Prune
from mmod.model import copy_of
from mmod.random_state import drawn_from
from tests.kit.cover import in_turn
from tests.kit.folders import make_image_model
from tests.kit.own_vits import DividingBlock, DrawingBlock, OwnBlock, OwnViT, SkippingBlock, make_own_images
from tests.kit.vision_zoo import make_vision

DIVIDING = (DividingBlock, DrawingBlock, SkippingBlock)
# Whole blocks run on the kept tokens, so a block may drop images of its own.
WHOLE: dict[str, RoutingConfig | Method] = {
    "linear": RoutingConfig(router="linear", capacity=0.5),
    "change": RoutingConfig(router="change", blocks=(2, 3), capacity=0.5),
    "follow": RoutingConfig(router="redundancy", blocks=(2, 3), capacity=0.5, skipped="follow"),
    "whole images": RoutingConfig(
        router=mmod.score("linear", per="sequence"), select=mmod.Threshold(0.5), gate="step", blocks=(1, 3)
    ),
    "experts": Experts(experts=2),
    "recursions": Recursions(recursions=2, last=0),
    "exit": Exit(0.5, (1,)),
}
# These read or narrow the branches, or the keys.
INSIDE: dict[str, RoutingConfig | Method] = {
    "attention": RoutingConfig(router="attention", blocks=(2, 3), capacity=0.5),
    "distilled": mmod.preset("distilled", blocks=(2, 3), capacity=0.5),
    "merging": RoutingConfig(router="redundancy", blocks=(2, 3), capacity=0.5, skipped="merge"),
    "gradual": mmod.preset("gradual", depth=5),
    "threshold": RoutingConfig(router="linear", select=mmod.Threshold(0.5)),
    "slots": RoutingConfig(router="linear", select=mmod.Threshold(0.5, max_tokens=20)),
    "attention alone": RoutingConfig(router="linear", operator="attention", capacity=0.5),
    "MLP alone": RoutingConfig(router="linear", operator="mlp", capacity=0.5),
    "merge": Merge(3),
    "prune": Prune(0.5, (1, 3)),
    "recursions of tokens": Recursions(recursions=2, last=0, choice="tokens"),
}


def make(block: type[DividingBlock] = DividingBlock, rate: float = 0.4) -> Any:
    """Return a model whose rates grow from zero with the depth."""
    torch.manual_seed(0)
    return OwnViT(lambda index: block(rate * index / 4))


def gradient(model: Any, images: torch.Tensor) -> torch.Tensor:
    """Return how much each image matters to the output for the first."""
    images = images.clone().requires_grad_()
    output = model(images)
    (output[-1] if isinstance(output, tuple) else output)[0].square().sum().backward()
    assert images.grad is not None
    return images.grad.flatten(1).abs().sum(dim=1)


@pytest.mark.parametrize("name", WHOLE)
def test_a_method_of_whole_blocks_trains_where_blocks_divide_the_batch(name: str) -> None:
    model = mmod.apply_(make(), WHOLE[name]).train()
    of_first, *of_others = gradient(model, make_own_images(6)).tolist()
    assert of_first > 0
    assert not any(of_others)


# How a block draws is found when it is tried, whatever the method.
@pytest.mark.parametrize(("name", "block"), in_turn(INSIDE, DIVIDING))
def test_one_that_reaches_into_blocks_is_refused_in_training_alone(name: str, block: type[DividingBlock]) -> None:
    model = mmod.apply_(make(block), INSIDE[name])
    images = make_own_images(6)
    for part in (model, copy.deepcopy(model)):
        with pytest.raises(
            ValueError, match=rf"stages\.\d \(.*{block.__name__}\) runs .* on a part of the batch in tr"
        ):
            part.train()(images)
        of_first, *of_others = gradient(part.eval(), images).tolist()
        assert of_first > 0
        assert not any(of_others)
    mmod.undo_(model).train()(images)
    # As the refusal advises.
    for stage in model.stages:
        stage.drop_prob = 0.0
    of_first, *of_others = gradient(mmod.apply_(model, INSIDE[name]).train(), images).tolist()
    assert of_first > 0
    assert not any(of_others)


@pytest.mark.parametrize("name", ["vit", "dinov2", "siglip", "videomae", "vivit", "mae"])
def test_dropout_divides_no_batch(name: str) -> None:
    model = make_vision(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    assert not find_stack(model).proof.divides


def test_frozen_blocks_may_be_routed_inside_a_model_that_trains() -> None:
    model, images = mmod.route_(make(), INSIDE["attention"]), make_own_images(2)
    expected = model.eval()(images)
    model.train().stages.eval()
    assert torch.equal(model(images), expected)


def test_a_trial_draws_nothing_and_changes_no_buffer() -> None:
    class Normed(DividingBlock):
        def __init__(self) -> None:
            super().__init__(0.3)
            self.statistics = nn.BatchNorm1d(32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.statistics(x.transpose(1, 2))
            return super().forward(x) + float(np.random.rand() + random.random()) * 0  # noqa: NPY002

    model = OwnViT(lambda _: Normed()).train()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = drawn_from()
    mmod.route_(model, RoutingConfig(router="stride", capacity=0.5))
    assert drawn_from() == state
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert model.training


def test_blocks_without_a_draw_are_tried_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    forward = OwnBlock.forward

    def counted(self: OwnBlock, x: torch.Tensor) -> torch.Tensor:
        passes.extend([True] * self.training)
        return forward(self, x)

    monkeypatch.setattr(OwnBlock, "forward", counted)
    find_stack(OwnViT(lambda _: OwnBlock()))
    assert len(passes) == 1


@pytest.mark.parametrize("copied", [copy_of, meta_copy])
# The blocks of transformers hold a config, which is copied with them.
@pytest.mark.parametrize("make", [lambda: OwnViT(lambda _: OwnBlock()), lambda: make_image_model("vit")])
def test_a_copy_is_tried_where_its_blocks_differ_alone(copied: Any, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = []
    prove = tokens.prove
    monkeypatch.setattr(tokens, "prove", lambda *arguments: trials.append(arguments) or prove(*arguments))
    model = make()
    stack = find_stack(model)
    for number, attribute in enumerate(("of the copy", "of the model"), 1):
        twin = copied(model)
        assert find_stack(twin).proof == stack.proof
        assert len(trials) == number
        changed = twin if attribute == "of the copy" else model
        changed.get_submodule(stack.names[0]).attribute = attribute
        find_stack(copied(changed))
        assert len(trials) == number + 1
