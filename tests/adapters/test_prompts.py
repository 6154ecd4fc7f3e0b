"""Tokens that are neither patches nor prefix, such as learned prompts, are told of once, with what keeps them."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import mmod
from mmod import RoutingConfig
from mmod.lab import Experts, Recursions
from mmod.methods import Exit, Merge, Method, Prune
from tests.kit import zoo
from tests.kit.own_vits import OwnBlock, OwnViT, make_own_images
from tests.kit.vision_zoo import make_pixels, make_vision

PROMPTS = 8
LATE: dict[str, Any] = {"blocks": (1, 2, 3), "capacity": 0.5}
# These always keep the prefix and may skip other tokens.
SKIPPING: dict[str, RoutingConfig | Method] = {
    "linear": RoutingConfig(router=mmod.score("linear", init_std=0.5), **LATE),
    "attention": RoutingConfig(router="attention", **LATE),
    "merging": RoutingConfig(router="redundancy", skipped="merge", **LATE),
    "gradual": mmod.preset("gradual", depth=4),
    "merge": Merge(3),
    "prune": Prune(0.6, (1, 2)),
    "recursions": Recursions(recursions=2),
}
# These treat a prefix as any other token, or skip none.
ALIKE: dict[str, RoutingConfig | Method] = {
    "unprotected": RoutingConfig(router="norm", protect_prefix=False, **LATE),
    "whole images": RoutingConfig(
        router=mmod.score("linear", per="sequence"), select=mmod.Threshold(0.5), gate="step", blocks=(1, 3)
    ),
    "experts": Experts(experts=2),
    "exit": Exit(0.5, (1,)),
}


class Shallow(VisionTransformer):
    """Prompts behind the class token, as in shallow prompt tuning."""

    def _pos_embed(self, x: Tensor) -> Tensor:
        x = super()._pos_embed(x)
        return torch.cat([x[:, :1], self.prompts[0].expand(len(x), -1, -1), x[:, 1:]], dim=1)


class Behind(VisionTransformer):
    """Prompts behind the patches."""

    def _pos_embed(self, x: Tensor) -> Tensor:
        x = super()._pos_embed(x)
        return torch.cat([x, self.prompts[0].expand(len(x), -1, -1)], dim=1)


class Deep(VisionTransformer):
    """Other prompts for each block, as in deep prompt tuning."""

    def forward_features(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = self.norm_pre(self._pos_embed(self.patch_embed(x)))
        for number, block in enumerate(self.blocks):
            patches = x[:, 1:] if number == 0 else x[:, 1 + PROMPTS :]
            x = block(torch.cat([x[:, :1], self.prompts[number].expand(len(x), -1, -1), patches], dim=1))
        return self.norm(x)


def make(kind: type[VisionTransformer]) -> Any:
    model: Any = zoo.make_model("vit_tiny_patch16_224")
    model.__class__ = kind
    model.prompts = nn.Parameter(torch.randn(len(model.blocks), 1, PROMPTS, model.embed_dim))
    return model


def images() -> Tensor:
    return zoo.make_images("vit_tiny_patch16_224", batch=2)


def told(model: nn.Module, *args: Tensor, **kwargs: Any) -> list[str]:
    """Return what a call says."""
    with warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        model(*args, **kwargs)
    return [str(warning.message) for warning in said if "learned prompts" in str(warning.message)]


@pytest.mark.parametrize("kind", [Shallow, Behind, Deep])
@pytest.mark.parametrize("name", SKIPPING)
def test_prompts_that_may_be_skipped_are_told_of_once(kind: type[VisionTransformer], name: str) -> None:
    model = mmod.apply_(make(kind), SKIPPING[name])
    copied = copy.deepcopy(model)
    hooks = [(len(module._forward_pre_hooks), len(module._forward_hooks)) for module in model.modules()]
    for seen in (model, copied):
        (text,) = told(seen, images())
        assert re.match(r"blocks\.\d gets 25 tokens, but 4 x 4 patches and 1 tokens .* prefix=9\)$", text)
        assert told(seen, images()) == []
    first, second = model(images()), model(images())
    assert torch.equal(first, second)
    after = [(len(module._forward_pre_hooks), len(module._forward_hooks)) for module in model.modules()]
    assert all(now <= before for now, before in zip(after, hooks))
    mmod.undo_(model)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("kind", [Shallow, Deep])
def test_blocks_that_are_compiled_tell_of_them_once(kind: type[VisionTransformer]) -> None:
    model = mmod.route_(make(kind), SKIPPING["linear"])
    for block in model.blocks:
        block.compile(backend="eager")
    assert len(told(model, images())) == 1
    assert told(model, images()) == []
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("kind", [Shallow, Deep])
@pytest.mark.parametrize("name", ["linear", "attention", "merging", "gradual"])
def test_what_the_warning_advises_keeps_them(kind: type[VisionTransformer], name: str) -> None:
    config: Any = SKIPPING[name]
    (text,) = told(mmod.route_(make(kind), config), images())
    advice = re.search(r"tokens=mmod\.Tokens\('(\w+)', prefix=(\d+)\)", text)
    assert advice is not None
    model = mmod.route_(make(kind), config, tokens=mmod.Tokens(advice[1], prefix=int(advice[2])))
    with mmod.trace(model) as decisions:
        assert told(model, images()) == []
    assert all(bool(routing.keep_BN[:, : 1 + PROMPTS].all()) for routing in decisions.values())
    assert any(not bool(routing.keep_BN.all()) for routing in decisions.values())


@pytest.mark.parametrize("name", ALIKE)
def test_where_a_prefix_has_no_privilege_nothing_is_said(name: str) -> None:
    assert told(mmod.apply_(make(Shallow), ALIKE[name]), images()) == []


def test_a_failed_call_is_not_the_first() -> None:
    model = mmod.route_(make(Shallow), SKIPPING["linear"])
    with pytest.raises(AssertionError, match="Input height"):
        model(torch.randn(1, 3, 10, 10))
    assert len(told(model, images())) == 1


def test_a_tower_of_another_library_is_told_of_too() -> None:
    model = make_vision("clip")
    embeddings = next(module for module in model.modules() if type(module).__name__ == "CLIPVisionEmbeddings")
    width = embeddings.class_embedding.shape[0]
    prompts = nn.Parameter(torch.randn(1, PROMPTS, width))
    mmod.route_(model, RoutingConfig(router="stride", blocks=(1,), capacity=0.5))
    embeddings.register_forward_hook(
        lambda module, args, x: torch.cat([x, prompts.expand(len(x), -1, -1)], dim=1), prepend=True
    )
    (text,) = told(model, **make_pixels("clip", 2))
    assert "in a model of timm or of your own class" in text


def test_own_models_keep_tokens_that_no_image_changes() -> None:
    model = mmod.route_(OwnViT(lambda _: OwnBlock(), prefix=1 + PROMPTS), RoutingConfig(router="norm", capacity=0.5))
    with mmod.trace(model) as decisions:
        assert told(model, make_own_images(2)) == []
    assert all(bool(routing.keep_BN[:, : 1 + PROMPTS].all()) for routing in decisions.values())
