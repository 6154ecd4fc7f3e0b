"""A score without parameters: how far the pixels of a patch are from those of a patch that is kept for it.

Axes: B images, N tokens, R rows and C columns of patches, H channels, E pixels of a patch, D channels of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmod.config import Patches, Placement, Score, register_score
from mmod.ops import FIRST, Duplicates, find_duplicates
from mmod.ops.duplicates import alike_below, cell_sides
from mmod.routing.joiner import Grouping


@register_score("duplicate")
@dataclass(frozen=True, kw_only=True)
class Duplicate(Score):
    """The difference of a patch's pixels to a patch that is kept for it, in grey levels of 255.

    Consecutive routed blocks share it. A patch is compared with the patches that are kept for its left, its upper and
    its upper-left neighbour in its cell, and joins the most similar one. With `select="threshold"`, at any threshold in
    (0, 1], patches that differ by at most `tolerance` are skipped. Top-k keeps the patches that differ most.

    In a language model the same holds of image tokens. One that is made of several patches has the largest of their
    differences, so that it is skipped only if all of them are duplicates. Text is never skipped. In a video that comes
    with `video_grid_thw`, a patch is also compared with the one that is kept for its position one frame earlier.

    Args:
        tolerance: Largest difference of a channel at which patches are duplicates, in grey levels of 255: 0 for equal
            pixels alone, and below 0 for no duplicates.
        cell: Patches along a side of a cell, of which at least one is kept; None for the whole image. The smaller, the
            nearer is the patch that a skipped one joins. Where s x s patches become a token of a language model, cells
            are of whole tokens: their side is `cell` rounded up to a multiple of s, and 2 s at least.
        std: What pixels in [0, 1] were divided by when they were normalised, one number or one for each channel, as the
            image processor says. None takes the model's. A tolerance above 0 needs it; without it, patches that differ
            are ranked by the pixels that the model gets.

    Source: PixelPrune, arXiv 2604.00886, which drops patches with the pixels of a neighbour; cells are this library's.
    """

    shared: ClassVar[bool] = True
    reads_grid: ClassVar[bool] = True
    reads_pixels: ClassVar[bool] = True
    tolerance: Annotated[float, "(-inf, 255]"] = 0.0
    cell: Annotated[int | None, "[2, inf)"] = 4
    std: Annotated[float | tuple[float, ...] | None, "(0, 1]"] = None

    def make(self, placement: Placement) -> nn.Module:
        """Return the module that scores tokens."""
        return DuplicateScore(placement.prefix, self.cell, placement.patches)

    def see(self, pixels_BRCHE: Tensor, std: tuple[float, ...] | None, frames: int = 1, side: int = 1) -> Duplicates:
        """Return which patch stands for each patch, see `find_duplicates`.

        Args:
            side: Patches along a side of the square that a token stands for.
        """
        channels = pixels_BRCHE.shape[3]
        by_channel = self.std
        if by_channel is None and std is not None and len(std) == channels:
            # One of other channels is not what these pixels were divided by.
            by_channel = std
        if by_channel is None and self.tolerance > 0:
            raise ValueError(
                f"router.tolerance={self.tolerance} is in grey levels, and the model does not say what its pixels were "
                "divided by: set router.std to the image_std of its image processor, as to (0.229, 0.224, 0.225)"
            )
        if isinstance(by_channel, tuple) and len(by_channel) != channels:
            raise ValueError(f"router.std must be one number, or one for each of {channels} channels, got {by_channel}")
        if by_channel is None:
            # Equal pixels are equal on any scale.
            by_channel = 1 / 255
        scale = 255 * torch.tensor(by_channel, device=pixels_BRCHE.device).expand(channels)
        cell = None
        if self.cell is not None:
            # The first patch of a cell stays, so a cell of one token would keep it.
            cell = side * max(2, -(-self.cell // side))
        return find_duplicates(pixels_BRCHE, self.tolerance, cell, scale, frames)

    def normalised(self, score_BN: Tensor, valid_BN: Tensor | None = None) -> Tensor:
        """Return 1 for patches that are no duplicates, and less than 0.5 for others, by their difference (B, N)."""
        return torch.where(score_BN > alike_below(self.tolerance), 1.0, score_BN / (2 * FIRST))


class DuplicateScore(Grouping):
    """Score patches by `find_duplicates`, whose result a pass has before its first block.

    Leading tokens, which are no patches, have the largest score.
    """

    def __init__(self, prefix: int, cell: int | None, patches: Callable[[], Patches] | None) -> None:
        super().__init__()
        self.prefix = prefix
        self.cell = cell
        self.patches = patches

    def forward(self, x_BND: Tensor, valid_BN: Tensor | None = None) -> Tensor:
        """Return the scores (B, N) for tokens (B, N, D)."""
        seen = self._seen()
        images, tokens = x_BND.shape[:2]
        if seen.difference_BN.shape != (images, tokens - self.prefix):
            raise ValueError(
                f"router 'duplicate' has seen the pixels of {tuple(seen.difference_BN.shape)} (images, patches), and "
                f"the block got {images} images of {tokens} tokens, {self.prefix} of which are no patches: patch "
                "dropout or another method removed some, or images were joined. Run the whole model, with "
                "patch_drop_rate=0"
            )
        return F.pad(seen.difference_BN.to(x_BND.device), (self.prefix, 0), value=FIRST)

    def groups(self, tokens: int) -> int:
        """Return the number of cells and leading tokens; where pictures differ in size, those of the smallest."""
        grid = self._patches().grid
        if grid is not None:
            height, width = cell_sides(grid, self.cell)
            down = -(-grid[0] // height)
            across = -(-grid[1] // width)
            return self.prefix + down * across
        seen = self._seen()
        begins_BN = seen.difference_BN == FIRST
        return self.prefix + int(begins_BN.sum(dim=1).amin())

    def leaders(self, keep_BN: Tensor) -> Tensor:
        """Return the patch that stands for each, or the first of the cell where that one is not kept (B, N)."""
        seen = self._seen()
        token_N = torch.arange(keep_BN.shape[1], device=keep_BN.device)
        leading_BN = token_N[: self.prefix].expand(keep_BN.shape[0], -1)
        # Their numbers are those of patches, before which leading tokens stand.
        stands_BN = torch.cat([leading_BN, seen.stands_BN.to(keep_BN.device) + self.prefix], dim=1)
        first_BN = torch.cat([leading_BN, seen.first_BN.to(keep_BN.device) + self.prefix], dim=1)
        joined_BN = torch.where(keep_BN.gather(1, stands_BN), stands_BN, first_BN)
        return torch.where(keep_BN, token_N, joined_BN)

    def _patches(self) -> Patches:
        """Return what is known of the patches of the running pass, of which nothing is known outside a model."""
        if self.patches is None:
            return Patches()
        return self.patches()

    def _seen(self) -> Duplicates:
        patches = self._patches()
        if patches.seen is None:
            raise ValueError(
                "router 'duplicate' compares the pixels that the patch embedding gets, and knows none of this pass: "
                "run the whole model on images of one size, one batch after the other"
            )
        # A plain tuple where pictures of several sizes were seen one by one.
        return Duplicates(*patches.seen)
