"""scikit-learn's handwritten digits, in disjoint splits, and the drawing functions of the embedded sets."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from PIL import Image

from mmod.values import Limit, check_fields, one_of

SPLITS = ("train", "val", "test")
_SOURCE_SHARES = {"train": 0.7, "val": 0.1, "test": 0.2}


class SourceDigits(NamedTuple):
    """scikit-learn's digits and their splits, read-only.

    Attributes:
        images: Grey values, uint8, (1797, 8, 8).
        labels: Classes, (1797,).
        splits: Indices of the images by split; a partition.
    """

    images: np.ndarray
    labels: np.ndarray
    splits: Mapping[str, np.ndarray]


@lru_cache(maxsize=2)
def load_sources(seed: int = 0) -> SourceDigits:
    """Load the source images, split 70/10/20 and stratified by class; cached per seed.

    Example:
        >>> sources = load_sources()
        >>> {name: len(indices) for name, indices in sources.splits.items()}
        {'train': 1258, 'val': 180, 'test': 359}
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)
    rng = np.random.default_rng([seed, len(SPLITS)])
    chunks: dict[str, list[np.ndarray]] = {name: [] for name in SPLITS}
    cuts = np.cumsum([_SOURCE_SHARES[name] for name in SPLITS])[:-1]
    for label in range(10):
        indices = rng.permutation(np.flatnonzero(digits.target == label))
        for name, chunk in zip(SPLITS, np.split(indices, np.round(cuts * len(indices)).astype(int))):
            chunks[name].append(chunk)
    splits = {name: np.sort(np.concatenate(arrays)) for name, arrays in chunks.items()}
    labels = digits.target.astype(np.int64)
    # Read-only, because all callers share the cached arrays.
    for array in (images, labels, *splits.values()):
        array.flags.writeable = False
    return SourceDigits(images, labels, MappingProxyType(splits))


@dataclass(frozen=True)
class DrawnConfig:
    """Parameters of all embedded sets; equal parameters give equal bytes.

    Args:
        canvas: Side of an image, in pixels.
        clutter: Number of digit fragments in an image.
        fragment: Smallest and largest side of a fragment, as a share of its digit's box.
        contrast: Lowest and highest ink of a fragment, as a share of the digits' ink.
        shard_size: Samples per shard.
        seed: Seed of the split of the source images and of every sample.
    """

    canvas: int = 32
    clutter: int = 4
    fragment: tuple[float, float] = (0.2, 0.4)
    contrast: tuple[float, float] = (0.4, 0.8)
    shard_size: int = 1000
    seed: int = 0

    def check(self, counts: str, least: int = 1, **limits: Limit) -> None:
        """Check the parameters.

        Args:
            counts: Name of the parameter with the number of samples per split.
            least: Minimum of these numbers.
            limits: Limits of further parameters, see `mmod.values.check_fields`.

        Raises:
            ValueError: A parameter is out of range.
        """
        check_fields(self, "", clutter="[0, inf)", shard_size="[1, inf)", seed="[0, inf)", **limits)
        for name in ("fragment", "contrast"):
            low, high = getattr(self, name)
            if not 0 < low <= high <= 1:
                raise ValueError(f"{name}={(low, high)} must lie in (0, 1], ascending")
        samples = getattr(self, counts)
        if set(samples) != set(SPLITS) or min(samples.values()) < least:
            raise ValueError(f"{counts}={samples} must give each of {SPLITS} a number of at least {least}")


def load_split(config: DrawnConfig, split: str) -> tuple[SourceDigits, np.ndarray]:
    """Load the source images, and the indices of a split.

    Args:
        config: Parameters of a set; its seed determines the splits.
        split: One of `SPLITS`.

    Raises:
        ValueError: The split is unknown.
    """
    one_of("split", split, SPLITS)
    sources = load_sources(config.seed)
    return sources, sources.splits[split]


def draw_clutter(
    canvas: np.ndarray,
    sources: SourceDigits,
    pool: np.ndarray,
    config: DrawnConfig,
    sides: tuple[int, int],
    rng: np.random.Generator,
    grid: int = 1,
) -> tuple[int, ...]:
    """Draw fragments of digits at random positions of a canvas, in place.

    Args:
        canvas: Grey values, uint8, (rows, columns).
        sources: The source images.
        pool: Indices of the source images to use.
        config: Number, size and ink of the fragments.
        sides: Smallest and largest side of a digit's box, in pixels.
        rng: Random generator.
        grid: See `paste`.

    Returns:
        Indices of the fragments' source images.
    """
    chosen = rng.choice(pool, config.clutter)
    for source in chosen:
        digit = scale_digit(sources.images[source], sides, rng)
        paste(canvas, _cut_fragment(digit, config.fragment, config.contrast, rng), rng, grid)
    return tuple(int(source) for source in chosen)


def scale_digit(digit: np.ndarray, sides: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Resize a square image to a random side within two limits, both inclusive."""
    side = int(rng.integers(sides[0], sides[1] + 1))
    return np.asarray(Image.fromarray(digit).resize((side, side), Image.Resampling.BILINEAR))


def _cut_fragment(
    digit: np.ndarray, shares: tuple[float, float], contrast: tuple[float, float], rng: np.random.Generator
) -> np.ndarray:
    """Cut a random rectangle from a digit and scale its ink; sizes are shares of the digit's side."""
    side = len(digit)
    low, high = (max(1, round(side * share)) for share in shares)
    height, width = rng.integers(low, high + 1, 2)
    top, left = rng.integers(0, side - height + 1), rng.integers(0, side - width + 1)
    piece = digit[top : top + height, left : left + width]
    return (piece * rng.uniform(*contrast)).astype(np.uint8)


def paste(canvas: np.ndarray, patch: np.ndarray, rng: np.random.Generator, grid: int = 1) -> tuple[int, int, int, int]:
    """Draw a patch at a random position of a canvas, in place; return its left, top, right and bottom.

    Args:
        canvas: Grey values (rows, columns).
        patch: Grey values of the patch, not larger than the canvas.
        rng: Random generator.
        grid: The upper left corner is at multiples of this, in pixels.
    """
    height, width = patch.shape
    top = grid * int(rng.integers(0, (canvas.shape[0] - height) // grid + 1))
    left = grid * int(rng.integers(0, (canvas.shape[1] - width) // grid + 1))
    region = canvas[top : top + height, left : left + width]
    np.maximum(region, patch, out=region)
    return left, top, left + width, top + height


def encode_png(image: np.ndarray) -> bytes:
    """Encode grey or RGB values, uint8, (H, W) or (H, W, 3), as a PNG file."""
    png = io.BytesIO()
    Image.fromarray(image).save(png, format="PNG")
    return png.getvalue()
