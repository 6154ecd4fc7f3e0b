"""A score of pixels for the image tokens of a language model: the largest of the patches that a token is made of.

Axes: B samples, I images or frames, N tokens of a prompt or patches of an image, T image tokens, R rows and C columns
of patches, H channels of a pixel, E pixels of a patch, Y rows and X columns of pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmod.adapters.base import BlockStack
from mmod.adapters.transformers.images import KINDS, pixels_of
from mmod.adapters.transformers.tower import TowerReader, by_square, scatter_values, side_of
from mmod.blocks import Arguments, ModelHook, RowSource, check_pixels, cut_patches
from mmod.blocks.record import recomputing
from mmod.config import Score
from mmod.ops import FIRST
from mmod.threads import PerThread


class PixelsHook(ModelHook):
    """Hook of the patch embedding: notes the pixels of each patch (I, R, C, H, E)."""

    def __init__(self, noted: PerThread[list[Tensor]]) -> None:
        self.noted = noted

    def after(self, module: Any, args: tuple[Any, ...], kwargs: Arguments, output: Any) -> None:
        """Note the pixels; there is no output of a call that failed."""
        if output is None or recomputing():
            return
        (image_IHYX,) = args or kwargs.values()
        self.noted.value.append(cut_patches(module, image_IHYX.detach()))


class TowerPixels(TowerReader):
    """The largest score of the patches that an image token is made of, by a score of their pixels.

    Raises:
        ValueError: See `TowerReader`, or patches have no pixels of their own.
    """

    def __init__(self, entry: Any, stack: BlockStack, score: Score) -> None:
        super().__init__(entry, stack, f"router={score.name!r}", FIRST)
        source = stack.grid
        if source is None:
            raise ValueError(
                f"{self.option} needs patches whose row and column in the image are known: the tower of a "
                f"{type(entry).__name__} shows no rows and columns of patches, as where images of several sizes are "
                "one sequence"
            )
        check_pixels(source, score, stack.names[0])
        self.score = score
        self.source = source
        self.pixels = PixelsHook(self.noted)

    @property
    def hooks(self) -> list[tuple[nn.Module, ModelHook]]:
        """All hooks that it needs, with their modules."""
        return [*super().hooks, (self.source.module, self.pixels)]

    @torch.no_grad()
    def _values(self, calls: list[Tensor], tokens: int, grids: Tensor | None) -> Tensor:
        side = side_of(sum(pixels_IRCHE.shape[:3].numel() for pixels_IRCHE in calls), tokens)
        return torch.cat([best_of_squares(self.score, pixels_IRCHE, side, self.source.std) for pixels_IRCHE in calls])


class RowPixels:
    """The largest score of the patches that an image token is made of, where the model gets each patch as a row."""

    hooks: Sequence[tuple[nn.Module, ModelHook]] = ()
    empty = FIRST

    def __init__(self, source: RowSource, score: Score) -> None:
        self.option = f"router={score.name!r}"
        self.score = score
        self.source = source
        # Refuses an option that does not fit these pictures now, and not in the first pass.
        score.see(torch.zeros(1, 1, 1, source.channels, 1), None)

    @torch.compiler.disable
    @torch.no_grad()
    def values_of(self, entry: nn.Module, kind_BN: Tensor, arguments: Arguments) -> Tensor:
        """Return the scores of image tokens (B, N), the largest at all other tokens, see `TowerReader.values_of`."""
        score_BN = torch.full(kind_BN.shape, FIRST, device=kind_BN.device)
        for name, kind in KINDS.items():
            image_BN = kind_BN == kind
            if not bool(image_BN.any()):
                continue
            rows, grids = pixels_of(arguments, name), arguments.get(f"{name}_grid_thw")
            if rows is None or grids is None:
                raise ValueError(f"{self.option} reads the pixels of {name}s: pass them with {name}_grid_thw")
            pictures = self.source.pictures(rows, grids, arguments.get(f"{name}_merge_sizes"))
            score_T = torch.cat(
                [best_of_squares(self.score, pixels, side, None, frames=len(pixels)) for pixels, side in pictures]
            )
            score_BN = torch.where(image_BN, scatter_values(score_T, image_BN, FIRST), score_BN)
        return score_BN


def best_of_squares(
    score: Score, pixels_IRCHE: Tensor, side: int, std: tuple[float, ...] | None, **options: Any
) -> Tensor:
    """Return the largest score of the patches that each token stands for (T)."""
    score_IN, *_ = score.see(pixels_IRCHE, std, side=side, **options)
    return by_square(score_IN.view(pixels_IRCHE.shape[:3]), side).amax(1)
