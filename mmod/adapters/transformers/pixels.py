"""A score of pixels for the image tokens of a language model: the largest of the patches that a token is made of.

Axes: I images or frames, N patches of an image, T image tokens, R rows and C columns of patches, H channels of a pixel,
E pixels of a patch, Y rows and X columns of pixels.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmod.adapters.base import BlockStack
from mmod.adapters.transformers.tower import TowerReader, by_square, side_of
from mmod.blocks import Arguments, ModelHook, check_pixels, cut_patches, parameters_of
from mmod.blocks.record import recomputing
from mmod.config import Score
from mmod.ops import FIRST


class TowerPixels(TowerReader):
    """The largest score of the patches that an image token is made of, by a score of their pixels.

    What it notes are pixels of patches (I, R, C, H, E), and the side of the squares that tokens stand for, if the tower
    gets patches as rows; a video is then one of these.

    Raises:
        ValueError: See `TowerReader`, or patches have no pixels of their own.
    """

    def __init__(self, entry: Any, stack: BlockStack, score: Score) -> None:
        super().__init__(entry, stack, f"router={score.name!r}", FIRST)
        self.score = score
        source = stack.rows or stack.grid
        if source is None:
            raise ValueError(
                f"{self.option} needs patches whose row and column in the image are known: the tower of a "
                f"{type(entry).__name__} shows no rows and columns of patches, as where images of several sizes are "
                "one sequence"
            )
        check_pixels(source, score, stack.names[0])
        self.source = source.module
        self.std = None if stack.grid is None else stack.grid.std

    @property
    def hooks(self) -> list[tuple[nn.Module, ModelHook]]:
        """All hooks that it needs, with their modules."""
        note = partial(self.note, tuple(parameters_of(self.source)))
        return [*super().hooks, (self.source, ModelHook(note))]

    def note(self, names: tuple[str, ...], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the pixels that the tower, or its patch embedding, gets among other arguments."""
        if recomputing():
            return
        arguments = {**dict(zip(names, args)), **kwargs}
        given = arguments[names[0]].detach()
        rows = self.stack.rows
        if rows is None:
            self.noted.value.append((cut_patches(self.source, given), 0))  # type: ignore[arg-type]
        else:
            self.noted.value += rows.pictures(given, arguments["grid_thw"], arguments.get("merge_sizes"))

    @torch.no_grad()
    def _values(self, calls: list[tuple[Tensor, int]], tokens: int, names: list[str], arguments: Arguments) -> Tensor:
        common = 0
        # Tokens of each image that stand for a prefix token, whose value is that of tokens without pixels.
        others = 0
        if self.stack.rows is None:
            others = self.stack.prefix - self.first
            images = sum(len(pixels_IRCHE) for pixels_IRCHE, _ in calls)
            patches = sum(pixels_IRCHE.shape[:3].numel() for pixels_IRCHE, _ in calls)
            common = side_of(patches, tokens - images * others)
        values = []
        for pixels_IRCHE, side in calls:
            frames = len(pixels_IRCHE) if side else 1
            score_IN, *_ = self.score.see(pixels_IRCHE, self.std, frames=frames, side=side or common)
            value_T = by_square(score_IN.view(pixels_IRCHE.shape[:3]), side or common).amax(1)
            values.append(F.pad(value_T.view(len(pixels_IRCHE), -1), (others, 0), value=FIRST).flatten())
        return torch.cat(values)
