from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mmod
from mmod import RoutingConfig
from tests.kit.cover import in_turn
from tests.kit.zoo import make_images, make_model

THRESHOLD = RoutingConfig(router=mmod.score("linear", init_std=0.3), select="threshold", blocks="all")


# Which patches others stand for differs by image.
DUPLICATE = RoutingConfig(router="duplicate", select="threshold", blocks="all")


def plain_parts(name: str, count: int) -> Tensor:
    """Return images of which more and more is of one colour."""
    images = make_images(name, count).double()
    for number, image in enumerate(images):
        image[:, : image.shape[1] * number // count] = 0.5
    return images


def packed_and_padded(
    model: torch.nn.Module, images: Tensor, monkeypatch: pytest.MonkeyPatch, **arguments: bool
) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of outputs and gradients: of packed rows and of padded ones, with the same random numbers."""
    blocks = mmod.routed_blocks(model)
    host = type(next(iter(blocks.values())).mod_state.call)
    parameters = [p for p in model.parameters() if p.requires_grad]
    results = []
    for packed in (True, False):
        if not packed:
            monkeypatch.setattr(host, "can_pack", lambda self, block, arguments: False)
        torch.manual_seed(3)
        with mmod.trace(model) as decisions:
            out = model(images, **arguments)
        assert len({int(n) for r in decisions.values() for n in r.keep_BN.sum(1)}) > 1, "nothing to pad"
        gradients = torch.autograd.grad(out.square().sum(), parameters, allow_unused=True)
        results.append([out, *(g for g in gradients if g is not None)])
    return list(zip(*results, strict=True))


# Rotary positions, then other forms of branches.
NAMES = ["eva02_tiny_patch14_224", "vit_small_patch16_dinov3", "vit_small_patch16_rope_mixed_224"]
NAMES += ["vit_mediumd_patch16_rope_reg1_gap_256", "vit_tiny_patch16_224", "vit_base_patch16_rpn_224"]
NAMES += ["vit_small_patch16_18x2_224", "vit_base_patch16_xp_224"]
CONFIGS = {
    "threshold": THRESHOLD,
    "merge": DUPLICATE.replace(skipped="merge"),
    "follow": DUPLICATE.replace(skipped="follow"),
    "scale": THRESHOLD.replace(skipped="scale"),
}


@pytest.mark.parametrize(("name", "config"), in_turn(NAMES, CONFIGS, times=2))
def test_packed_rows_are_padded_ones(name: str, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = mmod.route_(make_model(name), CONFIGS[config]).double(), plain_parts(name, 3)
    calls = []
    host = type(next(iter(mmod.routed_blocks(model).values())).mod_state.call)
    pack = host.pack
    monkeypatch.setattr(host, "pack", lambda *args: calls.append(1) or pack(*args))
    for packed, padded in packed_and_padded(model, images, monkeypatch):
        torch.testing.assert_close(packed, padded, rtol=1e-8, atol=1e-9)
    assert calls


@pytest.mark.parametrize("config", [THRESHOLD, CONFIGS["merge"]], ids=lambda config: config.router.name)
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224", "vit_small_patch16_18x2_224"])
def test_stochastic_depth_drops_images_one_by_one(
    name: str, config: RoutingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mmod.route_(make_model(name, drop_path_rate=0.5), config).double().train()
    block = list(mmod.routed_blocks(model).values())[-1]
    assert block.mod_state.call.can_pack(block, {})
    for packed, padded in packed_and_padded(model, plain_parts(name, 4), monkeypatch):
        torch.testing.assert_close(packed, padded, rtol=1e-8, atol=1e-9)


def test_causal_blocks_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mmod.route_(make_model("vit_tiny_patch16_224"), THRESHOLD).double()
    images = make_images("vit_tiny_patch16_224", 3).double()
    for packed, padded in packed_and_padded(model, images, monkeypatch, is_causal=True):
        torch.testing.assert_close(packed, padded, rtol=1e-8, atol=1e-9)


def test_a_block_that_writes_attention_out_is_refused() -> None:
    model = make_model("vit_tiny_patch16_224")
    mmod.route_(model, THRESHOLD)
    for block in mmod.routed_blocks(model).values():
        block.attn.fused_attn = False
    with pytest.raises(RuntimeError, match="does not call scaled_dot_product_attention"):
        model(make_images("vit_tiny_patch16_224", 3))
