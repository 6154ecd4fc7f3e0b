"""The module that owns the blocks begins and ends their calls, and is otherwise what its host made."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import timm
import torch
from torch import nn

import mmod
from mmod.blocks import BlockOwner
from mmod.methods import Exit, Merge, Prune
from tests.kit.clip_zoo import make_clip
from tests.kit.vision_zoo import make_vision
from tests.kit.vlm_zoo import make_language
from tests.kit.zoo import make_images, make_model

NAME = "vit_tiny_patch16_224"
ATTENTION = mmod.RoutingConfig(capacity=0.4, blocks=(1, 2, 3))
# A model, how it is changed, and the name of the module that owns the blocks.
OWNERS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], nn.Module], str]] = {
    "routing": (partial(make_model, NAME), lambda model: mmod.route_(model, ATTENTION), ""),
    "prune": (partial(make_model, NAME), Prune(0.6, (1,)).apply_, ""),
    "merge": (partial(make_model, NAME), Merge(3).apply_, ""),
    "exit": (partial(make_model, NAME), Exit(0.2, (1,)).apply_, ""),
    # It saves its methods by another mixin on the same module.
    "exit of transformers": (partial(make_vision, "vit"), Exit(0.2, (1,)).apply_, ""),
    "open_clip": (
        partial(make_clip, "ViT-B-32"),
        lambda model: mmod.route_(model, image=ATTENTION.replace(blocks=(1, 2)), text=None),
        "visual.transformer",
    ),
    # The model itself holds the embedding, where passes of captions begin.
    "text of open_clip": (
        partial(make_clip, "ViT-B-32"),
        lambda model: mmod.route_(model, text=ATTENTION.replace(blocks=(1, 2))),
        "",
    ),
    "language": (
        partial(make_language, "llama"),
        lambda model: mmod.route_(
            model, mmod.RoutingConfig(router="random", capacity=0.5, blocks=(1, 2), language={"tokens": "all"})
        ),
        "model",
    ),
}


@pytest.mark.parametrize("name", OWNERS)
def test_an_owner_is_what_its_host_made(name: str) -> None:
    make, change, path = OWNERS[name]
    dense = make()
    model = change(copy.deepcopy(dense))
    before: Any = dense.get_submodule(path)
    owner: Any = model.get_submodule(path)
    assert isinstance(owner, BlockOwner)
    assert isinstance(owner, type(before))
    assert type(owner).__name__ == type(before).__name__
    for method in BlockOwner.mod_running:
        if hasattr(before, method):
            assert inspect.signature(getattr(owner, method)) == inspect.signature(getattr(before, method))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other.get_submodule(path)) is type(owner)
    held = owner.forward
    mmod.undo_(model)
    assert type(owner) is type(before)
    assert set(vars(owner)) == set(vars(before))
    if isinstance(dense, timm.models.VisionTransformer):
        # Who held the method runs the host's.
        images = make_images(NAME, 2)
        with torch.no_grad():
            assert torch.equal(held(images), dense(images))


@torch.no_grad()
def test_features_are_those_of_the_call() -> None:
    model: Any = mmod.route_(make_model(NAME), ATTENTION)
    images = make_images(NAME, 2)
    assert torch.equal(model.forward_head(model.forward_features(images)), model(images))
