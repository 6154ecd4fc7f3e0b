"""What reads tokens outside the blocks: the full grid for any code, the pooling and classifier of each call."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import mmod
from mmod.methods import Exit, Merge, Method, Prune, Resize
from tests.kit.clip_zoo import make_clip
from tests.kit.clip_zoo import make_images as make_clip_images
from tests.kit.cover import in_turn
from tests.kit.method_zoo import MODELS
from tests.kit.zoo import make_images, make_model

REDUCING: dict[str, Method] = {
    "merge": Merge(3),
    "merge-late": Merge((0, 0, 4, 4)),
    "prune": Prune(0.6, (0, 2), fuse=False),
    "prune-fused": Prune(0.6, (0, 2)),
    "prune-mean": Prune(0.6, (1, 2), by="mean"),
}
METHODS: dict[str, Method] = {**REDUCING, "exit": Exit(0.2, (0, 2))}
# The distilled head always reads the prefix.
GRIDS = [
    name for name in MODELS if name not in ("test_vit", "naflexvit_base_patch16_gap", "deit_tiny_distilled_patch16_224")
]
POOLED = ["vit_tiny_patch16_224", "vit_medium_patch16_gap_240", "eva02_tiny_patch14_224", "vit_base_patch16_siglip_224"]


def make(name: str, method: Method, **changes: object) -> tuple[Any, Any, Tensor]:
    """Return a dense model, a copy changed by a method, and images."""
    dense = make_model(name, **changes).double()
    return dense, method.apply_(copy.deepcopy(dense)), make_images(name, 2).double()


@pytest.mark.parametrize(("name", "method"), in_turn(GRIDS, REDUCING))
@torch.no_grad()
def test_code_outside_the_blocks_gets_the_full_grid(name: str, method: str) -> None:
    dense, model, images = make(name, REDUCING[method])
    # Without pooling and classifier, a call of the model returns its tokens.
    model.reset_classifier(0, "")
    model.fc_norm = nn.Identity()
    expected, tokens = model(images), model.forward_features(images)
    assert tokens.shape == dense.forward_features(images).shape
    torch.testing.assert_close(tokens, expected, rtol=0, atol=1e-12)
    maps = model.forward_intermediates(images, intermediates_only=True)
    dense_maps = dense.forward_intermediates(images, intermediates_only=True)
    assert [features.shape for features in maps] == [features.shape for features in dense_maps]
    last = model.forward_intermediates(images, indices=1, norm=True, output_fmt="NLC", intermediates_only=True)[0]
    torch.testing.assert_close(last, tokens[:, model.num_prefix_tokens :], rtol=0, atol=1e-12)
    # A part of the blocks, and then all of them again.
    model.forward_intermediates(images, indices=[1], stop_early=True)
    assert torch.equal(model.forward_features(images), tokens)


@pytest.mark.parametrize(("method", "pool"), in_turn(METHODS, ["token", "avg", "max", "avgmax", ""], times=2))
def test_pooling_and_classes_are_those_of_the_call(method: str, pool: str) -> None:
    before, after, images = make("vit_tiny_patch16_224", METHODS[method])
    torch.manual_seed(3)
    before.reset_classifier(3, pool)
    METHODS[method].apply_(before)
    torch.manual_seed(3)
    after.reset_classifier(3, pool)
    with torch.no_grad():
        assert torch.equal(after(images), before(images))
    for model in (before, after):
        model(images).square().sum().backward()
    gradients = dict(before.named_parameters())
    for name, weight in after.named_parameters():
        assert (weight.grad is None) == (gradients[name].grad is None), name
        if weight.grad is not None:
            torch.testing.assert_close(weight.grad, gradients[name].grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", POOLED)
@torch.no_grad()
def test_any_code_averages_merged_tokens_by_their_size(name: str) -> None:
    pool = "" if name == "vit_base_patch16_siglip_224" else "avg"
    _, model, images = make(name, Merge(4))
    expected = model(images)
    torch.testing.assert_close(model.forward_head(model.forward_features(images)), expected, rtol=0, atol=1e-12)
    model.reset_classifier(0, pool)
    patches = model.forward_features(images)[:, model.num_prefix_tokens :]
    mean, timms = patches.mean(dim=1), model(images)
    timms = timms[:, model.num_prefix_tokens :].mean(dim=1) if pool == "" else timms
    torch.testing.assert_close(model.fc_norm(mean), timms, rtol=0, atol=1e-12)


class OwnMean(VisionTransformer):
    """Averages patches in its own forward_features, as the fine-tuning code of MAE does."""

    def forward_features(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = self._pos_embed(self.patch_embed(x))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)[:, 1:].mean(dim=1)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        return self.head(x)


@pytest.mark.parametrize("method", REDUCING.values(), ids=REDUCING)
@torch.no_grad()
def test_a_subclass_pools_the_full_grid(method: Method) -> None:
    if isinstance(method, Prune):
        method = dataclasses.replace(method, by="mean")
    _, timms, images = make("vit_tiny_patch16_224", method, global_pool="")
    model: Any = OwnMean(img_size=64, embed_dim=64, depth=4, num_heads=4, num_classes=7).double().eval()
    model.load_state_dict(mmod.undo_(copy.deepcopy(timms)).state_dict())
    timms.head = nn.Identity()
    expected = model.head(timms(images)[:, 1:].mean(dim=1))
    torch.testing.assert_close(method.apply_(model)(images), expected, rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_change_between_blocks_reaches_dropped_and_kept_tokens() -> None:
    dense, model, images = make("vit_tiny_patch16_224", Prune(0.6, (0,), fuse=False))
    expected = model.forward_intermediates(images, indices=[1], norm=False, intermediates_only=True)[0]
    handle = model.blocks[1].register_forward_hook(lambda _, args, output: output + 1)
    changed = model.forward_intermediates(images, indices=[1], norm=False, intermediates_only=True)[0]
    torch.testing.assert_close(changed, expected + 1, rtol=0, atol=1e-12)
    handle.remove()
    with mmod.trace(model) as decisions:
        tokens = model.forward_intermediates(images, indices=[0, 1], output_fmt="NLC", intermediates_only=True)
    dropped_BN = ~decisions["blocks.0"].keep_BN[:, 1:]
    assert dropped_BN.sum() == 2 * 6
    # Dropped between the halves of the block, they stay as they were there.
    x_BND, block = dense._pos_embed(dense.patch_embed(images)), dense.blocks[0]
    dropped_RD = (x_BND + block.attn(block.norm1(x_BND)))[:, 1:][dropped_BN]
    torch.testing.assert_close(tokens[0][dropped_BN], dropped_RD, rtol=0, atol=1e-12)
    assert torch.equal(tokens[0][dropped_BN], tokens[1][dropped_BN])
    assert not (tokens[0] == tokens[1])[~dropped_BN].any()
    model.blocks[1].register_forward_hook(lambda _, args, output: output[:, 1:])
    with pytest.raises(ValueError, match=r"= \(2, 16\), and the pass that it continues has \(2, 17\)"):
        model(images)


@pytest.mark.parametrize("name", ["vit_medium_patch16_gap_240", "vit_base_patch16_siglip_224"])
@torch.no_grad()
def test_only_a_call_of_the_model_pools_what_pruning_left(name: str) -> None:
    _, model, images = make(name, Prune(0.5, (1,), fuse=False))
    with mmod.trace(model) as decisions:
        model(images)
    with pytest.raises(ValueError, match=r"call the model, after reset_classifier\(0\)"):
        model.forward_head(model.forward_features(images))
    model.reset_classifier(0)
    pooled = model(images)
    if name == "vit_medium_patch16_gap_240":
        kept_BN = decisions["blocks.1"].keep_BN
        means = [tokens[keep].mean(0) for tokens, keep in zip(model.forward_features(images), kept_BN)]
        torch.testing.assert_close(pooled, model.fc_norm(torch.stack(means)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224"])
@torch.no_grad()
def test_features_of_early_exit_are_those_of_all_images(name: str) -> None:
    dense, model, images = make(name, Exit(0.2, (0, 2)))
    model(images)
    for _ in range(2):
        assert torch.equal(model.forward_features(images), dense.forward_features(images))
    maps = model.forward_intermediates(images, intermediates_only=True)
    assert all(map(torch.equal, maps, dense.forward_intermediates(images, intermediates_only=True)))


def test_classes_of_exits_follow_the_model() -> None:
    _, model, images = make("vit_tiny_patch16_224", Exit(0.2, (0, 2)))
    with pytest.raises(ValueError, match=r"mmod\.undo_ before reset_classifier\(0\)"):
        model.reset_classifier(0)
    head, model.head = model.head, nn.Linear(64, 3).double()
    with pytest.raises(ValueError, match=r"returns \(3,\) per image, and its exits \(7,\).*reset_classifier"):
        model(images)
    model.head = head
    assert model(images).shape == (2, 7)
    distilled = Exit(0.2, (0, 2)).apply_(make_model("deit_tiny_distilled_patch16_224").train())
    distilled.set_distilled_training(True)
    with pytest.raises(ValueError, match=r"set_distilled_training\(False\)"):
        distilled(make_images("deit_tiny_distilled_patch16_224", 3))
    distilled.set_distilled_training(False)
    assert distilled(make_images("deit_tiny_distilled_patch16_224", 3)).shape == (3, 7)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@torch.no_grad()
def test_removed_blocks_leave_a_working_model(method: Method) -> None:
    dense, model, images = make("vit_tiny_patch16_224", method)
    model.blocks = model.blocks[:2]
    tokens = model.forward_features(images)
    assert tokens.shape == dense.forward_features(images).shape
    assert model(images).shape == (2, 7)
    assert torch.equal(model.forward_features(images), tokens)


@pytest.mark.parametrize("method", [Merge(3), Prune(0.6, (0, 2)), Resize(32)], ids=["merge", "prune", "resize"])
@torch.no_grad()
def test_feature_pyramids_have_whole_maps(method: Method) -> None:
    torch.manual_seed(0)
    model = timm.create_model("test_vit", features_only=True, out_indices=(1, 3), dynamic_img_size=True).eval()
    images = torch.randn(2, 3, 64, 64)
    side = 2 if isinstance(method, Resize) else 4
    before = model(nn.functional.interpolate(images, size=(32, 32), mode="bicubic", antialias=True))
    maps = mmod.apply_(model, method)(images)
    assert [features.shape for features in maps] == [(2, 64, side, side)] * 2
    if isinstance(method, Resize):
        assert all(map(torch.equal, maps, before))
    mmod.undo_(model)
    assert model(images)[0].shape[-2:] == (4, 4)


@pytest.mark.parametrize("method", [Merge(2), Prune(0.5, (0,), by="mean")], ids=["merge", "prune"])
@torch.no_grad()
def test_towers_of_open_clip_give_whole_maps(method: Method) -> None:
    model: Any = make_clip("EVA02-B-16").eval()
    images = make_clip_images("EVA02-B-16", 2)
    expected = model.visual.forward_intermediates(images)["image_intermediates"]
    mmod.apply_(model.visual.trunk, method)
    maps = model.visual.forward_intermediates(images)["image_intermediates"]
    assert [features.shape for features in maps] == [features.shape for features in expected]
    pooled: Any = make_clip("vit_medium_patch16_gap_256").eval()
    mmod.apply_(pooled.visual.trunk, method)
    images = make_clip_images("vit_medium_patch16_gap_256", 2)
    if isinstance(method, Prune):
        with pytest.raises(ValueError, match="forward_head of a pruned VisionTransformer"):
            pooled.visual.forward_intermediates(images)
    else:
        features = pooled.visual.forward_intermediates(images)["image_features"]
        torch.testing.assert_close(features, pooled.visual(images))
