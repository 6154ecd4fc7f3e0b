"""What image tokens get from the patches that they stand for: importance in the vision tower, or a score of pixels.

Axes: I images, P patches of an image with its prefix tokens, Q patches of all images, B samples, N tokens of a prompt,
T image tokens, R rows and C columns of patches, H channels of a pixel, E pixels of a patch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import isqrt
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmod.adapters.base import BlockStack
from mmod.adapters.tokens import remember
from mmod.adapters.transformers.images import KINDS, has_pixels, pixels_of
from mmod.blocks import (
    Arguments,
    ImportanceState,
    ModelHook,
    is_converted,
    make_importance,
    picture_sizes,
)
from mmod.blocks.record import recomputing
from mmod.config import Score
from mmod.ops import FIRST
from mmod.threads import PerThread

# Types of models whose image tokens stand for squares of patches, from left to right and from top to bottom. Where a
# tower gets patches as rows, those of a token follow each other.
IN_SQUARES = (
    *("aya_vision", "cohere2_vision", "deepseek_vl", "gemma3", "idefics3", "internvl", "janus", "llava", "ovis2"),
    *("paligemma", "perception_lm", "qianfan_ocr", "smolvlm", "vipllava"),
)


class TowerReader:
    """What image tokens get from the patches that they stand for, as it was noted of these in the vision tower.

    Its `hooks` drop what no layer has read, as after a pass that failed.

    Args:
        entry: The module that puts image features among the embedded tokens.
        stack: The layers of its tower.
        option: The option that asks for it.
        empty: The value of tokens without patches.
        of_patches: Returns the value of each token (T) from those of its patches (T, E).

    Raises:
        ValueError: Image tokens do not stand for squares of patches.
    """

    # Tokens of each image that stand for a prefix token, which has no patch.
    others = 0

    def __init__(
        self, entry: Any, stack: BlockStack, option: str, empty: float, of_patches: Callable[[Tensor], Tensor]
    ) -> None:
        self.entry: nn.Module = entry
        self.of_patches = of_patches
        self.option = option
        self.empty = empty
        self.stack = stack
        # A config of one's own, with a name of its own, is that of the class that it extends.
        model_types = {getattr(kind, "model_type", None) for kind in type(entry.config).__mro__}
        if stack.rows is None and model_types.isdisjoint(IN_SQUARES):
            raise ValueError(
                f"{option} needs image tokens that stand for squares of patches, which is not known of a "
                f"{type(entry).__name__} with model_type={entry.config.model_type!r}: supported are towers that get "
                f"patches as rows, as in Qwen-VL, configs with model_type {', '.join(IN_SQUARES)}, and config classes "
                "that extend these. Choose another score, such as router='stride', which keeps evenly spread tokens"
            )
        # Features begin with all tokens of a tower, or without the first; else with the first patch.
        strategy = getattr(entry.config, "vision_feature_select_strategy", "")
        self.first = {"full": 0, "default": 1}.get(strategy, stack.prefix)
        self.noted: PerThread[list[object]] = PerThread(list)

    @property
    def hooks(self) -> list[tuple[nn.Module, ModelHook]]:
        """All hooks that it needs, with their modules."""
        return [(self.entry, ModelHook(self.drop_before, self.drop_behind))]

    def drop_before(self, module: nn.Module, arguments: Arguments) -> None:
        """Drop what was noted before, if this call runs the tower; `generate` may run it before any pass."""
        if has_pixels(arguments):
            self.forget()

    def drop_behind(self, module: nn.Module, arguments: Arguments, output: object) -> None:
        """Drop what was noted, after a call."""
        self.forget()

    def forget(self) -> None:
        """Drop what was noted."""
        self.noted.value.clear()

    @torch.compiler.disable
    def values_of(self, entry: nn.Module, kind_BN: Tensor, arguments: Arguments) -> Tensor:
        """Return the values of image tokens (B, N), the empty one at all other tokens.

        Args:
            kind_BN: The modality of every token that may be skipped, 0 of others (B, N).
            arguments: Arguments of the model that describe the images.

        Raises:
            ValueError: The tower did not process the images in this call, or they have another number of tokens.
        """
        calls = list(self.noted.value)
        self.forget()
        names = [name for name in KINDS if pixels_of(arguments, name) is not None]
        if not names:
            raise ValueError(
                f"{self.option} needs the tower to process the images: pass pixel_values. A model that drafts for "
                "another one gets features alone, and is routed by another score"
            )
        if not calls:
            raise ValueError(f"{self.option} reads {self.stack.names[0]}, which did not process the {names[0]}s")
        if len(names) > 1 and self.stack.rows is None:
            raise ValueError(
                f"{self.option} reads images or videos: this call has both. Pass them in calls of their own, or choose "
                "a score that reads no pixels and no tower, such as router='stride'"
            )
        masks = [kind_BN == KINDS[name] for name in names]
        counts = [int(mask_BN.sum()) for mask_BN in masks]
        values = []
        for value_IRC, side in self._maps(calls, sum(counts), names, arguments):
            value_IT = self.of_patches(by_square(value_IRC, side)).view(len(value_IRC), -1)
            values.append(F.pad(value_IT, (self.others, 0), value=self.empty).flatten())
        value_T = torch.cat(values)
        if sum(counts) != len(value_T):
            raise ValueError(
                f"the images of this call have {len(value_T)} image tokens, the prompts have {sum(counts)}"
            )
        value_BN = torch.full(kind_BN.shape, self.empty, dtype=value_T.dtype, device=kind_BN.device)
        for mask_BN, part_T in zip(masks, value_T.to(kind_BN.device).split(counts), strict=True):
            value_BN = value_BN.masked_scatter(mask_BN, part_T)
        return value_BN

    def _maps(self, calls: list[Any], tokens: int, names: list[str], arguments: Arguments) -> list[tuple[Tensor, int]]:
        """Return the values that were noted, by row and column (I, R, C), each with the side of its tokens.

        Args:
            tokens: Image tokens in the prompts.
            names: What they are of, "image" or "video"; both only where the tower gets patches as rows.
            arguments: Arguments of the model that describe these.
        """
        raise NotImplementedError


def side_of(patches: int, tokens: int) -> int:
    """Return how many patches wide the square is that each image token stands for.

    Args:
        patches: Patches of all images of a call.
        tokens: Image tokens of the same images.

    Raises:
        ValueError: No squares of whole patches give these numbers.

    Example:
        >>> side_of(patches=576, tokens=144)
        2
    """
    side = isqrt(patches // max(tokens, 1))
    if side**2 * tokens != patches:
        raise ValueError(
            f"the images of this call have {patches} patches, of which {tokens} image tokens are no squares"
        )
    return side


def by_square(value_IRC: Tensor, side: int) -> Tensor:
    """Return the values of the patches that each token stands for (T, side * side).

    Example:
        >>> by_square(torch.arange(8).view(1, 2, 4), 2).tolist()
        [[0, 1, 4, 5], [2, 3, 6, 7]]
    """
    _, rows, columns = value_IRC.shape
    squares = value_IRC.unflatten(2, (columns // side, side)).unflatten(1, (rows // side, side))
    return squares.transpose(2, 3).reshape(-1, side**2)


class TowerImportance(TowerReader):
    """The attention that image tokens receive in the layer of the vision tower that provides the features.

    It is the attention of the class token, or in a tower without one the mean over patches. A token that stands for
    several patches has their mean.

    Raises:
        ValueError: See `TowerReader`.

    Source: VisionZip, Yang et al., arXiv 2412.04467, section 3.2: its dominant tokens.
    """

    def __init__(self, entry: Any, stack: BlockStack) -> None:
        super().__init__(entry, stack, "router.importance='vision_tower'", 0.0, partial(torch.mean, dim=1))
        self.reads: nn.Module = stack.blocks[_last_used(entry.config, len(stack.blocks))]
        importance = "class_token" if stack.class_token else "mean"
        self.state = ImportanceState(call=stack.call_of(self.reads, None), importance=importance, noted=self.noted)

    @property
    def hooks(self) -> list[tuple[nn.Module, ModelHook]]:
        """All hooks that it needs, with their modules."""
        hook = ModelHook(self.drop_before, self.drop_behind, install=self.install)
        windows = self.stack.windows
        if windows is None:
            return [(self.entry, hook)]
        return [(self.entry, hook), (self.entry.get_submodule(self.stack.owner), windows.hook)]

    def install(self) -> None:
        """Let the layer note the importance of patches, after the blocks of all parts were converted."""
        if is_converted(self.reads):
            raise ValueError(
                f"{self.option} reads the attention of all patches in the last block that features come from, which "
                "another method or the config of image changes: leave that block dense"
            )
        make_importance(self.reads, self.state)
        remember(self.entry, self.stack)

    def _maps(
        self, calls: list[Tensor], tokens: int, names: list[str], arguments: Arguments
    ) -> list[tuple[Tensor, int]]:
        rows = self.stack.rows
        if rows is not None:
            sizes = []
            for name in names:
                sizes += picture_sizes(arguments, rows.side, f"{name}_")
            pictures = torch.cat([value.flatten() for value in calls]).split([size.patches for size in sizes])
            return [(rows.by_position(value_P, size), size.side) for value_P, size in zip(pictures, sizes)]
        # Images of several sizes may be one sequence, without prefix tokens.
        parts = [value if value.ndim == 1 else value[:, self.first :] for value in calls]
        side = side_of(sum(part.numel() for part in parts), tokens)
        if side == 1:
            return [(part.reshape(1, 1, -1), 1) for part in parts]
        value_IP = torch.cat(parts)
        height, width = cast(Tensor, pixels_of(arguments, names[0])).shape[-2:]
        grid_rows = isqrt(value_IP.shape[1] * height // width)
        return [(value_IP.unflatten(1, (grid_rows, -1)), side)]


def _last_used(config: object, layers: int) -> int:
    """Return the index of the last of a tower's layers that features come from."""
    chosen = getattr(config, "vision_feature_layer", None)
    if chosen is None:
        return layers - 1
    if isinstance(chosen, int):
        chosen = [chosen]
    # Hidden states begin with the embeddings, before the first layer.
    last = max(state % (layers + 1) for state in chosen)
    return max(last - 1, 0)


