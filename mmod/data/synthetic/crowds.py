"""Crowded digits: handwritten digits that do not overlap, among fragments of others, with the class of every pixel."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import numpy as np
from PIL import Image

from mmod.data.synthetic.build import SyntheticSet
from mmod.data.synthetic.handwriting import Box, DrawnConfig, DrawnSamples, Painter, encode_png, paste

CLASSES = 11
"""Number of classes of a pixel: 0 is background, and digit d has class d + 1."""
# Grey values of the classes in image viewers.
_PALETTE = [25 * (channel // 3) for channel in range(3 * CLASSES)]


@dataclass(frozen=True)
class CrowdsConfig(DrawnConfig):
    """Parameters of a build, in addition to those of `DrawnConfig`.

    Args:
        digit_size: Smallest and largest side of a digit's box, in pixels.
        digits: Smallest and largest number of digits in a scene.
        ink: Minimum share of full ink for a pixel to have the digit's class.
        scenes: Number of scenes per split.
        grid: Positions of digits and fragments are multiples of this, in pixels.
    """

    canvas: int = 40
    clutter: int = 7
    shard_size: int = 500
    digit_size: tuple[int, int] = (16, 16)
    digits: tuple[int, int] = (2, 3)
    ink: Annotated[float, "(0, 1]"] = 0.1
    scenes: dict[str, int] = field(default_factory=lambda: {"train": 3000, "val": 500, "test": 1000})
    grid: Annotated[int, "[1, inf)"] = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        (smallest, largest), (fewest, most) = self.digit_size, self.digits
        # Random boxes that fill more than half of the canvas may never fit without overlap.
        if not 4 <= smallest <= largest or most * largest**2 > self.canvas**2 / 2:
            raise ValueError(
                f"digit_size={self.digit_size} must ascend from 4, and digits={self.digits} of that size fill at most "
                f"half of canvas={self.canvas}"
            )
        if not 1 <= fewest <= most:
            raise ValueError(f"digits={self.digits} must ascend from 1")


DIFFICULTIES: dict[str, CrowdsConfig] = {
    "default": CrowdsConfig(),
    "tiny": CrowdsConfig(
        canvas=32, digits=(1, 2), clutter=4, scenes={"train": 256, "val": 64, "test": 64}, shard_size=64
    ),
    "sparse": CrowdsConfig(canvas=48, digits=(1, 1)),
    "hard": CrowdsConfig(
        canvas=64,
        digit_size=(12, 20),
        digits=(2, 5),
        clutter=24,
        fragment=(0.25, 0.5),
        contrast=(0.6, 1.0),
        scenes={"train": 64000, "val": 2000, "test": 4000},
        shard_size=2000,
        grid=1,
    ),
}
"""Named parameter sets: `default` learns in minutes on one core, `tiny` is for tests, `hard` wants a GPU; in `sparse`
one patch of seventeen shows a digit, where patches are those of `grid`."""


class Crowd(NamedTuple):
    """A scene, with the class of each pixel (of `CLASSES`, uint8), and its provenance."""

    image: np.ndarray
    labels: np.ndarray
    sources: tuple[int, ...]  # Index of each digit among the source images.
    boxes: tuple[Box, ...]
    clutter: tuple[int, ...]  # Indices of the fragments' source images.


def compose_crowds(config: CrowdsConfig, split: str) -> DrawnSamples[Crowd]:
    """Return the scenes of a split."""
    painter = Painter(config, split, config.grid)

    def draw(index: int) -> Crowd:
        # The last number tells the draws of a set from those of others with the same seed.
        return _compose(config, painter, np.random.default_rng([*painter.seeds, index, 3]))

    return DrawnSamples(config.scenes[split], draw)


def _compose(config: CrowdsConfig, painter: Painter, rng: np.random.Generator) -> Crowd:
    canvas = painter.canvas()
    labels = painter.canvas()
    clutter = painter.clutter(canvas, config.digit_size, rng)
    count = int(rng.integers(config.digits[0], config.digits[1] + 1))
    chosen = tuple(int(source) for source in rng.choice(painter.pool, count))
    digits = [painter.digit(source, config.digit_size, rng) for source in chosen]
    boxes = tuple(painter.apart([len(digit) for digit in digits], config.grid, rng))
    for source, digit, (left, top, right, bottom) in zip(chosen, digits, boxes):
        paste(canvas, digit, left, top)
        # Faint pixels at a digit's edge stay background, which is class 0.
        has_ink = digit >= 255 * config.ink
        labels[top:bottom, left:right][has_ink] = painter.sources.labels[source] + 1
    return Crowd(canvas, labels, chosen, boxes, clutter)


def _encode(key: str, scene: Crowd) -> dict[str, bytes]:
    # With a palette, the usual format of label maps.
    labels = Image.fromarray(scene.labels, "P")
    file = io.BytesIO()
    labels.putpalette(_PALETTE)
    labels.save(file, format="PNG")
    made = {"sources": scene.sources, "boxes": scene.boxes, "clutter": scene.clutter}
    return {
        "png": encode_png(scene.image),
        "seg.png": file.getvalue(),
        "json": json.dumps(made).encode(),
    }


CROWDS = SyntheticSet("crowds", "crowded digits", 1, DIFFICULTIES, compose_crowds, _encode)
"""The set: shards of `KEY.png`, `KEY.seg.png` (the class of each pixel) and `KEY.json` (provenance)."""
