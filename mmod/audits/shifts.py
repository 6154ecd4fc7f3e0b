"""Distribution shifts, such as noise and blur: each image is changed independently of its batch.

Axes: B images, C channels, H rows and W columns of pixels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

ImageShift = Callable[[Tensor, range], Tensor]
"""From images (B, C, H, W) and their numbers in the set to images of the same size."""

# Standard deviation of noise; that of the blur's Gaussian, as a share of the longer side; factor of the downsampling;
# side of a pasted square, as a share of the shorter side, and their number.
_NOISE = 0.5
_BLUR = 0.03
_SMALLER = 2
_FRAGMENT = 0.2
_FRAGMENTS = 4


def changed_images(batch: object, images: int, change: Callable[[Tensor], Tensor | None]) -> object:
    """Return a batch with its images (B, C, H, W) changed, and all else as it is; None where it has none to change.

    Args:
        images: Number of samples.
        change: Returns None for images that it leaves alone.
    """
    is_changed = False

    def move(value: object) -> object:
        nonlocal is_changed
        # Images alone: labels, masks and ids go with no place.
        if not isinstance(value, Tensor) or value.ndim != 4 or not value.is_floating_point():
            return value
        if len(value) != images:
            return value
        changed = change(value)
        if changed is None:
            return value
        is_changed = True
        return changed

    moved = tree_map(move, batch)
    if not is_changed:
        return None
    return moved


def _noise(x_BCHW: Tensor, images: range) -> Tensor:
    """Add noise of half the deviation of an image's own pixels."""
    drawn = [torch.randn(x_BCHW.shape[1:], generator=draw) for draw in _draws(images)]
    noise = torch.stack(drawn).to(x_BCHW)
    # In units of the image's deviation, so that normalisation does not matter.
    return x_BCHW + _NOISE * x_BCHW.std(dim=(1, 2, 3), keepdim=True) * noise


def _blur(x_BCHW: Tensor, images: range) -> Tensor:
    """Blur by a Gaussian with a standard deviation of 3 % of the image's longer side."""
    sigma = _BLUR * max(x_BCHW.shape[-2:])
    # Three deviations hold all but 0.3 % of a Gaussian.
    reach = max(1, round(3 * sigma))
    distance = torch.arange(-reach, reach + 1)
    bell = torch.exp(-(distance**2) / (2 * sigma**2)).to(x_BCHW)
    bell = bell / bell.sum()
    channels = x_BCHW.shape[1]
    # A Gaussian is the product of its two axes: first rows, then columns.
    for kernel, sides in (
        (bell.view(1, 1, -1, 1), (0, 0, reach, reach)),
        (bell.view(1, 1, 1, -1), (reach, reach, 0, 0)),
    ):
        padded = F.pad(x_BCHW, sides, mode="replicate")
        x_BCHW = F.conv2d(padded, kernel.expand(channels, 1, -1, -1), groups=channels)
    return x_BCHW


def _low_resolution(x_BCHW: Tensor, images: range) -> Tensor:
    """Show images at half their resolution, enlarged again."""
    small = F.avg_pool2d(x_BCHW, _SMALLER)
    return F.interpolate(small, x_BCHW.shape[-2:], mode="bilinear", align_corners=False)


def _clutter(x_BCHW: Tensor, images: range) -> Tensor:
    """Paste four squares of an image, a fifth of its side each, at other positions in it."""
    cluttered = x_BCHW.clone()
    side = max(1, round(_FRAGMENT * min(x_BCHW.shape[-2:])))
    limits = torch.tensor(x_BCHW.shape[-2:]) - side + 1
    for pasted, image, draw in zip(cluttered, x_BCHW, _draws(images)):
        corners = (torch.rand(_FRAGMENTS, 2, 2, generator=draw) * limits).long().tolist()
        for (top, left), (row, column) in corners:
            fragment = image[:, top : top + side, left : left + side]
            pasted[:, row : row + side, column : column + side] = fragment
    return cluttered


def _draws(images: range) -> Iterator[torch.Generator]:
    """Yield a generator for each image, seeded by its number."""
    return (torch.Generator().manual_seed(image) for image in images)


SHIFTS: Mapping[str, ImageShift] = {
    "noise": _noise,
    "blur": _blur,
    "low resolution": _low_resolution,
    "clutter": _clutter,
}
"""The shifts of images that an audit knows by name."""