class TowerPixels(TowerReader):
    """The largest score of the patches that an image token is made of, by a score of their pixels.

    What it notes are pixels of patches (I, R, C, H, E), and the side of the squares that tokens stand for, if the tower
    gets patches as rows; a video is then one of these.

    Raises:
        ValueError: See `TowerReader`, or patches have no pixels of their own.
    """

    def __init__(self, entry: object, stack: BlockStack, score: Score) -> None:
        super().__init__(entry, stack, f"router={score.name!r}", FIRST, partial(torch.amax, dim=1))
        self.score = score
        source = stack.rows or stack.grid
        if source is None:
            raise ValueError(
                f"{self.option} needs patches whose row and column in the image are known: the tower of a "
                f"{type(entry).__name__} shows no rows and columns of patches, as where images of several sizes are "
                "one sequence"
            )
        source.check(score, stack.names[0])
        self.source = source
        self.std = None if stack.grid is None else stack.grid.std
        if stack.rows is None:
            self.others = stack.prefix - self.first

    @property
    def hooks(self) -> list[tuple[nn.Module, ModelHook]]:
        """All hooks that it needs, with their modules."""
        return [*super().hooks, (self.source.module, ModelHook(self.note))]

    def note(self, module: nn.Module, arguments: Arguments) -> None:
        """Note the pixels that the tower, or its patch embedding, gets among other arguments."""
        if not recomputing():
            self.noted.value += self.source.pictures(arguments)

    @torch.no_grad()
    def _maps(
        self, calls: list[tuple[Tensor, int]], tokens: int, names: list[str], arguments: Arguments
    ) -> list[tuple[Tensor, int]]:
        common = 0
        if self.stack.rows is None:
            images = sum(len(pixels_IRCHE) for pixels_IRCHE, _ in calls)
            patches = sum(pixels_IRCHE.shape[:3].numel() for pixels_IRCHE, _ in calls)
            common = side_of(patches, tokens - images * self.others)
        maps = []
        for pixels_IRCHE, side in calls:
            frames = len(pixels_IRCHE) if side else 1
            score_IN, *_ = self.score.see(pixels_IRCHE, self.std, frames=frames, side=side or common)
            maps.append((score_IN.view(pixels_IRCHE.shape[:3]), side or common))
        return maps
