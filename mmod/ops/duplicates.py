"""Patches whose pixels another patch of the same picture shows already.

Axes: B pictures, R rows and C columns of patches, N = R * C patches, H channels of a pixel, E pixels of a patch, S
cells, P patches of a cell, D patches of a diagonal, F numbers of a patch.
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
        difference_BN: Largest difference of a channel, in grey levels of 255, to the most similar of the patches that
            stand for the left, the upper and the upper-left neighbour; `FIRST` at the first patch of a cell.
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
    return tolerance if tolerance <= 0 else tolerance + 1 / 64


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
    its upper and its upper-left neighbour, and in a video for the patch at its position one frame earlier. It joins the
    most similar one, the first of equals, if they differ by at most `tolerance`. Otherwise it stands for itself, as the
    first patch of a cell does, in a video that of the first frame. NaN differs from everything.

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
    pictures, rows, columns, channels, _ = pixels_BRCHE.shape
    height, width = cell_sides((rows, columns), cell)
    down, across = -(-rows // height), -(-columns // width)
    if down * height != rows or across * width != columns:
        # Patches beyond the lower and right edges are nobody's left or upper neighbour.
        pixels_BRCHE = F.pad(pixels_BRCHE, (0, 0, 0, 0, 0, across * width - columns, 0, down * height - rows))
    cells = pixels_BRCHE.unflatten(2, (across, width)).unflatten(1, (down, height)).unflatten(0, (-1, frames))
    # Videos, rows and columns of cells; then frames, rows and columns of patches: one sequence for each cell.
    pixels_SPF = cells.permute(0, 2, 4, 1, 3, 5, 6, 7).reshape(-1, frames * height * width, *cells.shape[6:]).flatten(2)
    device = pixels_SPF.device
    limit = alike_below(tolerance)
    patches = pixels_SPF.shape[1]
    begin_S1 = torch.arange(pixels_SPF.shape[0], device=device).unsqueeze(1) * patches
    stands_SP = torch.arange(patches, device=device).repeat(pixels_SPF.shape[0], 1)
    difference_SP = torch.full(stands_SP.shape, FIRST, device=device)
    neighbours = _BESIDE if frames == 1 else _BESIDE + _BEFORE
    # By diagonals, since a patch may stand for what its left and upper neighbours stand for, which must be known.
    for diagonal in range(1, frames + height + width - 2):
        frame_D, row_D, column_D = _diagonal(diagonal, (frames, height, width), device)
        patch_D = (frame_D * height + row_D) * width + column_D
        pixels_SDF = pixels_SPF.index_select(1, patch_D).float()
        joined_SD = stands_SP[:, patch_D]
        least_SD = torch.full(joined_SD.shape, inf, device=device)
        for back, up, left in neighbours:
            other_SD = stands_SP[:, (patch_D - (back * height + up) * width - left).clamp(min=0)]
            other_SDF = pixels_SPF.flatten(0, 1).index_select(0, (begin_S1 + other_SD).flatten()).view_as(pixels_SDF)
            apart_SDH = (pixels_SDF - other_SDF.float()).abs().unflatten(2, (channels, -1)).amax(dim=-1)
            # A patch with NaN is like no other.
            apart_SD = (apart_SDH * levels_H).amax(dim=-1).nan_to_num(nan=inf)
            # The first frame, row and column of a cell have fewer neighbours.
            apart_SD = apart_SD.masked_fill((frame_D < back) | (row_D < up) | (column_D < left), inf)
            # Strictly less: of equal neighbours the first of the list wins.
            joined_SD = torch.where(apart_SD < least_SD, other_SD, joined_SD)
            least_SD = torch.minimum(least_SD, apart_SD)
        stands_SP = stands_SP.index_copy(1, patch_D, torch.where(least_SD <= limit, joined_SD, patch_D))
        # Below FIRST, which marks the first patch of a cell alone.
        difference_SP = difference_SP.index_copy(1, patch_D, least_SD.clamp(max=FIRST - 1))
    # From indices in a cell to those in the grid.
    stands = stands_SP.view(-1, down, across, patches)
    frame, index = stands // (height * width), stands % (height * width)
    row = index // width + height * torch.arange(down, device=device).view(-1, 1, 1)
    column = index % width + width * torch.arange(across, device=device).view(-1, 1)

    def in_grid(values: Tensor) -> Tensor:
        by_cell = values.reshape(-1, down, across, frames, height, width).permute(0, 3, 1, 4, 2, 5)
        by_row = by_cell.reshape(pictures, down * height, across * width)
        return by_row[:, :rows, :columns].flatten(1)

    first_N = first_of_cells((rows, columns), cell, device)
    return Duplicates(
        in_grid(difference_SP), in_grid((frame * rows + row) * columns + column), first_N.expand(pictures, -1)
    )


def _diagonal(diagonal: int, sides: tuple[int, int, int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return frames, rows and columns of the patches of a cell whose sum is the number of a diagonal."""
    frames, height, width = sides
    parts: list[tuple[Tensor, Tensor]] = []
    for frame in range(max(0, diagonal - height - width + 2), min(frames, diagonal + 1)):
        rest = diagonal - frame
        row_D = torch.arange(max(0, rest - width + 1), min(height, rest + 1), device=device)
        parts.append((torch.full_like(row_D, frame), row_D))
    frame_D, row_D = (torch.cat(values) for values in zip(*parts))
    return frame_D, row_D, diagonal - frame_D - row_D
