"""How many patches of a picture equal a neighbour. Axes: H rows and W columns of patches, V values of a patch."""

import io
from collections.abc import Callable

import numpy as np
from PIL import Image

FORMS: dict[str, Callable[[Image.Image], Image.Image]] = {
    "PNG": lambda picture: picture,
    "JPEG 90": lambda picture: compressed(picture, 90),
    "JPEG 75": lambda picture: compressed(picture, 75),
    "3/4 size": lambda picture: shrunk(picture, 0.75),
    "JPEG 90, 3/4 size": lambda picture: shrunk(compressed(picture, 90), 0.75),
}
"""Forms in which a picture reaches a model."""


def compressed(picture: Image.Image, quality: int) -> Image.Image:
    """Return a picture after JPEG."""
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=quality)
    return Image.open(file).convert("RGB")


def shrunk(picture: Image.Image, share: float) -> Image.Image:
    """Return a picture whose sides are a share of the picture's."""
    size = (round(picture.width * share), round(picture.height * share))
    return picture.resize(size, Image.Resampling.BICUBIC)


def differences(pixel_RC3: np.ndarray, side: int) -> np.ndarray:
    """Return how far each patch (H, W) is from the most similar of its left, upper and upper left neighbour.

    The distance of two patches is the largest difference of a channel of a pixel, in grey levels. The first patch has
    no neighbour and 255. What is left over at the right and lower edges is not read.
    """
    rows = pixel_RC3.shape[0] // side
    columns = pixel_RC3.shape[1] // side
    pixel_RC3 = pixel_RC3[: rows * side, : columns * side]
    least_HW = np.full((rows, columns), 255, np.uint8)
    for down, right in ((0, 1), (1, 0), (1, 1)):
        lower_RC3 = pixel_RC3[down * side :, right * side :]
        upper_RC3 = pixel_RC3[: (rows - down) * side, : (columns - right) * side]
        apart_RC3 = np.maximum(lower_RC3, upper_RC3) - np.minimum(lower_RC3, upper_RC3)
        # Rows first, which are long.
        apart_HR = apart_RC3.reshape(rows - down, side, -1).max(axis=1)
        apart_HW = apart_HR.reshape(rows - down, columns - right, -1).max(axis=2)
        least_HW[down:, right:] = np.minimum(least_HW[down:, right:], apart_HW)
    return least_HW


def whole_groups(same_HW: np.ndarray, side: int = 2) -> np.ndarray:
    """Return which groups of side x side patches are duplicates as a whole."""
    rows = same_HW.shape[0] // side
    columns = same_HW.shape[1] // side
    return same_HW[: rows * side, : columns * side].reshape(rows, side, columns, side).all(axis=(1, 3))


def shares(picture: Image.Image, side: int = 14, tolerance: int = 6) -> list[float]:
    """Return the shares of exact duplicates and of those within a tolerance, each of patches and of 2 x 2 groups."""
    least_HW = differences(np.asarray(picture.convert("RGB")), side)
    found = []
    for limit in (0, tolerance):
        same_HW = least_HW <= limit
        found += [float(same_HW.mean()), float(whole_groups(same_HW).mean())]
    return found
