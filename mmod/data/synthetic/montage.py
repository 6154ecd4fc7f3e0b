"""A picture of an embedded set."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmod.data.synthetic.build import SyntheticSet

__all__ = ["save_montage"]


# Images in a row, and rows.
_COLUMNS, _ROWS = 8, 4


def save_montage(path: str | Path, dataset: SyntheticSet[Any], config: Any) -> None:
    """Save a picture of the first test images of a set, each followed by its label map where there is one.

    Args:
        path: PNG file to write.
        dataset: The set.
        config: Its parameters.

    Raises:
        FileExistsError: If the file exists.
    """
    scale, gap = max(1, 96 // config.canvas), 4
    cell = config.canvas * scale + gap
    sheet = np.full((_ROWS * cell + gap, _COLUMNS * cell + gap), 255, np.uint8)
    samples = dataset.compose(config, "test")
    images = (sample[name] for sample in samples for name in sample if name.endswith("png"))
    for index, image in zip(range(_ROWS * _COLUMNS), images):
        top, left = gap + index // _COLUMNS * cell, gap + index % _COLUMNS * cell
        large = np.asarray(Image.open(io.BytesIO(image)).convert("L")).repeat(scale, axis=0).repeat(scale, axis=1)
        sheet[top : top + len(large), left : left + len(large)] = large
    with open(path, "xb") as file:
        Image.fromarray(sheet).save(file, format="PNG", optimize=True)
