"""Pictures of the patches that decisions kept; matplotlib is imported when one is drawn."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from mmod.analysis.style import INK, new_figure
from mmod.lazy import name_missing_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A veil that is neither black nor white, so that dark and bright patches alike show whether they were kept.
VEIL_COLOUR, VEIL_OPACITY = (0.60, 0.68, 0.80), 0.82


@name_missing_extra()
def draw_maps(images: Tensor, names: Sequence[str], maps: Tensor, labels: Sequence[str] | None = None) -> Figure:
    """Draw kept patches as they are and others under a veil, a row for each image; see `mmod.Trace.plot`.

    Args:
        images: One or three channels (B, C, height, width).
        names: Names of the blocks.
        maps: True where a block kept a patch (blocks, B, rows, columns).
        labels: Text next to each image.
    """
    pictures = _pictures(images)
    if maps.shape[1] != len(images):
        raise ValueError(
            f"the trace holds decisions for {maps.shape[1]} images, got {len(images)} images: pass those of the traced "
            "pass, or trace only the images to draw"
        )
    if labels is not None and len(labels) != len(images):
        raise ValueError(f"{len(images)} images need as many labels, got {len(labels)}")
    # Blocks of one decision would repeat its picture.
    groups = runs_of_one_mask(names, list(maps))
    firsts = [group.start for group in groups]
    titles = ["image"]
    for group in groups:
        share = maps[group.start].float().mean()
        titles.append(f"{_short(names[group])}\n{share:.0%} kept")
    rows, columns = len(pictures), len(titles)
    side = 1.35
    shape = pictures.shape[1:3]
    figure = new_figure(side * columns, side * rows * shape[0] / shape[1] + 0.45)
    axes = figure.subplots(rows, columns, squeeze=False)
    for row, picture in enumerate(pictures):
        for column, content in enumerate([picture, *(_veiled(picture, maps[first][row]) for first in firsts)]):
            axis = axes[row, column]
            axis.imshow(content.numpy(), interpolation="nearest", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
            if row == 0:
                axis.set_title(titles[column], fontsize=9, color=INK)
        if labels is not None:
            axes[row, 0].set_ylabel(labels[row], fontsize=9, color=INK)
    return figure


def runs_of_one_mask(names: Sequence[str], masks: Sequence[Tensor]) -> list[slice]:
    """Return runs of adjoining blocks that kept the same tokens, as blocks of one decision do.

    Args:
        names: Names of the blocks, in order.
        masks: True where a block kept a token, of one shape for equal ones.

    Example:
        >>> one, two = torch.tensor([True, False]), torch.tensor([True, True])
        >>> runs_of_one_mask(["blocks.0", "blocks.1", "blocks.2"], [one, one, two])
        [slice(0, 2, None), slice(2, 3, None)]
    """
    pairs = zip(itertools.pairwise(names), itertools.pairwise(masks))
    firsts = [0]
    for number, (near, both) in enumerate(pairs, 1):
        if not (_adjoin(*near) and torch.equal(*both)):
            firsts.append(number)
    ends = [*firsts[1:], len(names)]
    return [slice(first, end) for first, end in zip(firsts, ends)]


def _pictures(images: Tensor) -> Tensor:
    """Return images as (B, height, width, 3) on the CPU, scaled to [0, 1] where they lie outside."""
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(f"images must be (B, 1 or 3, height, width), got {tuple(images.shape)}")
    images = images.detach().float().cpu()
    low, high = images.aminmax()
    if low < 0 or high > 1:
        images = (images - low) / (high - low)
    return images.expand(-1, 3, -1, -1).permute(0, 2, 3, 1)


def _veiled(picture: Tensor, kept: Tensor) -> Tensor:
    """Veil the patches of a picture (height, width, 3) that are not kept (rows, columns)."""
    # `nearest-exact` puts a patch's edges where the patch has them.
    mask = F.interpolate(kept[None, None].float(), size=picture.shape[:2], mode="nearest-exact")
    mask = mask[0, 0, :, :, None]
    opacity = VEIL_OPACITY * (1 - mask)
    return picture * (1 - opacity) + torch.tensor(VEIL_COLOUR) * opacity


def _adjoin(name: str, following: str) -> bool:
    """Return whether one block comes right after another."""
    stem = name.rstrip("0123456789")
    return stem != name and following == f"{stem}{int(name.removeprefix(stem)) + 1}"


def _short(names: Sequence[str]) -> str:
    first = names[0].rpartition(".")[2]
    last = names[-1].rpartition(".")[2]
    if len(names) > 1:
        return f"blocks {first} to {last}"
    if "." in names[0]:
        return f"block {first}"
    return names[0]
