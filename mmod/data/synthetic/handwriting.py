"""scikit-learn's handwritten digits, in disjoint splits, and the drawing functions of the embedded sets."""

from __future__ import annotations

import gzip
import importlib.util
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
from PIL import Image

from mmod.values import Checked, one_of

SPLITS = ("train", "val", "test")
Scene = TypeVar("Scene", covariant=True)
Box = tuple[int, int, int, int]
"""Left, top, right, bottom in pixels; right and bottom are exclusive."""
_SOURCE_SHARES = {"train": 0.7, "val": 0.1, "test": 0.2}


class SourceDigits(NamedTuple):
    """scikit-learn's digits, read-only: uint8 images (1797, 8, 8), classes (1797), and disjoint indices by split."""

    images: np.ndarray
    labels: np.ndarray
    splits: Mapping[str, np.ndarray]


@lru_cache(maxsize=2)
def load_sources(seed: int = 0) -> SourceDigits:
    """Load the source images, split 70/10/20 and stratified by class; cached per seed."""
    pixels, target = _read_sources()
    images: np.ndarray = np.round(pixels * (255 / 16)).astype(np.uint8)
    # No split has this number, so that samples draw from other generators.
    rng = np.random.default_rng([seed, len(SPLITS)])
    chunks: dict[str, list[np.ndarray]] = {name: [] for name in SPLITS}
    cuts = np.cumsum([_SOURCE_SHARES[name] for name in SPLITS])[:-1]
    # By class, so that every split has all classes in the same shares.
    for label in range(10):
        indices = rng.permutation(np.flatnonzero(target == label))
        ends = np.round(cuts * len(indices)).astype(int)
        for name, chunk in zip(SPLITS, np.split(indices, ends)):
            chunks[name].append(chunk)
    splits = {name: np.sort(np.concatenate(arrays)) for name, arrays in chunks.items()}
    labels: np.ndarray = target.astype(np.int64)
    # Read-only, because all callers share the cached arrays.
    shared: list[np.ndarray] = [images, labels, *splits.values()]
    for array in shared:
        array.flags.writeable = False
    return SourceDigits(images, labels, MappingProxyType(splits))


