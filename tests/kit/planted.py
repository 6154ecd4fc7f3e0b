"""A small trained backbone on which routers are planted whose nature is known."""

from __future__ import annotations

import copy
import functools

import timm
import torch
from torch import Tensor, nn

import mmod

SIDE, PATCH, CLASSES = 4, 4, 4
TOKENS = SIDE * SIDE
# Objects are more often here, so that a fixed position is worth something.
FAVOURED = (5, 6, 9, 10)


def make_set(images: int, seed: int, favour: float = 0.2) -> tuple[Tensor, Tensor]:
    """Return noise with an object in one patch each, a share `favour` of them in the middle by intent.

    An object shows two patterns, and its class is the sum of their numbers, which no linear map of its patch tells: a
    block must run on it.
    """
    draw = torch.Generator().manual_seed(seed)
    patterns = torch.randn(2, CLASSES, PATCH, PATCH, generator=torch.Generator().manual_seed(7))
    first, second = torch.randint(CLASSES, (2, images), generator=draw)
    place = torch.randint(TOKENS, (images,), generator=draw)
    favoured = torch.tensor(FAVOURED)[torch.randint(len(FAVOURED), (images,), generator=draw)]
    place = torch.where(torch.rand(images, generator=draw) < favour, favoured, place)
    patches = 0.2 * torch.randn(images, TOKENS, PATCH, PATCH, generator=draw)
    patches[torch.arange(images), place] += 2 * (patterns[0, first] + patterns[1, second])
    rows = patches.unflatten(1, (SIDE, SIDE)).transpose(2, 3)
    return rows.reshape(images, 1, SIDE * PATCH, SIDE * PATCH), (first + second) % CLASSES


def batches_of(images: int, seed: int, size: int = 200, favour: float = 0.2) -> list[tuple[Tensor, Tensor]]:
    data = make_set(images, seed, favour)
    return list(zip(*(part.split(size) for part in data)))


@functools.lru_cache
def _backbone() -> nn.Module:
    """Return a ViT that was trained with the router "content", so that every seed and machine gives it worth."""
    torch.manual_seed(0)
    arguments = {"img_size": SIDE * PATCH, "patch_size": PATCH, "in_chans": 1, "num_classes": CLASSES}
    model = timm.create_model(
        "vit_tiny_patch16_224", embed_dim=32, depth=2, num_heads=2, global_pool="avg", **arguments
    )
    optimizer = torch.optim.AdamW(model.parameters(), 6e-3)
    mmod.route_(model, _planted(content)).train()
    for step in range(150):
        images, targets = make_set(64, 1000 + step)
        loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return mmod.unroute_(model).eval()


def _planted(score: object, blocks: tuple[int, ...] = (0, 1), capacity: object = 0.25) -> mmod.RoutingConfig:
    return mmod.RoutingConfig(router=score, gate="identity", blocks=blocks, capacity=capacity)


def plant(score: object, blocks: tuple[int, ...] = (0, 1), capacity: object = 0.25) -> nn.Module:
    """Return the backbone with a router whose score is given; updates are left as they are."""
    return mmod.route_(copy.deepcopy(_backbone()), _planted(score, blocks, capacity))


def content(x_BND: Tensor) -> Tensor:
    """Score tokens by how far they are from the others of their image."""
    return (x_BND - x_BND.mean(dim=1, keepdim=True)).norm(dim=-1)


def position(x_BND: Tensor) -> Tensor:
    """Score the tokens in the middle highest; the class token is the first."""
    score_N = torch.zeros(x_BND.shape[1])
    score_N[[1 + place for place in FAVOURED]] = 1.0
    return score_N.expand(x_BND.shape[:2])


PLANTED = {"content": content, "position": position, "no better than random": "random"}
