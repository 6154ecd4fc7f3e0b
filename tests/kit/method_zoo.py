"""Models that methods can change, and methods that change them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timm.models.resnet import BasicBlock, ResNet
from torch import nn

import mmod
from mmod.lab import Channels, Experts, Recursions
from mmod.methods import Exit, Merge, Method, Prune, Resize
from tests.kit.zoo import make_model

# Class token or none, registers, mean, attention and distilled pooling, rotary positions, norms behind.
MODELS = [
    "test_vit",
    "vit_base_patch16_siglip_224",
    "vit_medium_patch16_gap_240",
    "vit_little_patch16_reg4_gap_256",
    "vit_intern300m_patch14_448",
    "vit_small_patch14_reg4_dinov2",
    "vit_base_patch16_rpn_224",
    "deit_tiny_distilled_patch16_224",
    "deit3_small_patch16_224",
    "eva02_tiny_patch14_224",
    "vit_small_patch16_dinov3",
    "vit_small_patch16_rope_mixed_224",
    "naflexvit_base_patch16_gap",
]
# A method that leaves fewer tokens, and the same with nothing to do.
REDUCING: list[tuple[Method, Method]] = [
    (Prune(0.6, (0, 2), fuse=True), Prune(1.0, (0, 2), fuse=True)),
    (Prune(0.6, (1, 3), fuse=False, by="mean"), Prune(1.0, (1, 3), fuse=False, by="mean")),
    (Merge(3), Merge(0)),
    (Exit(0.2, (0, 2)), Exit(1.0, (0, 2))),
]


def _vit(*changes: Any, **arguments: object) -> nn.Module:
    """Return a small ViT with methods."""
    model = make_model("vit_tiny_patch16_224", **{"depth": 2, "dynamic_img_size": True, **arguments})
    for change in changes:
        mmod.apply_(model, copy.deepcopy(change))
    return model.eval()


def _resnet(method: Method) -> nn.Module:
    """Return a ResNet whose channel selectors are sure of their choice."""
    torch.manual_seed(0)
    model = mmod.apply_(ResNet(BasicBlock, [1, 2, 1, 2], channels=(16, 32, 32, 64), num_classes=5), method).eval()
    with torch.no_grad():
        for block in model.modules():
            if hasattr(block, "selector"):
                block.selector[-1].bias.normal_(std=20)
    return model


EVERY: dict[str, Callable[..., nn.Module]] = {
    "routing": partial(_vit, mmod.RoutingConfig(blocks=(1,))),
    "staged": partial(_vit, Experts(experts=2), mmod.RoutingConfig(router="norm", blocks=(0, 1))),
    "merge": partial(_vit, Merge(3)),
    "merge-mean": partial(_vit, Merge(3), global_pool="avg"),
    "prune": partial(_vit, Prune(0.6, (0, 1), fuse=False)),
    "prune-fused": partial(_vit, Prune(0.6, (0, 1))),
    "prune-mean": partial(_vit, Prune(0.6, (0,), by="mean"), global_pool="avg"),
    "prune-whole": partial(_vit, Prune(0.6, (0,)), global_pool=""),
    "exit": partial(_vit, Exit(0.2, (0,))),
    "experts": partial(_vit, Experts(experts=2, idle=1, capacity=0.5)),
    "experts-tokens": partial(_vit, Experts(experts=2, choice="tokens", normalize=True)),
    "experts-unlimited": partial(_vit, Experts(experts=2, choice="tokens", capacity=None)),
    "recursions": partial(_vit, Recursions(recursions=2, first=0, last=0)),
    "recursions-first": partial(_vit, Recursions(recursions=2, first=0, last=0, keys="first")),
    "recursions-tokens": partial(_vit, Recursions(recursions=2, first=0, last=0, choice="tokens")),
    "resize": partial(_vit, Resize(32)),
    "channels": partial(_resnet, Channels(divisor=8)),
    "channels-own": partial(_resnet, Channels(divisor=8, into="own", adds="change")),
}
"""A small model with every method, and with options that take another path."""