def _read_sources() -> tuple[np.ndarray, np.ndarray]:
    """Return the images (1797, 8, 8) in [0, 16] and classes of scikit-learn's digits, from its file.

    scikit-learn itself takes a second to import.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
    with gzip.open(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz") as file:
        rows = np.loadtxt(file, delimiter=",")
    images = rows[:, :-1].reshape(-1, 8, 8)
    classes = rows[:, -1].astype(np.int64)
    return images, classes


@dataclass(frozen=True)
class DrawnConfig(Checked):
    """Parameters of all embedded sets; equal parameters give equal bytes.

    Attributes:
        counts: Name of the field with the number of samples per split, each at least `least`.

    Args:
        canvas: Side of an image, in pixels.
        clutter: Number of digit fragments in an image.
        fragment: Smallest and largest side of a fragment, as a share of its digit's box.
        contrast: Lowest and highest ink of a fragment, as a share of the digits' ink.
        shard_size: Samples per shard.
        seed: Seed of the split of the source images and of every sample.
    """

    counts: ClassVar[str] = "scenes"
    least: ClassVar[int] = 1

    canvas: int = 32
    clutter: Annotated[int, "[0, inf)"] = 4
    fragment: tuple[float, float] = (0.2, 0.4)
    contrast: tuple[float, float] = (0.4, 0.8)
    shard_size: Annotated[int, "[1, inf)"] = 1000
    seed: Annotated[int, "[0, inf)"] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("fragment", "contrast"):
            low, high = getattr(self, name)
            if not 0 < low <= high <= 1:
                raise ValueError(f"{name}={(low, high)} must lie in (0, 1], ascending")
        samples = getattr(self, self.counts)
        if set(samples) != set(SPLITS) or min(samples.values()) < self.least:
            raise ValueError(f"{self.counts}={samples} must give each of {SPLITS} a number of at least {self.least}")


class DrawnSamples(Generic[Scene]):
    """The samples of a split, each drawn when it is read: it depends on its index alone."""

    def __init__(self, length: int, draw: Callable[[int], Scene]) -> None:
        self.length = length
        self.draw = draw

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Scene:
        return self.draw(range(self.length)[index])

    def __iter__(self) -> Iterator[Scene]:
        return map(self.draw, range(self.length))


class Painter:
    """Draws the handwriting of one split; random positions are multiples of `grid` pixels."""

    def __init__(self, config: DrawnConfig, split: str, grid: int = 1) -> None:
        one_of("split", split, SPLITS)
        self.config = config
        self.grid = grid
        self.sources = load_sources(config.seed)
        self.pool = self.sources.splits[split]
        self.seeds = (config.seed, SPLITS.index(split))
        """Seeds of everything that is drawn for the split."""
        labels = self.sources.labels[self.pool]
        self.by_class = [self.pool[labels == digit] for digit in range(10)]

    def canvas(self) -> np.ndarray:
        """Return a black image."""
        return np.zeros((self.config.canvas, self.config.canvas), np.uint8)

    def digit(self, source: int, sides: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
        """Return a source image resized to a random side within two limits, both inclusive."""
        side = int(rng.integers(sides[0], sides[1] + 1))
        image = Image.fromarray(self.sources.images[source])
        return np.asarray(image.resize((side, side), Image.Resampling.BILINEAR))

    def clutter(self, canvas: np.ndarray, sides: tuple[int, int], rng: np.random.Generator) -> tuple[int, ...]:
        """Draw fragments of digits with sides in these limits; return the indices of their source images."""
        chosen = tuple(int(source) for source in rng.choice(self.pool, self.config.clutter))
        for source in chosen:
            self.place(canvas, self._fragment(self.digit(source, sides, rng), rng), rng)
        return chosen

    def _fragment(self, digit: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Cut a random rectangle from a digit and scale its ink."""
        side = len(digit)
        low, high = (max(1, round(side * share)) for share in self.config.fragment)
        height, width = rng.integers(low, high + 1, 2)
        top = rng.integers(0, side - height + 1)
        left = rng.integers(0, side - width + 1)
        piece = digit[top : top + height, left : left + width]
        return (piece * rng.uniform(*self.config.contrast)).astype(np.uint8)

    def place(self, canvas: np.ndarray, patch: np.ndarray, rng: np.random.Generator) -> Box:
        """Draw a patch at a random position of a canvas, and return its box."""
        height, width = patch.shape
        steps_down = (canvas.shape[0] - height) // self.grid
        steps_right = (canvas.shape[1] - width) // self.grid
        top = self.grid * int(rng.integers(0, steps_down + 1))
        left = self.grid * int(rng.integers(0, steps_right + 1))
        return paste(canvas, patch, left, top)

    def apart(self, sides: Sequence[int], grid: int, rng: np.random.Generator, gap: int = 0) -> list[Box]:
        """Draw boxes with these sides until none overlap and all centres are `gap` pixels apart horizontally."""
        # Drawn anew as a whole, so that all arrangements that fit are equally likely.
        while True:
            boxes: list[Box] = []
            for side in sides:
                steps = rng.integers(0, (self.config.canvas - side) // grid + 1, 2)
                left, top = (grid * int(step) for step in steps)
                boxes.append((left, top, left + side, top + side))
            if all(_are_apart(one, other, gap) for one, other in combinations(boxes, 2)):
                return boxes


def _are_apart(one: Box, other: Box, gap: int) -> bool:
    # Twice the distance: centres that are doubled need no division.
    distance = abs(one[0] + one[2] - other[0] - other[2])
    if distance < 2 * gap:
        return False
    left_or_right = one[2] <= other[0] or other[2] <= one[0]
    above_or_below = one[3] <= other[1] or other[3] <= one[1]
    return left_or_right or above_or_below


def paste(canvas: np.ndarray, patch: np.ndarray, left: int, top: int) -> Box:
    """Draw a patch over a canvas, in place, and return its box."""
    height, width = patch.shape
    region = canvas[top : top + height, left : left + width]
    # The brighter of both, because digits are white on black.
    np.maximum(region, patch, out=region)
    return left, top, left + width, top + height


def encode_png(image: np.ndarray) -> bytes:
    """Encode grey or RGB values, uint8, (H, W) or (H, W, 3), as a PNG file."""
    png = io.BytesIO()
    Image.fromarray(image).save(png, format="PNG")
    return png.getvalue()
