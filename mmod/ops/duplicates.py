"""Patches whose pixels another patch of the same picture shows already.

Axes: B pictures, R rows and C columns of patches, N = R * C patches, H channels of a pixel, E pixels of a patch, V
videos, P patches of a video, D patches of a diagonal.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

# More than any difference of pixels, in grey levels of 255.
FIRST = 256.0


class Duplicates(NamedTuple):
    """For each patch of some pictures, the equal patch that is computed in its place.

    A patch is compared with those that are computed for its left, its upper and its upper-left neighbour.

    Args:
        difference_BN: Largest difference of any channel and pixel to the most similar of the three, in grey levels of
            255; `FIRST` for the first patch of a cell, which is always computed.
        stands_BN: Index of the patch that is computed in its place; its own where none is similar enough.
        first_BN: Index of the first patch of its cell.
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
    pixels_VPHE = pixels_BRCHE.unflatten(0, (-1, frames)).flatten(1, 3)
    device = pixels_VPHE.device
    patch_P = torch.arange(frames * rows * columns, device=device)
    # Where each patch is in its cell.
    frame_P = patch_P // (rows * columns)
    row_P = patch_P // columns % rows % height
    column_P = patch_P % columns % width
    place_3P = torch.stack([frame_P, row_P, column_P])
    # By diagonals, since a patch may stand for what its left and upper neighbours stand for, which must be known.
    sizes = _diagonals((rows, columns), (frames, height, width))
    _, *diagonals = place_3P.sum(dim=0).argsort().split(sizes)
    stands_VP = patch_P.repeat(pixels_VPHE.shape[0], 1)
    difference_VP = torch.full(stands_VP.shape, FIRST, device=device)
    limit = alike_below(tolerance)
    for patch_D in diagonals:
        place_3D = place_3P[:, patch_D]
        least_VD, joined_VD = _most_similar(pixels_VPHE, stands_VP, patch_D, place_3D, (rows, columns), levels_H)
        stands_VD = torch.where(least_VD <= limit, joined_VD, patch_D)
        stands_VP = stands_VP.index_copy(1, patch_D, stands_VD)
        # Below FIRST, which marks the first patch of a cell alone.
        difference_VP = difference_VP.index_copy(1, patch_D, least_VD.clamp(max=FIRST - 1))
    first_N = first_of_cells((rows, columns), cell, device)
    shape = (pixels_BRCHE.shape[0], rows * columns)
    return Duplicates(difference_VP.view(shape), stands_VP.view(shape), first_N.expand(shape))


def _diagonals(grid: tuple[int, int], sides: tuple[int, int, int]) -> list[int]:
    """Return how many patches have the same sum of frame, row and column in their cell, by that sum.

    Args:
        grid: Rows and columns of all patches.
        sides: Frames, rows and columns of a cell.
    """
    frames, height, width = sides
    of_frame = []
    for diagonal in range(height + width - 1):
        size = 0
        for row in range(max(0, diagonal - width + 1), min(height, diagonal + 1)):
            # Of cells that have such a patch: those at the lower and right edges may be smaller.
            down = -(-(grid[0] - row) // height)
            across = -(-(grid[1] - diagonal + row) // width)
            size += down * across
        of_frame.append(size)
    # Each frame of a cell is one diagonal behind the frame before.
    return [sum(of_frame[max(0, last - frames + 1) : last + 1]) for last in range(frames + height + width - 2)]


def _most_similar(
    pixels_VPHE: Tensor,
    stands_VP: Tensor,
    patch_D: Tensor,
    place_3D: Tensor,
    grid: tuple[int, int],
    levels_H: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the difference of patches to the most similar one that stands for a neighbour, and that one (V, D).

    Args:
        stands_VP: The patch that stands for each, as far as it is known.
        patch_D: The patches.
        place_3D: Their frames, rows and columns in their cell (3, D).
        grid: Rows and columns of all patches.
    """
    rows, columns = grid
    video_V1 = torch.arange(stands_VP.shape[0], device=stands_VP.device).unsqueeze(1)
    begin_V1 = video_V1 * stands_VP.shape[1]
    pixels_VDHE = pixels_VPHE.index_select(1, patch_D).float()
    joined_VD = stands_VP[:, patch_D]
    least_VD = torch.full(joined_VD.shape, inf, device=joined_VD.device)
    # Of a picture, which is one frame, none comes before.
    neighbours = _BESIDE if stands_VP.shape[1] == rows * columns else _BESIDE + _BEFORE
    for back, up, left in neighbours:
        distance = (back * rows + up) * columns + left
        other_VD = stands_VP[:, (patch_D - distance).clamp(min=0)]
        row_T = (begin_V1 + other_VD).flatten()
        other_VDHE = pixels_VPHE.flatten(0, 1).index_select(0, row_T).view_as(pixels_VDHE)
        apart_VDH = (pixels_VDHE - other_VDHE.float()).abs().amax(dim=-1)
        # A patch with NaN is like no other.
        apart_VD = (apart_VDH * levels_H).amax(dim=-1).nan_to_num(nan=inf)
        # The first frame, row and column of a cell have fewer neighbours.
        is_outside_D = (place_3D[0] < back) | (place_3D[1] < up) | (place_3D[2] < left)
        apart_VD = apart_VD.masked_fill(is_outside_D, inf)
        # Strictly less: of equal neighbours the first of the list wins.
        joined_VD = torch.where(apart_VD < least_VD, other_VD, joined_VD)
        least_VD = torch.minimum(least_VD, apart_VD)
    return least_VD, joined_VD
