"""The promises of a routed block, over every kind of timm model that can be routed."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mmod
from mmod import RoutingConfig
from tests.kit.cover import in_turn
from tests.kit.oracle import reference_forward
from tests.kit.zoo import PLAIN, ZOO, make_images, make_model

DENSE_FUNCTIONS = [
    RoutingConfig(capacity=1.0),
    RoutingConfig(router="linear", gate="identity", capacity=1.0),
    RoutingConfig(router="linear", gate="identity", select=mmod.Threshold(0.0)),
    RoutingConfig(capacity=1.0, context="all"),
]
ROUTERS = {
    "attention": RoutingConfig(capacity=0.4),
    "linear": RoutingConfig(router=mmod.score("linear", init_std=0.3), capacity=0.4),
    "eq1": mmod.preset("mod", capacity=0.4, router={"init_std": 0.1}),
    "sigmoid": RoutingConfig(
        router=mmod.score("linear", init_std=0.3), capacity=0.4, gate=mmod.Gate("sigmoid", scale=0.1)
    ),
    "p-mod": mmod.preset("p-mod", capacity=0.4, blocks="every_other", router={"init_std": 0.1}),
    "threshold": RoutingConfig(router=mmod.score("linear", init_std=0.3), select="threshold"),
    "attention-threshold": RoutingConfig(select=mmod.Threshold(0.9)),
    "random": RoutingConfig(router="random", capacity=0.4),
    "stride": RoutingConfig(router="stride", capacity=0.4),
    "norm": RoutingConfig(router="norm", capacity=0.4),
    "change": RoutingConfig(router="change", capacity=0.4),
    "context": RoutingConfig(capacity=0.4, context="all"),
    "learned context": RoutingConfig(router=mmod.score("linear", init_std=0.3), capacity=0.4, context="all"),
    "threshold context": RoutingConfig(router=mmod.score("linear", init_std=0.3), select="threshold", context="all"),
}


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> None:
    b = b.detach()
    torch.testing.assert_close(a.detach(), b, rtol=tolerance, atol=tolerance * float(b.abs().max().clamp(min=1)))


# tests/test_every_host.py has one on each model.
@pytest.mark.parametrize(("name", "config"), in_turn(PLAIN, DENSE_FUNCTIONS))
def test_full_capacity_is_the_dense_model(name: str, config: RoutingConfig) -> None:
    model, images = make_model(name), make_images(name, 2)
    keys = list(model.state_dict())
    with torch.no_grad():
        dense = model(images)
        mmod.route_(model, config)
        close(model(images), dense, 1e-6)
        mmod.unroute_(model)
        assert torch.equal(model(images), dense)
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224", "vit_base_patch16_xp_224"])
@pytest.mark.parametrize("config", DENSE_FUNCTIONS[:2], ids=["attention", "linear"])
def test_full_capacity_is_bitwise_dense_in_bf16(name: str, config: RoutingConfig) -> None:
    model, images = make_model(name).bfloat16(), make_images(name, 2).bfloat16()
    with torch.no_grad():
        dense = model(images)
        assert torch.equal(mmod.route_(model, config)(images), dense)


@pytest.mark.parametrize(("name", "router"), in_turn(ZOO, ["attention", "linear", "context"]))
def test_matches_the_per_image_definition_with_gradients(name: str, router: str) -> None:
    model = mmod.route_(make_model(name), ROUTERS[router]).double()
    images = make_images(name, 2).double()
    expected, actual = reference_forward(model, images), model(images)
    close(actual, expected, 1e-6)
    parameters = [p for p in model.parameters() if p.requires_grad]
    weights = torch.randn_like(expected)
    reference = torch.autograd.grad((expected * weights).sum(), parameters, allow_unused=True)
    gradient = torch.autograd.grad((actual * weights).sum(), parameters, allow_unused=True)
    for a, b in zip(gradient, reference, strict=True):
        if b is not None:
            close(a, b, 1e-5)


@pytest.mark.parametrize(
    ("router", "name"), in_turn(ROUTERS, ["deit_tiny_distilled_patch16_224", "vit_small_patch16_dinov3"])
)
def test_every_router_matches_the_definition(router: str, name: str) -> None:
    model = mmod.route_(make_model(name), ROUTERS[router]).double()
    images = make_images(name, 3).double()
    with torch.no_grad():
        close(model(images), reference_forward(model, images), 1e-6)


# What each model's blocks compute is compared with the definition above.
@pytest.mark.parametrize("name", [*PLAIN, "vit_small_patch16_dinov3", "naflexvit_base_patch16_gap"])
def test_skipped_rows_are_bitwise_copies_and_prefix_runs(name: str) -> None:
    model, images = mmod.route_(make_model(name), RoutingConfig(capacity=0.3)), make_images(name, 2)
    recorded = {}
    blocks = mmod.routed_blocks(model)
    for key, block in blocks.items():
        block.register_forward_hook(lambda _, args, out, key=key: recorded.update({key: (args[0], out)}))
    with torch.no_grad(), mmod.trace(model) as decisions:
        model(images)
    prefix = next(iter(blocks.values())).router.prefix
    for key, routing in decisions.items():
        before, after = recorded[key]
        skipped = ~routing.keep_BN
        assert skipped.any()
        assert torch.equal(after[skipped], before[skipped])
        assert not torch.equal(after, before)
        assert routing.keep_BN[:, :prefix].all()


@given(batch=st.integers(1, 4), rows=st.integers(1, 5), columns=st.integers(1, 5), capacity=st.floats(0.01, 1.0))
def test_any_shape_and_capacity(batch: int, rows: int, columns: int, capacity: float) -> None:
    model = make_model("vit_tiny_patch16_224", dynamic_img_size=True, depth=2)
    mmod.route_(model, RoutingConfig(capacity=round(capacity, 3)))
    images = torch.randn(batch, 3, 16 * rows, 16 * columns)
    with torch.no_grad(), mmod.trace(model) as decisions:
        out = model(images)
        close(out, reference_forward(model, images), 1e-4)
    tokens = rows * columns + 1
    assert decisions["blocks.1"].kept.index_BK.shape == (batch, max(1, int(tokens * round(capacity, 3) + 1e-9)))


@pytest.mark.parametrize("context", ["kept", "all"])
def test_kept_tokens_see_skipped_ones_only_in_the_context_of_all(context: str) -> None:
    model = make_model("vit_tiny_patch16_224").double()
    config = RoutingConfig(router=_first_channel, gate="identity", capacity=0.4, context=context, blocks=(1,))
    block = mmod.routed_blocks(mmod.route_(model, config))["blocks.1"]
    x = torch.randn(2, 17, 64).double()
    keep = block.router(x).keep_BN
    other = torch.where(keep.unsqueeze(-1), x, torch.cat([x[..., :1], torch.randn(2, 17, 63).double()], dim=-1))
    with torch.no_grad():
        same = torch.equal(block(other)[keep], block(x)[keep])
    assert same == (context == "kept")


def _first_channel(x_BND: torch.Tensor) -> torch.Tensor:
    return x_BND[..., 0]


def test_the_context_of_all_needs_fused_attention() -> None:
    model = make_model("vit_tiny_patch16_224")
    model.blocks[3].attn.fused_attn = False
    with pytest.raises(ValueError, match=r"context='all' is not possible in blocks\.3, which supports kept"):
        mmod.route_(model, RoutingConfig(context="all"))
    assert not mmod.is_routed(model)


def test_late_blocks_keep_the_tokens_the_last_dense_block_attends_to() -> None:
    name = "deit_tiny_distilled_patch16_224"
    model = mmod.route_(make_model(name, depth=6), RoutingConfig(blocks="late", capacity=0.3)).double()
    images = make_images(name, 2).double()
    assert list(mmod.routed_blocks(model)) == [f"blocks.{index}" for index in (2, 3, 4, 5)]
    with torch.no_grad(), mmod.trace(model) as decisions:
        close(model(images), reference_forward(model, images), 1e-6)
    first, *others = decisions.values()
    assert all(other.kept.index_BK.data_ptr() == first.kept.index_BK.data_ptr() for other in others)
    mmod.set_capacity_(model, [0.3, 0.5, 0.5, 0.3])
    with torch.no_grad(), mmod.trace(model) as decisions:
        close(model(images), reference_forward(model, images), 1e-6)


def test_a_single_token_is_routed() -> None:
    model = make_model("vit_base_patch16_siglip_224", img_size=16)
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        dense = model(images)
        close(mmod.route_(model, RoutingConfig(capacity=0.1))(images), dense, 1e-6)


@pytest.mark.parametrize("name", mmod.presets("image"))
def test_a_batch_without_images_has_the_gradients_of_the_dense_model(name: str) -> None:
    dense = make_model("vit_tiny_patch16_224", depth=6)
    model = mmod.route_(copy.deepcopy(dense), name).train()
    images = make_images("vit_tiny_patch16_224", 0)
    dense(images).sum().backward()
    (model(images).sum() + mmod.auxiliary_loss(model)).backward()
    learned = dict(model.named_parameters())
    for key, parameter in dense.named_parameters():
        assert torch.equal(learned[key].grad, parameter.grad), key
    assert mmod.auxiliary_loss(mmod.undo_(model)) == 0


@pytest.mark.parametrize("max_tokens", [None, 3])
def test_threshold_may_keep_nothing(max_tokens: int | None) -> None:
    name = "vit_base_patch16_siglip_gap_224"
    model, images = make_model(name), make_images(name, 2)
    config = RoutingConfig(
        router="stride", select=mmod.Threshold(2.0, max_tokens=max_tokens), blocks=(1, 2), gate="identity"
    )
    mmod.route_(model, config)
    images.requires_grad_()
    with mmod.trace(model) as decisions:
        out = model(images)
    assert not any(routing.keep_BN.any() for routing in decisions.values())
    out.sum().backward()
    assert images.grad is not None
    assert images.grad.isfinite().all()


def test_static_and_dynamic_thresholds_agree() -> None:
    name, results = "deit_tiny_patch16_224", []
    for max_tokens in (None, 17):
        model = mmod.route_(make_model(name), ROUTERS["threshold"].replace(select={"max_tokens": max_tokens}))
        torch.manual_seed(5)
        for block in mmod.routed_blocks(model).values():
            block.router.score.reset_parameters()
        out = model(make_images(name, 4))
        gradient = torch.autograd.grad(out.square().sum(), [p for p in model.parameters() if p.requires_grad])
        results.append((out.detach(), *gradient))
    for dynamic, static in zip(*results):
        close(dynamic, static, 1e-5)


def test_packing_is_refused_where_it_would_be_wrong() -> None:
    block = mmod.routed_blocks(mmod.route_(make_model("vit_tiny_patch16_224"), ROUTERS["threshold"]))["blocks.3"]
    assert block.mod_state.call.can_pack(block, {"is_causal": True})
    assert not block.mod_state.call.can_pack(block, {"attn_mask": torch.zeros(1)})
    biased = mmod.route_(make_model("beit_base_patch16_224"), mmod.RoutingConfig())
    block = mmod.routed_blocks(biased)["blocks.1"]
    assert not block.mod_state.call.can_pack(block, {"shared_rel_pos_bias": torch.zeros(1)})
    written_out = dataclasses.replace(block.mod_state.call, fused=False)
    assert not written_out.can_pack(block, {})


@pytest.mark.parametrize(
    "router", ["attention", "linear", "random", "norm", "threshold", "context", "threshold context"]
)
def test_padding_of_naflexvit_never_runs_and_never_counts(router: str) -> None:
    model = mmod.route_(make_model("naflexvit_base_patch16_gap"), ROUTERS[router]).double()
    patches = torch.randn(2, 20, 16 * 16 * 3).double()
    coordinates = torch.cartesian_prod(torch.arange(4), torch.arange(5)).expand(2, -1, -1).clone()
    valid = torch.ones(2, 20, dtype=torch.bool)
    valid[1, 10:], coordinates[1, 10:] = False, 0
    with torch.no_grad(), mmod.trace(model) as decisions:
        both = model(patches, patch_coord=coordinates, patch_valid=valid)
    with torch.no_grad(), mmod.trace(model) as alone_decisions:
        alone = model(patches[1:, :10], patch_coord=coordinates[1:, :10], patch_valid=valid[1:, :10])
    close(both[1:], alone, 1e-6)
    for key, routing in decisions.items():
        keep = routing.keep_BN[1]
        assert not keep[-10:].any()
        assert torch.equal(keep[:-10], alone_decisions[key].keep_BN[0])


@pytest.mark.parametrize("norm", [False, True])
def test_intermediate_features_are_those_of_each_block(norm: bool) -> None:
    model, images = mmod.route_(make_model("test_vit"), mmod.RoutingConfig()), make_images("test_vit", 2)
    recorded = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, args, out: recorded.append(out.clone()))
    with torch.no_grad():
        features, intermediates = model.forward_intermediates(images, norm=norm, output_fmt="NLC")
        last = model.get_intermediate_layers(images, n=[1], norm=norm)[0]
        expected = [model.norm(x) if norm else x for x in recorded[: len(model.blocks)]]
        prefix = model.num_prefix_tokens
        for actual, reference in zip(intermediates, expected, strict=True):
            close(actual, reference[:, prefix:], 1e-6)
        close(last, expected[1][:, prefix:], 1e-6)
        close(features, model.forward_features(images), 1e-6)


def test_head_can_be_reset_and_blocks_pruned() -> None:
    model, images = mmod.route_(make_model("test_vit"), mmod.RoutingConfig()), make_images("test_vit", 2)
    model.reset_classifier(3)
    assert model(images).shape == (2, 3)
    model.prune_intermediate_layers([3])
    assert len(mmod.routed_blocks(model)) == 2
