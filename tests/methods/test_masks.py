"""Tokens that nobody may attend to change no visible token, whatever method a model has."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import mmod
from mmod.methods import Exit, Experts, Merge, Prune, Recursions
from tests.kit.cover import in_turn

LINEAR = mmod.RoutingConfig(router=mmod.score("linear", init_std=0.3), capacity=0.5, blocks=(1, 3))
MASKS = ("keys", "bias", "pairs")
METHODS: dict[str, list[Any]] = {
    "linear": [LINEAR],
    "threshold": [LINEAR.replace(select="threshold")],
    "attention": [LINEAR.replace(router="attention", gate="identity")],
    "diversity": [LINEAR.replace(router="diversity", gate="identity")],
    "stride": [LINEAR.replace(router="stride", gate="identity")],
    "follow": [LINEAR.replace(router="redundancy", gate="identity", skipped="follow")],
    "all": [LINEAR.replace(context="all")],
    "mlp": [LINEAR.replace(operator="mlp")],
    "gradual": [mmod.preset("gradual", depth=4)],
    "experts": [Experts(experts=2, idle=1, capacity=None, choice="tokens")],
    "recursions": [Recursions(recursions=2)],
    "first keys": [Recursions(recursions=2, keys="first")],
    "depths": [Recursions(recursions=2, choice="tokens")],
}


def changed(*methods: Any, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = timm.create_model("test_vit").eval()
    for parameter in model.parameters():
        parameter.data *= 3 if parameter.ndim > 1 else 1
    for method in methods:
        mmod.route_(model, method) if isinstance(method, mmod.RoutingConfig) else mmod.apply_(model, method)
    return model


def masked(kind: str) -> tuple[Tensor, Tensor]:
    """Return the mask of a batch whose first image is half hidden, and which tokens of it are visible."""
    visible_BN = torch.ones(2, 101, dtype=torch.bool)
    visible_BN[0, 51:] = False
    keys = visible_BN[:, None, None, :]
    if kind == "bias":
        return torch.zeros(keys.shape).masked_fill(~keys, -torch.inf), visible_BN[0]
    return keys if kind == "keys" else keys & torch.ones(101, 101, dtype=torch.bool), visible_BN[0]


def repainted(images: Tensor) -> Tensor:
    """Return images of 10 x 10 patches with other pixels in the lower half of the first one."""
    images = images.clone()
    images[0, :, 80:] = 3 * torch.randn(3, 80, 160)
    return images


@torch.no_grad()
@pytest.mark.parametrize(("name", "kind"), in_turn(METHODS, MASKS))
def test_hidden_patches_change_no_visible_token(name: str, kind: str) -> None:
    model, (mask, visible_N) = changed(*METHODS[name]), masked(kind)
    images = torch.randn(2, 3, 160, 160)
    before, after = (model.forward_features(x, attn_mask=mask) for x in (images, repainted(images)))
    torch.testing.assert_close(after[0, visible_N], before[0, visible_N], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(after[1], before[1], atol=1e-5, rtol=1e-4)
    # The batch does not change an image.
    alone = model.forward_features(images[:1], attn_mask=mask[:1])
    torch.testing.assert_close(alone[0, visible_N], before[0, visible_N], atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("method", [Prune(0.5, (1,)), Merge(4)], ids=["prune", "merge"])
def test_methods_that_drop_tokens_refuse_a_mask(method: Any) -> None:
    with pytest.raises(ValueError, match="do not support the arguments attn_mask"):
        changed(method)(torch.randn(2, 3, 160, 160), attn_mask=masked("keys")[0])


@torch.no_grad()
def test_images_that_exit_leave_the_mask_to_the_others() -> None:
    images, mask, logits = torch.randn(4, 3, 160, 160), masked("keys")[0].repeat(2, 1, 1, 1), []
    model = changed(Exit(1.0, (1, 2)))
    model.blocks[1].exit.register_forward_hook(lambda *call: logits.append(call[2]))
    model(images, attn_mask=mask)
    model = changed(Exit(float(logits[0].softmax(-1).amax(-1).median()), (1, 2)))
    with mmod.trace(model) as decisions:
        together = model(images, attn_mask=mask)
    assert 0 < decisions["blocks.2"].keep_BN.sum() < 4
    alone = [model(images[row : row + 1], attn_mask=mask[row : row + 1]) for row in range(4)]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("way", [{}, {"choice": "tokens", "idle": 1}], ids=str)
@torch.no_grad()
def test_experts_that_choose_together_refuse_hidden_tokens(way: dict[str, Any]) -> None:
    model, (mask, _) = changed(Experts(experts=2, capacity=0.5, **way)), masked("keys")
    images = torch.randn(2, 3, 160, 160)
    with pytest.raises(ValueError, match=r"would take their slots.*capacity=None"):
        model(images, attn_mask=mask)
    model(images)
    model(images, attn_mask=torch.ones_like(mask))
