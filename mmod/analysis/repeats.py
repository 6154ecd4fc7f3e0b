"""Redundancy of images: share of flat patches, and share of patches that hold most of the variance.

Axes: B images, C channels, N patches, P pixels of a patch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from mmod.values import check_finite, check_value


@dataclass(frozen=True)
class RedundancyReport:
    """Redundancy of images before any model sees them; `print` shows it in one line.

    Args:
        flat: Share of flat patches, in [0, 1].
        kept_99: Smallest share of an image's patches that holds 99 % of the within-patch variance, mean over images.
        kept_95: The same for 95 %.
    """

    images: int
    patch_size: int
    flat: float
    kept_99: float
    kept_95: float

    def __str__(self) -> str:
        flat, kept_99, kept_95 = (f"{100 * share:.0f} %" for share in (self.flat, self.kept_99, self.kept_95))
        return (
            f"{flat} of patches are flat, of nearly one colour (the more, the less merging loses); {kept_99} "
            f"hold 99 % of the detail, {kept_95} hold 95 % ({self.images:,} images, patches of {self.patch_size} px)"
        )


def redundancy(images: Tensor | Iterable[Tensor], patch_size: int, tolerance: float = 0.01) -> RedundancyReport:
    """Measure how redundant images are at a model's patch size: how many patches are flat, or add little.

    Robustness to dropped tokens means little on mostly flat images, so report both.

    Args:
        images: A batch (B, C, H, W), or batches of them.
        patch_size: Side of a patch in pixels, of which the images' sides are multiples.
        tolerance: A patch is flat if the standard deviation of every channel is at most this share of the range of
            values in all images.

    Raises:
        TypeError: A batch is not a tensor.
        ValueError: No images, values that are not finite, or images whose sides are no multiples of a patch's.

    Example:
        >>> left, right = torch.zeros(4, 3, 32, 16), torch.rand(4, 3, 32, 16)
        >>> report = redundancy(torch.cat([left, right], dim=3), patch_size=8)
        >>> report.flat, report.kept_99
        (0.5, 0.5)
    """
    check_value("patch_size", patch_size, int, "[1, inf)")
    check_value("tolerance", tolerance, float, "[0, 1]")
    variances = []
    lowest = math.inf
    highest = -math.inf
    batches = [images] if isinstance(images, Tensor) else images
    for batch in batches:
        variances.append(_variances(batch, patch_size))
        lowest = min(lowest, float(batch.min()))
        highest = max(highest, float(batch.max()))
    if not variances:
        raise ValueError("redundancy needs at least one batch of images")
    shares_B3 = []
    # A second loop: what counts as flat depends on the range of values in all images.
    for variance_BNC in variances:
        is_flat_BN = (variance_BNC.sqrt() <= tolerance * (highest - lowest)).all(dim=2)
        variance_BN = variance_BNC.sum(dim=2)
        kept_99_B = _share_that_holds(variance_BN, 0.99)
        kept_95_B = _share_that_holds(variance_BN, 0.95)
        flat_B = is_flat_BN.double().mean(dim=1)
        shares_B3.append(torch.stack([flat_B, kept_99_B, kept_95_B], dim=1))
    flat, kept_99, kept_95 = torch.cat(shares_B3).mean(dim=0).tolist()
    return RedundancyReport(sum(map(len, variances)), patch_size, flat, kept_99, kept_95)


def whole_patches(images_BCHW: Tensor, patch_size: int) -> Tensor:
    """Return images without the pixels beyond the last full patch, which a model leaves out (B, C, H, W)."""
    height, width = (side // patch_size * patch_size for side in images_BCHW.shape[2:])
    return images_BCHW[:, :, :height, :width]


def _variances(images: Tensor, patch_size: int) -> Tensor:
    """Return the variance within each patch (B, N, C) in float64."""
    if not isinstance(images, Tensor):
        raise TypeError(f"images must be tensors (B, C, H, W), got {type(images).__name__}")
    if images.ndim != 4 or not images.numel() or min(images.shape[2:]) < patch_size:
        raise ValueError(f"images must be (B, C, H, W) of at least {patch_size} pixels, got {tuple(images.shape)}")
    height, width = images.shape[2:]
    fitting = [side // patch_size * patch_size for side in (height, width)]
    if fitting != [height, width]:
        raise ValueError(
            f"images of {height} x {width} pixels are no multiples of patch_size={patch_size}: crop them, as to "
            f"{fitting[0]} x {fitting[1]}, or pass the side of the model's patches"
        )
    check_finite("images", images)
    rows = images.detach().double().unfold(2, patch_size, patch_size)
    patches = rows.unfold(3, patch_size, patch_size)
    variance_BCHW = patches.flatten(4).var(dim=4, unbiased=False)
    return variance_BCHW.flatten(2).transpose(1, 2)


def _share_that_holds(variance_BN: Tensor, share: float) -> Tensor:
    """Return the smallest share of patches that holds a share of the variance (B)."""
    largest_BN = variance_BN.sort(dim=1, descending=True).values
    # Before each patch: the patch that reaches the share is needed as well.
    before_BN = largest_BN.cumsum(dim=1) - largest_BN
    needed_BN = before_BN < share * largest_BN.sum(dim=1, keepdim=True)
    # An image of one colour needs one patch.
    return needed_BN.double().mean(dim=1).clamp(min=1 / variance_BN.shape[1])
