"""Ways to make a tower cheaper, as functions from an image to features of its patches.

Axes: B images, N tokens, K rows, D channels.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import mmod
from mmod import RoutingConfig, Threshold
from mmod.methods import Merge, Prune
from mmod.ops import find_duplicates, gather_rows, mean_rows
from scripts.photo_attempts import Forward, embedded, patches_of

DENSE = "dense"
PATCH = 14
TIMED = (
    DENSE,
    "duplicate",
    "duplicate, no cells",
    "gradual, 0.25",
    "redundancy, merged, 0.35",
    "0.5 of the side",
)
"""Rows that are timed on large pictures."""
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


@dataclass(frozen=True)
class Row:
    """One way to run the tower.

    Args:
        make: From the dense model to the forward pass, which returns features of patches (B, N, D).
        pixels: Share of the image's sides that the tower gets.
        kept: From images to the share of their patches that all blocks compute; None if the cost does not depend on it.
    """

    make: Callable[[Any], Forward]
    pixels: float = 1.0
    kept: Callable[[Tensor], float] | None = None


def routed(router: Any, first: int = 1, **options: Any) -> Callable[[Any], Forward]:
    """Return what makes a forward pass that routes all blocks from `first` on, and by default merges tokens."""

    def make(model: Any) -> Forward:
        blocks = tuple(range(first, len(model.blocks)))
        config = RoutingConfig(**{"router": router, "skipped": "merge", "blocks": blocks, **options})
        return patches_of(mmod.route_(copy.deepcopy(model), config))

    return make


def gradual(mean: float) -> Row:
    """Return a row of the preset."""

    def make(model: Any) -> Forward:
        config = mmod.preset("gradual", capacity=mean, depth=len(model.blocks))
        return patches_of(mmod.route_(copy.deepcopy(model), config))

    return Row(make)


def pruned(model: Any) -> Forward:
    """Return pruning to 0.7 of the patches after each quarter of the blocks, as EViT does it."""
    quarters = tuple(math.ceil(len(model.blocks) * quarter / 4) for quarter in (1, 2, 3))
    return patches_of(mmod.apply_(copy.deepcopy(model), Prune(keep=0.7, fuse=False, blocks=quarters)))


def duplicate(skipped: str = "merge", tolerance: float = 0.0, cell: int | None = 4) -> Row:
    """Return a row in which duplicates run through no block."""
    router = mmod.score("duplicate", tolerance=tolerance, cell=cell)

    def kept(images: Tensor) -> float:
        return float(torch.stack([kept_patches(image, tolerance, cell) for image in images]).float().mean())

    return Row(routed(router, 0, skipped=skipped, select=Threshold(0.5)), kept=kept)


def kept_patches(image: Tensor, tolerance: float, cell: int | None) -> Tensor:
    """Return which patches (H, W) of a normalised image (3, height, width) have pixels of their own."""
    patches = image.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).permute(1, 2, 0, 3, 4).flatten(3)
    stands_N = find_duplicates(patches.unsqueeze(0), tolerance, cell, 255 * STD.flatten()).stands_BN[0]
    return (stands_N == torch.arange(len(stands_N))).view(patches.shape[:2])


def mutual_pairs(x_BND: Tensor) -> Tensor:
    """Return the slot of each token (B, N): two that are each other's nearest share one, the first has its own.

    Source: MPM, arXiv 2604.05718, cosines of tokens.
    """
    unit_BND = nn.functional.normalize(x_BND[:, 1:], dim=-1)
    likeness_BNN = unit_BND @ unit_BND.transpose(1, 2)
    likeness_BNN.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
    nearest_BN = likeness_BNN.argmax(dim=2)
    place_N = torch.arange(nearest_BN.shape[1]).expand_as(nearest_BN)
    is_mutual_BN = nearest_BN.gather(1, nearest_BN) == place_N
    leader_BN = torch.where(is_mutual_BN, torch.minimum(place_N, nearest_BN), place_N)
    slot_BN = (leader_BN == place_N).cumsum(1).gather(1, leader_BN)
    return nn.functional.pad(slot_BN, (1, 0))


def by_mutual_pairs(model: Any) -> Forward:
    """Return a forward pass in which mutual nearest pairs are averaged before the third and the sixth block."""

    def forward(images: Tensor) -> Tensor:
        # Images keep different numbers of rows.
        assert len(images) == 1
        x_BKD = embedded(model, images)
        row_of_BN = torch.arange(x_BKD.shape[1]).unsqueeze(0)
        for number, block in enumerate(model.blocks):
            if number in (2, 5):
                slot_BK = mutual_pairs(x_BKD)
                size_BK = torch.zeros(1, int(slot_BK.max()) + 1).scatter_add_(1, slot_BK, torch.ones(slot_BK.shape))
                x_BKD = mean_rows(x_BKD, slot_BK, size_BK, all_join=True)
                row_of_BN = slot_BK.gather(1, row_of_BN)
            x_BKD = block(x_BKD)
        features_BND: Tensor = gather_rows(model.norm(x_BKD), row_of_BN)[:, 1:]
        return features_BND

    return forward


def rows() -> dict[str, Row]:
    """Return every row by name, dense first."""
    table = {
        DENSE: Row(patches_of),
        "duplicate": duplicate(),
        "duplicate, cells of 2": duplicate(cell=2),
        "duplicate, cells of 8": duplicate(cell=8),
        "duplicate, no cells": duplicate(cell=None),
        "duplicate, within 6 of 255": duplicate(tolerance=6.0),
        "duplicate, following": duplicate("follow"),
    }
    table |= {
        "gradual, 0.4": gradual(0.4),
        "gradual, 0.25": gradual(0.25),
        "redundancy, merged, 0.35": Row(routed("redundancy", capacity=0.35)),
        "random, merged, 0.35": Row(routed("random", capacity=0.35)),
        "cells, merged, 0.35": Row(routed("cells", capacity=0.35)),
        "ToMe, 8 % a block": Row(lambda model: by_share(model, 0.08)),
        "pruning, 0.7 in three blocks": Row(pruned),
        "MPM": Row(by_mutual_pairs),
    }
    for share in (0.75, 0.6, 0.5):
        table[f"{share:g} of the side"] = Row(patches_of, share)
    return table


def by_share(model: Any, share: float) -> Forward:
    """Return merging as ToMe does it, of a share of all tokens in every block."""

    def forward(images: Tensor) -> Tensor:
        tokens = images.shape[2] * images.shape[3] // PATCH**2
        if tokens not in made:
            made[tokens] = patches_of(mmod.apply_(copy.deepcopy(model), Merge(r=round(share * tokens))))
        return made[tokens](images)

    made: dict[int, Forward] = {}
    return forward
