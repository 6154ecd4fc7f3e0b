"""Tokens that nobody may attend to change no visible token, whatever method a model has."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import mmod
from mmod.lab import Experts, Recursions
from mmod.lab.mixture import choose_tokens
from mmod.methods import Exit, Merge, Prune
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
    "experts": [Experts(experts=2, capacity=0.5)],
    "tokens": [Experts(experts=2, idle=1, capacity=0.5, choice="tokens")],
    "unlimited": [Experts(experts=2, idle=1, capacity=None, choice="tokens")],
    "normalized": [Experts(experts=2, idle=1, capacity=1.0, normalize=True)],
    "staged": [Experts(experts=2, capacity=0.5), LINEAR],
    "recursions": [Recursions(recursions=2)],
    "first keys": [Recursions(recursions=2, keys="first")],
    "depths": [Recursions(recursions=2, choice="tokens")],
}


def changed(*methods: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("test_vit", **options).eval()
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


def test_experts_among_kept_tokens_that_attend_to_all_refuse_a_mask() -> None:
    model = changed(Experts(experts=2, capacity=0.5), LINEAR.replace(context="all"))
    images, mask = torch.randn(2, 3, 160, 160), masked("keys")[0]
    with pytest.raises(ValueError, match="route with context='kept', or pass no attn_mask"):
        model(images, attn_mask=mask)
    model(images)
    changed(Experts(experts=2, capacity=0.5), LINEAR)(images, attn_mask=mask)


@torch.no_grad()
def test_an_attention_of_experts_takes_its_arguments_in_any_order() -> None:
    attention: Any = changed(Experts(experts=2, capacity=0.5)).blocks[0].attn
    x_BND, mask = torch.randn(2, 6, 64), torch.rand(2, 1, 6, 6) < 0.8
    expected = attention(x_BND, mask)
    assert torch.equal(attention(attn_mask=mask, x=x_BND), expected)
    with pytest.raises(ValueError, match="route with context='kept', or pass no attn_mask"):
        attention(attn_mask=mask, x=x_BND[:, :3])


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("choice", ["topk", "tokens"])
def test_masked_tokens_leave_the_slots_of_a_shorter_image(choice: str, normalize: bool) -> None:
    prob_BNJ = torch.randn(3, 12, 4, dtype=torch.float64).softmax(-1)
    valid_BN = torch.arange(12) < torch.tensor([[12], [8], [5]])
    config = Experts(experts=3, idle=1, capacity=1.5, choice=choice, normalize=normalize)
    slots = config.slots_among(valid_BN.sum(1))
    rows = choose_tokens(prob_BNJ, 3, config.slots_of(12), choice, normalize, valid_BN, slots)
    weight = torch.zeros(3, 36, dtype=torch.float64)
    gates = rows.gate_T.split(rows.counts)
    for expert, row_T in enumerate(rows.row_T.split(rows.counts)):
        weight[expert].index_add_(0, row_T, gates[expert])
    for image, length in enumerate((12, 8, 5)):
        alone = choose_tokens(prob_BNJ[image : image + 1, :length], 3, config.slots_of(length), choice, normalize)
        expected = torch.zeros(3, 12, dtype=torch.float64)
        gates = alone.gate_T.split(alone.counts)
        for expert, row_T in enumerate(alone.row_T.split(alone.counts)):
            expected[expert].index_add_(0, row_T, gates[expert])
        torch.testing.assert_close(weight.view(3, 3, 12)[:, image], expected)


def test_the_balance_loss_counts_visible_tokens_only() -> None:
    model = changed(Experts(experts=2, idle=1, capacity=None, choice="tokens")).train()
    images, (mask, _) = torch.randn(2, 3, 160, 160), masked("keys")
    losses = []
    for x in (images, repainted(images)):
        torch.manual_seed(0)
        model(x, attn_mask=mask)
        losses.append(mmod.auxiliary_loss(model))
    torch.testing.assert_close(losses[0], losses[1], atol=1e-6, rtol=1e-5)


def test_a_mask_does_not_outlive_its_pass() -> None:
    model, images, (mask, _) = changed(Experts(experts=2, capacity=0.5)), torch.randn(2, 3, 160, 160), masked("keys")
    expected = model(images)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.blocks[1].norm2.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model(images, attn_mask=mask)
    handle.remove()
    assert torch.equal(model(images), expected)


@torch.no_grad()
def test_experts_compile_as_one_graph_with_a_mask() -> None:
    # What is traced grows with the depth.
    model = changed(Experts(experts=2, capacity=0.5), depth=1)
    images, (mask, _) = torch.randn(2, 3, 160, 160), masked("keys")
    expected = model(images, attn_mask=mask)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(images, attn_mask=mask), expected)
