"""What a router's choice depends on, content or position, found by moving the content of images over the patches.

Axes: B images, F tokens of an image that may be skipped, G groups of images, K kinds of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from mmod.analysis.audit.information import KindCounts
from mmod.analysis.statistics import Estimate, pseudo_mean


@dataclass(frozen=True)
class Influence:
    """How much of a router's choice its content and its position decide, each alone.

    Each image is judged twice, rolled by whole patches drawn at random, so that all content is equally likely at every
    place, whatever the data. What neither decides is left to both together, to other patches or to chance.

    Args:
        content: Share of the variance of being kept that a patch's content explains wherever it stands, in [0, 1].
        position: Share that its position explains whatever stands there, in [0, 1].
        position_share: Position over the sum of both.

    Source: Sobol', Mathematics and Computers in Simulation 55 (2001): first-order indices, that of content from pairs
    that share it alone.
    """

    images: int
    content: Estimate
    position: Estimate
    position_share: Estimate

    def __str__(self) -> str:
        content, position = (100 * share for share in (self.content, self.position))
        return (
            f"where images are rolled by whole patches, content decides {content:.0f} % of what is kept and position "
            f"{position:.0f} %"
        )


class InfluenceCounts:
    """Counts of which patches are kept where the content of images is moved; they do not grow with the images."""

    def __init__(self) -> None:
        self._images = 0
        self._grid: tuple[int, int] | None = None
        # By decision: by place, and by whether the same content was kept at another place.
        self._counts: dict[str, tuple[KindCounts, KindCounts]] = {}

    def add(
        self,
        batch: Any,
        decide: Callable[[Any], Mapping[str, Tensor]],
        grid: tuple[int, int],
        images: range,
    ) -> None:
        """Roll the images of a batch twice and count the kept patches; `decide` returns what a pass keeps (B, F)."""
        if math.prod(grid) < 2:
            return
        # Two different places for all content, so that what stays in place is not taken for what stays with content.
        places = [np.random.default_rng((image,)).choice(math.prod(grid), 2, replace=False) for image in images]
        shifts = torch.from_numpy(np.stack(np.unravel_index(np.stack(places, axis=1), grid), axis=-1))
        rolled = [roll_patches(batch, shift_B2, grid) for shift_B2 in shifts]
        self._grid = self._grid or grid
        if grid != self._grid or any(moved is None for moved in rolled):
            return
        first, second = map(decide, rolled)
        self._images += len(images)
        for name in first:
            by_place, again = self._counts.setdefault(name, (KindCounts(), KindCounts()))
            kept = [keeps[name].cpu() for keeps in (first, second)]
            free_BF = torch.ones_like(kept[0])
            for keep_BF in kept:
                by_place.add(torch.arange(keep_BF.shape[1]).expand(keep_BF.shape), keep_BF, free_BF, images)
            was_BF, is_BF = (_rolled_back(*pair, grid) for pair in zip(kept, shifts))
            again.add(was_BF.long(), is_BF, free_BF, images)

    def result(self) -> Influence | None:
        """Return what decides, the mean over decisions; None where nothing was moved."""
        if not self._counts:
            return None
        content_G, position_G = torch.stack([_shares(*counts) for counts in self._counts.values()]).mean(0)
        both_G = position_G + content_G
        share_G = torch.where(both_G > 0, position_G / both_G, 0.0)
        estimates = (pseudo_mean(float(share[0]), share[1:]) for share in (content_G, position_G, share_G))
        return Influence(self._images, *estimates)

    def state(self) -> dict[str, Any]:
        """Return the counts as plain values and arrays."""
        counts = {name: [kinds.counts_G2K.numpy() for kinds in both] for name, both in self._counts.items()}
        return {"images": self._images, "grid": self._grid, "counts": counts}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from counts."""
        self._images, grid = state["images"], state["grid"]
        self._grid = grid and (grid[0], grid[1])
        self._counts = {
            name: (KindCounts(counts=places), KindCounts(counts=again))
            for name, (places, again) in state["counts"].items()
        }


def roll_patches(batch: Any, shift_B2: Tensor, grid: tuple[int, int]) -> Any:
    """Return a batch whose images are rolled by whole patches; None where it has none that the grid divides."""
    is_rolled = False

    def move(value: Any) -> Any:
        nonlocal is_rolled
        if not isinstance(value, Tensor) or value.ndim != 4 or not value.is_floating_point():
            return value
        sides = value.shape[2:]
        if len(value) != len(shift_B2) or any(side % count for side, count in zip(sides, grid)):
            return value
        is_rolled = True
        steps = [
            [int(shift) * side // count for shift, side, count in zip(shift_2, sides, grid)] for shift_2 in shift_B2
        ]
        return torch.stack([image.roll(step, (1, 2)) for image, step in zip(value, steps)])

    moved = tree_map(move, batch)
    return moved if is_rolled else None


def _rolled_back(keep_BF: Tensor, shift_B2: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return what is kept by the place where its content was before (B, F)."""
    maps = zip(keep_BF.unflatten(1, grid), (-shift_B2).tolist())
    return torch.stack([keep.roll(shift, (0, 1)).flatten() for keep, shift in maps])


def _left_out(counts: KindCounts) -> Tensor:
    """Return the counts of all images, and then those without each group of them (1 + G, 2, K)."""
    counts_G2K = counts.counts_G2K
    total_2K, filled_G = counts_G2K.sum(0), counts_G2K[:, 1].sum(1) > 0
    return torch.cat([total_2K[None], total_2K - counts_G2K[filled_G]])


def _shares(places: KindCounts, again: KindCounts) -> Tensor:
    """Return the shares of content and of position, of all images and without each group of them (2, 1 + G)."""
    position_G = _of_position(_left_out(places))
    # A position that counts is never the same twice, which lowers what content seems to decide.
    return torch.stack([_of_content(_left_out(again)) + position_G / (places.counts_G2K.shape[2] - 1), position_G])


def _of_content(counts_G2K: Tensor) -> Tensor:
    """Return how much more often content is kept that was kept elsewhere, than content that was not (G)."""
    kept_GK, there_GK = counts_G2K.unbind(1)
    share_GK = kept_GK / there_GK.clamp(min=1)
    return torch.where((there_GK > 0).all(1), share_GK[:, -1] - share_GK[:, 0], 0.0)


def _of_position(counts_G2K: Tensor) -> Tensor:
    """Return the share of the variance of being kept that lies between places (G)."""
    kept_GK, there_GK = counts_G2K.unbind(1)
    mean_G1 = kept_GK.sum(1, keepdim=True) / there_GK.sum(1, keepdim=True)
    between_G = (there_GK * (kept_GK / there_GK.clamp(min=1) - mean_G1).square()).sum(1) / there_GK.sum(1)
    variance_G = (mean_G1 * (1 - mean_G1)).squeeze(1)
    return torch.where(variance_G > 0, between_G / variance_G, 0.0)
