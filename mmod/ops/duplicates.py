"""Patches whose pixels another patch of the same picture shows already.

Axes: B pictures, R rows and C columns of patches, N = R * C patches, H channels of a pixel, E pixels of a patch, S
cells, P patches of a cell, D patches of a diagonal.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# More than any difference of pixels, in grey levels of 255.
FIRST = 256.0


class Duplicates(NamedTuple):
    """What stands for the patches of pictures.

    Args:
        difference_BN: Largest difference of a channel, in grey levels of 255. It is that to the most similar of the
            patches that stand for the left, the upper and the upper-left neighbour; `FIRST` at the first of a cell.
        stands_BN: The patch that stands for each, itself where none is similar enough.
        first_BN: The first patch of each patch's cell, which stands for itself.
    """

    difference_BN: Tensor
    stands_BN: Tensor
    first_BN: Tensor


def alike_below(tolerance: float) -> float:
    """Return the difference up to which patches are alike.

    Differences of normalised pixels are exact to a 64th of a grey level; that equal pixels differ by 0 is exact.
    """
    if tolerance <= 0:
        return tolerance
    return tolerance + 1 / 64


def cell_sides(grid: tuple[int, int], cell: int | None) -> tuple[int, int]:
    """Return rows and columns of a cell: squares of `cell` patches a side, or for None the whole grid."""
    if cell is None:
        return grid
    return min(cell, grid[0]), min(cell, grid[1])


def first_of_cells(grid: tuple[int, int], cell: int | None, device: torch.device) -> Tensor:
    """Return the first patch of each patch's cell (N).

    Example:
        >>> first_of_cells((2, 3), 2, torch.device("cpu"))
        tensor([0, 0, 2, 0, 0, 2])
    """
    height, width = cell_sides(grid, cell)
    row_R = torch.arange(grid[0], device=device)
    column_C = torch.arange(grid[1], device=device)
    return ((row_R - row_R % height).unsqueeze(1) * grid[1] + column_C - column_C % width).flatten()


# Frames, rows and columns back to the neighbours whose pixels a patch may have.
_BESIDE = ((0, 0, 1), (0, 1, 0), (0, 1, 1))
_BEFORE = ((1, 0, 0),)


@torch.no_grad()
def find_duplicates(
    pixels_BRCHE: Tensor, tolerance: float, cell: int | None, levels_H: Tensor, frames: int = 1
) -> Duplicates:
    """Return which patch stands for each patch of pictures.

    Each cell is read by itself, from its first patch on. A patch is compared with the patches that stand for its left,
    its upper and its upper-left neighbour. In a video it is also compared with the one that stands for the patch at its
    position one frame earlier. It joins the most similar one, the first of equals, if they differ by at most
    `tolerance`. Otherwise it stands for itself, as the first patch of a cell does, in a video that of the first frame.
    NaN differs from everything.

    Patches of a diagonal do not depend on each other, so that one step serves a diagonal of all cells.

    Args:
        pixels_BRCHE: Pixels of the patches, as a model gets them; a video's frames follow each other.
        tolerance: Grey levels of 255; at 0 patches join equal ones alone, below 0 none.
        cell: Patches along a side of a cell; None for one cell, the picture.
        levels_H: Grey levels of a unit of each channel.
        frames: Frames of each video; 1 for pictures. A patch of a video is numbered among those of all its frames.

    Source: PixelPrune, arXiv 2604.00886, whose patches join a neighbour's with equal pixels; cells, and the comparison
        with the patch that is kept, are this library's.

    Example:
        >>> pixels = torch.tensor([0.0, 0.0, 1.0, 0.0]).view(1, 2, 2, 1, 1)
        >>> find_duplicates(pixels, 0.0, None, torch.tensor([255.0]))[:2]
        (tensor([[256.,   0., 255.,   0.]]), tensor([[0, 0, 2, 0]]))
    """
    rows, columns = pixels_BRCHE.shape[1:3]
    height, width = cell_sides((rows, columns), cell)
    # Cells at the lower and right edges may reach beyond the grid.
    counts = (-(-rows // height), -(-columns // width))
    cells = _Cells((rows, columns), (frames, height, width), counts)
    pixels_SPHE = cells.split(pixels_BRCHE)
    device = pixels_SPHE.device
    stands_SP = torch.arange(pixels_SPHE.shape[1], device=device).repeat(pixels_SPHE.shape[0], 1)
    difference_SP = torch.full(stands_SP.shape, FIRST, device=device)
    limit = alike_below(tolerance)
    # By diagonals, since a patch may stand for what its left and upper neighbours stand for, which must be known.
    for diagonal in range(1, frames + height + width - 2):
        place_3D = _diagonal(diagonal, cells.sides, device)
        frame_D, row_D, column_D = place_3D
        patch_D = (frame_D * height + row_D) * width + column_D
        least_SD, joined_SD = _most_similar(pixels_SPHE, stands_SP, patch_D, place_3D, cells, levels_H)
        stands_SD = torch.where(least_SD <= limit, joined_SD, patch_D)
        stands_SP = stands_SP.index_copy(1, patch_D, stands_SD)
        # Below FIRST, which marks the first patch of a cell alone.
        difference_SP = difference_SP.index_copy(1, patch_D, least_SD.clamp(max=FIRST - 1))
    first_N = first_of_cells((rows, columns), cell, device)
    stands_BN = cells.in_grid(cells.numbers_in_grid(stands_SP))
    return Duplicates(cells.in_grid(difference_SP), stands_BN, first_N.expand(pixels_BRCHE.shape[0], -1))


class _Cells(NamedTuple):
    """The cells of a grid of patches, each a sequence of the patches in its frames, rows and columns.

    Args:
        grid: Rows and columns of patches.
        sides: Frames, rows and columns of patches in a cell.
        counts: Rows and columns of cells.
    """

    grid: tuple[int, int]
    sides: tuple[int, int, int]
    counts: tuple[int, int]

    def split(self, pixels_BRCHE: Tensor) -> Tensor:
        """Return the pixels of the patches of each cell (S, P, H, E)."""
        frames, height, width = self.sides
        down, across = self.counts
        below = down * height - self.grid[0]
        right = across * width - self.grid[1]
        if below or right:
            # Patches added below and at the right are no left or upper neighbour of one in the grid.
            pixels_BRCHE = F.pad(pixels_BRCHE, (0, 0, 0, 0, 0, right, 0, below))
        cells = pixels_BRCHE.unflatten(2, (across, width)).unflatten(1, (down, height)).unflatten(0, (-1, frames))
        # Videos, rows and columns of cells; then frames, rows and columns of patches.
        cells = cells.permute(0, 2, 4, 1, 3, 5, 6, 7)
        return cells.flatten(3, 5).flatten(0, 2)

    def numbers_in_grid(self, patch_SP: Tensor) -> Tensor:
        """Return the numbers in the grid of patches that are numbered in their cells (S, P)."""
        _, height, width = self.sides
        down, across = self.counts
        patch = patch_SP.view(-1, down, across, patch_SP.shape[1])
        frame = patch // (height * width)
        in_frame = patch % (height * width)
        row = in_frame // width + height * torch.arange(down, device=patch.device).view(-1, 1, 1)
        column = in_frame % width + width * torch.arange(across, device=patch.device).view(-1, 1)
        return ((frame * self.grid[0] + row) * self.grid[1] + column).view_as(patch_SP)

    def in_grid(self, value_SP: Tensor) -> Tensor:
        """Return the values of patches in the order of the grid, without those beyond its edges (B, N)."""
        by_cell = value_SP.reshape(-1, *self.counts, *self.sides).permute(0, 3, 1, 4, 2, 5)
        by_row = by_cell.flatten(4, 5).flatten(2, 3).flatten(0, 1)
        return by_row[:, : self.grid[0], : self.grid[1]].flatten(1)


def _most_similar(
    pixels_SPHE: Tensor, stands_SP: Tensor, patch_D: Tensor, place_3D: Tensor, cells: _Cells, levels_H: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the difference of patches to the most similar one that stands for a neighbour, and that one (S, D).

    Args:
        stands_SP: The patch that stands for each, as far as it is known.
        patch_D: Numbers of the patches in their cell.
        place_3D: Their frames, rows and columns (3, D).
    """
    frames, height, width = cells.sides
    cell_S1 = torch.arange(stands_SP.shape[0], device=stands_SP.device).unsqueeze(1)
    begin_S1 = cell_S1 * stands_SP.shape[1]
    pixels_SDHE = pixels_SPHE.index_select(1, patch_D).float()
    joined_SD = stands_SP[:, patch_D]
    least_SD = torch.full(joined_SD.shape, inf, device=joined_SD.device)
    neighbours = _BESIDE if frames == 1 else _BESIDE + _BEFORE
    for back, up, left in neighbours:
        distance = (back * height + up) * width + left
        other_SD = stands_SP[:, (patch_D - distance).clamp(min=0)]
        row_T = (begin_S1 + other_SD).flatten()
        other_SDHE = pixels_SPHE.flatten(0, 1).index_select(0, row_T).view_as(pixels_SDHE)
        apart_SDH = (pixels_SDHE - other_SDHE.float()).abs().amax(dim=-1)
        # A patch with NaN is like no other.
        apart_SD = (apart_SDH * levels_H).amax(dim=-1).nan_to_num(nan=inf)
        # The first frame, row and column of a cell have fewer neighbours.
        is_outside_D = (place_3D[0] < back) | (place_3D[1] < up) | (place_3D[2] < left)
        apart_SD = apart_SD.masked_fill(is_outside_D, inf)
        # Strictly less: of equal neighbours the first of the list wins.
        joined_SD = torch.where(apart_SD < least_SD, other_SD, joined_SD)
        least_SD = torch.minimum(least_SD, apart_SD)
    return least_SD, joined_SD


def _diagonal(diagonal: int, sides: tuple[int, int, int], device: torch.device) -> Tensor:
    """Return frames, rows and columns of the patches of a cell whose sum is the number of a diagonal (3, D)."""
    frames, height, width = sides
    parts: list[tuple[Tensor, Tensor]] = []
    for frame in range(max(0, diagonal - height - width + 2), min(frames, diagonal + 1)):
        rest = diagonal - frame
        row_D = torch.arange(max(0, rest - width + 1), min(height, rest + 1), device=device)
        parts.append((torch.full_like(row_D, frame), row_D))
    frame_D, row_D = (torch.cat(values) for values in zip(*parts))
    return torch.stack([frame_D, row_D, diagonal - frame_D - row_D])
