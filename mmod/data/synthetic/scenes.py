"""Captioned scenes: images of two handwritten digits on clutter or on a plain ground, with captions.

"a large 7 left of a small 3 on clutter" is one of 1,600, so matching image and caption requires reading both digits.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import numpy as np

from mmod.data.synthetic.build import SyntheticSet
from mmod.data.synthetic.handwriting import Box, DrawnConfig, DrawnSamples, Painter, encode_png

SIZES = ("large", "small")
RELATIONS = ("left of", "above")
GROUNDS = ("clutter", "plain")


class SceneContent(NamedTuple):
    """Content of a scene: classes and sizes of the left or upper digit and of the other, their relation, the ground."""

    digits: tuple[int, int]
    sizes: tuple[str, str]
    relation: str
    ground: str

    @property
    def caption(self) -> str:
        """The caption."""
        first, second = (f"a {size} {digit}" for size, digit in zip(self.sizes, self.digits))
        return f"{first} {self.relation} {second} on {self.ground}"


def all_contents() -> list[SceneContent]:
    """Return all possible contents, in a fixed order."""
    parts = product(range(10), range(10), SIZES, SIZES, RELATIONS, GROUNDS)
    return [SceneContent((first, second), (size, other), *setting) for first, second, size, other, *setting in parts]


@dataclass(frozen=True)
class ScenesConfig(DrawnConfig):
    """Parameters of a build, in addition to those of `DrawnConfig`.

    Args:
        large: Smallest and largest side of a large digit's box, in pixels.
        small: Smallest and largest side of a small digit's box.
        clutter: Number of digit fragments in a scene on clutter.
        scenes: Number of scenes per split. In "val" and "test" all captions differ.
    """

    canvas: int = 48
    clutter: int = 10
    large: tuple[int, int] = (20, 23)
    small: tuple[int, int] = (12, 14)
    scenes: dict[str, int] = field(default_factory=lambda: {"train": 16000, "val": 500, "test": 1000})

    def __post_init__(self) -> None:
        super().__post_init__()
        sides = (*self.small, *self.large)
        if not 4 <= sides[0] <= sides[1] <= sides[2] <= sides[3] <= self.canvas // 2:
            raise ValueError(f"small={self.small} and large={self.large} must ascend from 4 to canvas/2")
        contents = len(all_contents())
        if max(self.scenes["val"], self.scenes["test"]) > contents:
            raise ValueError(f"scenes={self.scenes} must give val and test at most {contents}, one per caption")


DIFFICULTIES: dict[str, ScenesConfig] = {
    "default": ScenesConfig(),
    "tiny": ScenesConfig(scenes={"train": 256, "val": 64, "test": 64}, shard_size=64),
    "hard": ScenesConfig(canvas=64, large=(24, 30), small=(12, 16), clutter=30, contrast=(0.6, 1.0)),
}
"""Named parameter sets: `default` learns in minutes on two cores, `tiny` is for tests, `hard` wants a GPU."""


class Pair(NamedTuple):
    """A scene, its content, and the source images and boxes of its two digits."""

    image: np.ndarray
    content: SceneContent
    sources: tuple[int, ...]
    boxes: tuple[Box, ...]


def compose_pairs(config: ScenesConfig, split: str) -> DrawnSamples[Pair]:
    """Return the scenes of a split, with contents as evenly frequent as possible."""
    painter = Painter(config, split)
    contents = all_contents()

    # The last turn alone is kept: a permutation costs less than a scene.
    @functools.lru_cache(maxsize=1)
    def order(turn: int) -> np.ndarray:
        return np.random.default_rng([*painter.seeds, turn]).permutation(len(contents))

    def draw(index: int) -> Pair:
        turn, position = divmod(index, len(contents))
        content = contents[order(turn)[position]]
        # The last number tells the draws of a set from those of others with the same seed.
        return _compose(config, painter, content, np.random.default_rng([*painter.seeds, index, 1]))

    return DrawnSamples(config.scenes[split], draw)


def _compose(config: ScenesConfig, painter: Painter, content: SceneContent, rng: np.random.Generator) -> Pair:
    canvas = painter.canvas()
    half = config.canvas // 2
    if content.ground == "clutter":
        painter.clutter(canvas, config.large, rng)
    chosen = []
    boxes = []
    for number, (digit_class, size) in enumerate(zip(content.digits, content.sizes)):
        source = int(rng.choice(painter.by_class[digit_class]))
        pixels = config.large if size == "large" else config.small
        digit = painter.digit(source, pixels, rng)
        # Each digit has a half of the canvas: left and right, or above and below.
        if content.relation == "left of":
            left, top, right, bottom = number * half, 0, (number + 1) * half, config.canvas
        else:
            left, top, right, bottom = 0, number * half, config.canvas, (number + 1) * half
        inner = painter.place(canvas[top:bottom, left:right], digit, rng)
        chosen.append(source)
        # From the half to the canvas.
        inner_left, inner_top, inner_right, inner_bottom = inner
        boxes.append((left + inner_left, top + inner_top, left + inner_right, top + inner_bottom))
    return Pair(canvas, content, tuple(chosen), tuple(boxes))


def _encode(key: str, pair: Pair) -> dict[str, bytes]:
    height, width = pair.image.shape
    caption = pair.content.caption
    made = {"digits": pair.content.digits, "sources": pair.sources, "boxes": pair.boxes}
    record = {"caption": caption, "key": key, "status": "success", "width": width, "height": height, **made}
    return {
        "png": encode_png(pair.image),
        "txt": caption.encode(),
        "json": json.dumps(record).encode(),
    }


SCENES = SyntheticSet(
    "scenes", "captioned scenes", 1, DIFFICULTIES, compose_pairs, _encode, shard_digits=5, key_digits=9, sizes=True
)
"""The set: shards of `KEY.png`, `KEY.txt` (the caption) and `KEY.json` (provenance)."""
