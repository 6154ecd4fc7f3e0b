"""The picture of the docs: a page, and the patches of it that a tower computes."""

import numpy as np
import torch
from PIL import Image

from scripts.pages_and_screens.rows import PATCH, STD, kept_patches
from scripts.pages_and_screens.sources import Page

PAGE = Page("file:///usr/share/doc/sqlite3/arch.html", 1024, "test", 0.0)
SIZE = (1022, 784)
_DROPPED = np.array([255, 186, 120])


def shown(picture: Image.Image) -> Image.Image:
    """Return a picture beside itself, in which patches that are left out are orange."""
    pixel_RC3 = np.array(picture)
    image = torch.from_numpy(pixel_RC3).permute(2, 0, 1) / (255 * STD)
    kept = kept_patches(image, tolerance=0.0, cell=4).numpy()
    dropped_RC1 = ~kept.repeat(PATCH, axis=0).repeat(PATCH, axis=1)[..., None]
    # A line between patches.
    dropped_RC1[::PATCH] = False
    dropped_RC1[:, ::PATCH] = False
    marked_RC3 = np.where(dropped_RC1, (pixel_RC3 * 0.3 + _DROPPED * 0.7).astype(np.uint8), pixel_RC3)
    gap = np.full((picture.height, 20, 3), 255, np.uint8)
    both = Image.fromarray(np.concatenate([pixel_RC3, gap, marked_RC3], axis=1))
    small = both.resize((both.width * 3 // 4, both.height * 3 // 4), Image.Resampling.LANCZOS)
    return small.quantize(64)
