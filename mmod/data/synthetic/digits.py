"""Cluttered digits: one handwritten digit (from scikit-learn) of random place and size among fragments of others.

Most tokens are background, so the set is a small and fast test for models that choose where to compute. The source
images are split before scenes are composed, so splits share no handwriting, not even as clutter.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, NamedTuple

import numpy as np

from mmod.data.synthetic.build import SyntheticSet
from mmod.data.synthetic.handwriting import Box, DrawnConfig, DrawnSamples, Painter, encode_png


@dataclass(frozen=True)
class DigitsConfig(DrawnConfig):
    """Parameters of a build, in addition to those of `DrawnConfig`.

    Args:
        digit_size: Smallest and largest side of the target digit's box, in pixels.
        scenes: Number of scenes per split.
        grid: Positions of digits and fragments are multiples of this, in pixels.
    """

    shard_size: int = 2000
    digit_size: tuple[int, int] = (14, 18)
    scenes: dict[str, int] = field(default_factory=lambda: {"train": 16000, "val": 1000, "test": 2000})
    grid: Annotated[int, "[1, inf)"] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        smallest, largest = self.digit_size
        if not 4 <= smallest <= largest <= self.canvas:
            raise ValueError(f"digit_size={self.digit_size} must lie in [4, canvas={self.canvas}], ascending")


_hard = partial(
    DigitsConfig, fragment=(0.25, 0.5), contrast=(0.6, 1.0), scenes={"train": 64000, "val": 2000, "test": 4000}
)
DIFFICULTIES: dict[str, DigitsConfig] = {
    "default": DigitsConfig(),
    "tiny": DigitsConfig(scenes={"train": 256, "val": 64, "test": 64}, shard_size=64),
    "aligned": DigitsConfig(
        digit_size=(16, 16), scenes={"train": 5000, "val": 500, "test": 1000}, shard_size=500, grid=4
    ),
    "aligned-48": DigitsConfig(
        canvas=48, digit_size=(24, 24), scenes={"train": 5000, "val": 500, "test": 1000}, shard_size=500, grid=6
    ),
    "filled": DigitsConfig(
        digit_size=(20, 28), clutter=6, scenes={"train": 12000, "val": 500, "test": 1000}, shard_size=500, grid=4
    ),
    "hard": _hard(digit_size=(10, 18), clutter=12),
    "64": _hard(canvas=64, digit_size=(14, 28), clutter=24),
    "96": _hard(canvas=96, digit_size=(14, 36), clutter=48),
}
"""Named parameter sets: `aligned` learns in two minutes on one core, `aligned-48` and `default` in minutes on two,
`tiny` is for tests, the others want a GPU."""


class DigitScene(NamedTuple):
    """An image, the class of its target digit, and its provenance."""

    image: np.ndarray
    label: int
    target: int  # Index of the target among the source images.
    box: Box
    clutter: tuple[int, ...]  # Indices of the fragments' source images.


def compose_scenes(config: DigitsConfig, split: str) -> DrawnSamples[DigitScene]:
    """Return the scenes of a split; every source image of the split is a target equally often."""
    painter = Painter(config, split, config.grid)
    targets = np.random.default_rng(painter.seeds).permutation(painter.pool)

    def draw(index: int) -> DigitScene:
        # By index, so that a scene does not depend on how many are drawn before it.
        rng = np.random.default_rng([*painter.seeds, index])
        target = int(targets[index % len(targets)])
        canvas = painter.canvas()
        clutter = painter.clutter(canvas, config.digit_size, rng)
        box = painter.place(canvas, painter.digit(target, config.digit_size, rng), rng)
        return DigitScene(canvas, int(painter.sources.labels[target]), target, box, clutter)

    return DrawnSamples(config.scenes[split], draw)


def _encode(key: str, scene: DigitScene) -> dict[str, bytes]:
    made = {"target": scene.target, "box": scene.box, "clutter": scene.clutter}
    return {
        "png": encode_png(scene.image),
        "cls": str(scene.label).encode(),
        "json": json.dumps(made).encode(),
    }


DIGITS = SyntheticSet("digits", "cluttered digits", 1, DIFFICULTIES, compose_scenes, _encode)
"""The set: shards of `KEY.png`, `KEY.cls` and `KEY.json` (provenance)."""
