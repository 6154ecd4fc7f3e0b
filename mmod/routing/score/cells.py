"""A score without parameters: the variance within each cell of the grid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmod.config import Patches, Placement, Score, register_score
from mmod.ops import first_of_cells, group_sizes, mean_rows
from mmod.routing.joiner import Grouping


@register_score("cells")
@dataclass(frozen=True, kw_only=True)
class Cells(Score):
    """Variance within each cell of the grid: with `skipped="merge"`, uniform cells are merged into one token each.

    Consecutive routed blocks share it. Tokens join only the first of their cell.

    Args:
        side: Tokens along a side of a cell.
        width: Tokens in a row of the grid; None takes the model's, and outside a model a square.

    Source: mixed resolution decided from tokens, after Ronen et al., arXiv 2304.00287, who decide from pixels.
    """

    shared: ClassVar[bool] = True
    reads_grid: ClassVar[bool] = True
    side: Annotated[int, "[2, inf)"] = 2
    width: Annotated[int | None, "[1, inf)"] = None

    def make(self, placement: Placement) -> nn.Module:
        """Return the module that scores tokens."""
        return CellScore(placement.prefix, self.side, self.width, placement.patches)


class CellScore(Grouping):
    """Score tokens so that those of uniform cells come last.

    A cell is a square of `side` times `side` tokens of the grid, smaller at the right and lower edges where the grid is
    no multiple of it. Its first token stands for those that join it, and has the score 2, as `prefix` tokens have. Each
    other one has the score v / (1 + v), by the variance v of the cell's tokens, a mean over tokens and channels.

    Example:
        >>> CellScore()(torch.tensor([[[1.0], [1.0], [5.0], [7.0]]])).shape, CellScore().first(16, torch.device("cpu"))
        (torch.Size([1, 4]), tensor([ 0,  0,  2,  2,  0,  0,  2,  2,  8,  8, 10, 10,  8,  8, 10, 10]))
    """

    def __init__(
        self,
        prefix: int = 0,
        side: int = 2,
        width: int | None = None,
        patches: Callable[[], Patches] | None = None,
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self.side = side
        self.width = width
        self.patches = patches

    def forward(self, x_BND: Tensor, valid_BN: Tensor | None = None) -> Tensor:
        """Return the scores (B, N) for tokens (B, N, D)."""
        if valid_BN is not None:
            raise ValueError(
                "router 'cells' needs a full grid of tokens in every image; some of these are padding or text"
            )
        images, tokens = x_BND.shape[:2]
        first_N = self.first(tokens, x_BND.device)[self.prefix :] - self.prefix
        with torch.no_grad():
            grid_BND = x_BND[:, self.prefix :].float()
            first_BN = first_N.expand(images, -1)
            count_BN = group_sizes(first_BN, len(first_N))
            # Means stand in the rows of the first tokens of cells, from which all of a cell read them.
            mean_BND = mean_rows(grid_BND, first_BN, count_BN, all_join=True)
            apart_BND = grid_BND - mean_BND[:, first_N]
            apart_BN = apart_BND.square().mean(dim=-1)
            sum_BN = torch.zeros_like(apart_BN).scatter_add(1, first_BN, apart_BN)
            variance_BN = (sum_BN / count_BN.clamp(min=1))[:, first_N]
            leads_N = first_N == torch.arange(len(first_N), device=first_N.device)
            score_BN = torch.where(leads_N, 2.0, variance_BN / (1 + variance_BN))
            return F.pad(score_BN, (self.prefix, 0), value=2.0)

    def groups(self, tokens: int) -> int:
        """Return the number of cells and leading tokens."""
        rows, width = self._grid(tokens)
        return self.prefix + -(-rows // self.side) * -(-width // self.side)

    def leaders(self, keep_BN: Tensor) -> Tensor:
        """Return the first token of its cell for each token that is not kept (B, N)."""
        token_N = torch.arange(keep_BN.shape[1], device=keep_BN.device)
        return torch.where(keep_BN, token_N, self.first(keep_BN.shape[1], keep_BN.device))

    def first(self, tokens: int, device: torch.device) -> Tensor:
        """Return the first token of each token's cell (N,), itself for leading tokens."""
        leading = torch.arange(self.prefix, device=device)
        return torch.cat([leading, first_of_cells(self._grid(tokens), self.side, device) + self.prefix])

    def _grid(self, tokens: int) -> tuple[int, int]:
        """Return rows and columns of the tokens after the prefix: the model's grid, or outside a model a square."""
        patches = tokens - self.prefix
        grid = None
        if self.patches is not None:
            grid = self.patches().grid
        if grid is None and self.width is not None:
            grid = patches // self.width, self.width
        elif self.patches is None:
            grid = isqrt(patches), isqrt(patches)
        if grid is None or grid[0] * grid[1] != patches or self.width not in (None, grid[1]):
            width = ""
            if self.width is not None:
                width = f" at router.width={self.width}"
            raise ValueError(
                f"router 'cells' needs all {patches} patches in rows and columns{width}, and the grid is {grid}: run "
                "the whole model on images of one size, without patch dropout or what else removes tokens"
            )
        return grid
