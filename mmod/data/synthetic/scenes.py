"""Captioned scenes: a data set of image-text pairs made from scikit-learn's handwritten digits.

Two digits lie on a canvas, among fragments of other digits or on plain ground, and a sentence says which they are, how
large, and how they lie: "a large 7 left of a small 3 on clutter". A sentence tells 1,600 kinds of scenes apart, so that
finding the one that belongs to an image takes reading both digits. As in cluttered digits, no handwriting crosses from
one split to another, not even as clutter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mmod.data.synthetic.build import SyntheticSet
from mmod.data.synthetic.handwriting import (
    SPLITS,
    DrawnConfig,
    SourceDigits,
    draw_clutter,
    encode_png,
    load_split,
    paste,
    scale_digit,
)

SIZES = ("large", "small")
RELATIONS = ("left of", "above")
GROUNDS = ("clutter", "plain")


class Kind(NamedTuple):
    """Content of a caption.

    Attributes:
        digits: Class of the left or upper digit, then of the other.
        sizes: Their sizes, of `SIZES`.
        relation: How the first lies to the second, of `RELATIONS`.
        ground: What they lie on, of `GROUNDS`.
    """

    digits: tuple[int, int]
    sizes: tuple[str, str]
    relation: str
    ground: str

    @property
    def caption(self) -> str:
        """The sentence."""
        first, second = (f"a {size} {digit}" for size, digit in zip(self.sizes, self.digits))
        return f"{first} {self.relation} {second} on {self.ground}"


def all_kinds() -> list[Kind]:
    """Return every kind of scene there is, in a fixed order."""
    return [
        Kind((first, second), (one, other), relation, ground)
        for first in range(10)
        for second in range(10)
        for one in SIZES
        for other in SIZES
        for relation in RELATIONS
        for ground in GROUNDS
    ]


@dataclass(frozen=True)
class ScenesConfig(DrawnConfig):
    """The parameters of one build; further ones are those of `DrawnConfig`.

    Args:
        large: Smallest and largest side of a large digit's box, in pixels.
        small: The same of a small digit.
        clutter: Number of digit fragments in a scene on clutter.
        scenes: Number of scenes of each split. In "val" and "test" no two scenes have the same caption.

    Raises:
        ValueError: If a parameter is out of range.
    """

    canvas: int = 48
    clutter: int = 10
    large: tuple[int, int] = (20, 23)
    small: tuple[int, int] = (12, 14)
    scenes: dict[str, int] = field(default_factory=lambda: {"train": 16000, "val": 500, "test": 1000})

    def __post_init__(self) -> None:
        self.check("scenes")
        sides = (*self.small, *self.large)
        if not 4 <= sides[0] <= sides[1] <= sides[2] <= sides[3] <= self.canvas // 2:
            raise ValueError(f"small={self.small} and large={self.large} must ascend from 4 to canvas/2")
        kinds = len(all_kinds())
        if max(self.scenes["val"], self.scenes["test"]) > kinds:
            raise ValueError(f"scenes={self.scenes} must give val and test at most {kinds}, one for each caption")


DIFFICULTIES: dict[str, ScenesConfig] = {
    "default": ScenesConfig(),
    "tiny": ScenesConfig(scenes={"train": 256, "val": 64, "test": 64}, shard_size=64),
    "hard": ScenesConfig(canvas=64, large=(24, 30), small=(12, 16), clutter=30, contrast=(0.6, 1.0)),
}
"""Named parameter sets: `default` learns in minutes on two cores, `tiny` is for tests, `hard` wants a GPU."""


class Pair(NamedTuple):
    """One scene with its caption, and how it was made.

    Attributes:
        image: Grey values, uint8, (canvas, canvas).
        kind: What is to be seen.
        sources: Indices of the two digits among the source images.
        boxes: Left, top, right, bottom of each digit, in pixels, right and bottom exclusive.
    """

    image: np.ndarray
    kind: Kind
    sources: tuple[int, int]
    boxes: tuple[tuple[int, int, int, int], tuple[int, int, int, int]]


def zero_shot_prompts() -> tuple[list[str], list[str]]:
    """Return class names and templates for open_clip's zero-shot classifier: which digit is named first?

    Returns:
        The ten classes, and every caption with `{}` in the place of the first digit.

    Example:
        >>> classes, templates = zero_shot_prompts()
        >>> classes[7], len(templates), templates[0]
        ('7', 160, 'a large {} left of a large 0 on clutter')
    """
    kinds = [kind for kind in all_kinds() if kind.digits[0] == 0]
    return [str(digit) for digit in range(10)], [kind.caption.replace("0", "{}", 1) for kind in kinds]


def compose_pairs(config: ScenesConfig, split: str) -> Iterator[Pair]:
    """Compose the scenes of one split, each from its own seed.

    Args:
        config: Parameters of the build.
        split: One of `SPLITS`.

    Yields:
        `config.scenes[split]` scenes, in which kinds are as frequent as possible alike.

    Raises:
        ValueError: If the split is unknown.

    Example:
        >>> next(compose_pairs(DIFFICULTIES["tiny"], "test")).kind.caption
        'a small 1 above a large 0 on clutter'
    """
    sources, pool = load_split(config, split)
    split_seed = SPLITS.index(split)
    kinds = all_kinds()
    for index in range(config.scenes[split]):
        turn, place = divmod(index, len(kinds))
        if place == 0:
            order = np.random.default_rng([config.seed, split_seed, turn]).permutation(len(kinds))
        rng = np.random.default_rng([config.seed, split_seed, index, 1])
        yield _compose(config, sources, pool, kinds[order[place]], rng)


def _compose(
    config: ScenesConfig, sources: SourceDigits, pool: np.ndarray, kind: Kind, rng: np.random.Generator
) -> Pair:
    canvas = np.zeros((config.canvas, config.canvas), np.uint8)
    if kind.ground == "clutter":
        draw_clutter(canvas, sources, pool, config, config.large, rng)
    half = config.canvas // 2
    chosen, boxes = [], []
    for number, (digit_class, size) in enumerate(zip(kind.digits, kind.sizes)):
        source = int(rng.choice(pool[sources.labels[pool] == digit_class]))
        digit = scale_digit(sources.images[source], config.large if size == "large" else config.small, rng)
        left, top = (number * half, 0) if kind.relation == "left of" else (0, number * half)
        right, bottom = (left + half, config.canvas) if kind.relation == "left of" else (config.canvas, top + half)
        box = paste(canvas[top:bottom, left:right], digit, rng)
        chosen.append(source)
        boxes.append((box[0] + left, box[1] + top, box[2] + left, box[3] + top))
    return Pair(canvas, kind, (chosen[0], chosen[1]), (boxes[0], boxes[1]))


def _samples(config: ScenesConfig, split: str) -> Iterator[dict[str, Any]]:
    for index, pair in enumerate(compose_pairs(config, split)):
        height, width = pair.image.shape
        key, caption = f"{index:09d}", pair.kind.caption
        made = {"digits": pair.kind.digits, "sources": pair.sources, "boxes": pair.boxes}
        record = {"caption": caption, "key": key, "status": "success", "width": width, "height": height, **made}
        yield {
            "__key__": key,
            "png": encode_png(pair.image),
            "txt": caption.encode(),
            "json": json.dumps(record).encode(),
        }


SCENES = SyntheticSet("scenes", "captioned scenes", 1, DIFFICULTIES, _samples, "scenes", digits=5, sizes=True)
"""The set: shards of `KEY.png`, `KEY.txt` (the caption) and `KEY.json` (how the scene was made)."""
