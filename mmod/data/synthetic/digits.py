"""Cluttered digits: a data set made from scikit-learn's handwritten digits, most of which is background.

One target digit lies at a random position and scale on a larger canvas, among fragments of other digits.
A model must find the digit before it can read it, and most tokens never matter: a small and fast test for
models that choose where to compute. The source images are split before scenes are composed, so that no
handwriting, not even as clutter, crosses from one split to another.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import starmap
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from mmod.data.synthetic.build import MANIFEST as MANIFEST
from mmod.data.synthetic.build import ShardSet, build_shards

SPLITS = ("train", "val", "test")
# Raise this whenever the same parameters would give other bytes: an older build is then refused, not mixed.
FORMAT = 1
_SOURCE_SHARES = {"train": 0.7, "val": 0.1, "test": 0.2}


def check_fragments(fragment: tuple[float, float], contrast: tuple[float, float]) -> None:
    """Raise a ValueError unless the sides and the ink of fragments are shares, the smaller one first.

    Args:
        fragment: Smallest and largest side of a fragment, as a share of its digit's box.
        contrast: Faintest and strongest ink of a fragment, as a share of the digits'.
    """
    for name, (low, high) in (("fragment", fragment), ("contrast", contrast)):
        if not 0 < low <= high <= 1:
            raise ValueError(f"{name}={(low, high)} must lie in (0, 1], ascending")


@dataclass(frozen=True)
class DigitsConfig:
    """The parameters of one build; equal parameters give equal bytes.

    Args:
        canvas: Side of a scene, in pixels.
        digit_size: Smallest and largest side of the target digit's box, in pixels.
        clutter: Number of digit fragments in a scene.
        fragment: Smallest and largest side of a fragment, as a share of its digit's box.
        contrast: Faintest and strongest ink of a fragment, as a share of the target's.
        scenes: Number of scenes of each split.
        shard_size: Scenes in one shard.
        seed: Seed of the split of the source images and of every scene.
        grid: Digits and fragments lie at multiples of so many pixels.

    Raises:
        ValueError: If a parameter is out of range.
    """

    canvas: int = 32
    digit_size: tuple[int, int] = (14, 18)
    clutter: int = 4
    fragment: tuple[float, float] = (0.2, 0.4)
    contrast: tuple[float, float] = (0.4, 0.8)
    scenes: dict[str, int] = field(default_factory=lambda: {"train": 16000, "val": 1000, "test": 2000})
    shard_size: int = 2000
    seed: int = 0
    grid: int = 1

    def __post_init__(self) -> None:
        smallest, largest = self.digit_size
        if not 4 <= smallest <= largest <= self.canvas:
            raise ValueError(f"digit_size={self.digit_size} must lie in [4, canvas={self.canvas}], ascending")
        check_fragments(self.fragment, self.contrast)
        if set(self.scenes) != set(SPLITS) or min(self.scenes.values()) < 1:
            raise ValueError(f"scenes={self.scenes} must give a positive number for each of {SPLITS}")
        if self.clutter < 0 or self.seed < 0:
            raise ValueError(f"clutter={self.clutter} and seed={self.seed} must be >= 0")
        if self.shard_size < 1 or self.grid < 1:
            raise ValueError(f"shard_size={self.shard_size} and grid={self.grid} must be >= 1")


_HARD: dict[str, Any] = {
    "fragment": (0.25, 0.5),
    "contrast": (0.6, 1.0),
    "scenes": {"train": 64000, "val": 2000, "test": 4000},
}
LEVELS: dict[str, DigitsConfig] = {
    "default": DigitsConfig(),
    "tiny": DigitsConfig(scenes={"train": 256, "val": 64, "test": 64}, shard_size=64),
    "aligned": DigitsConfig(
        digit_size=(16, 16), scenes={"train": 5000, "val": 500, "test": 1000}, shard_size=500, grid=4
    ),
    "hard": DigitsConfig(digit_size=(10, 18), clutter=12, **_HARD),
    "64": DigitsConfig(canvas=64, digit_size=(14, 28), clutter=24, **_HARD),
    "96": DigitsConfig(canvas=96, digit_size=(14, 36), clutter=48, **_HARD),
}
"""Named parameter sets: `aligned` learns in two minutes on one core, `default` in minutes on two, `tiny` is for tests,
the others want a GPU."""


class Scene(NamedTuple):
    """One composed image and how it was made.

    Attributes:
        image: Grey values, uint8, (canvas, canvas).
        label: Class of the target digit, 0 to 9.
        target: Index of the target among the source images.
        box: Left, top, right, bottom of the target, in pixels, right and bottom exclusive.
        clutter: Indices of the source images that the fragments were cut from.
    """

    image: np.ndarray
    label: int
    target: int
    box: tuple[int, int, int, int]
    clutter: tuple[int, ...]


class SourceDigits(NamedTuple):
    """scikit-learn's digits and their split, read-only.

    Attributes:
        images: Grey values, uint8, (1797, 8, 8).
        labels: Classes, (1797,).
        splits: Split name -> indices of its images; disjoint, together all of them.
    """

    images: np.ndarray
    labels: np.ndarray
    splits: Mapping[str, np.ndarray]


@lru_cache(maxsize=2)
def load_sources(seed: int = 0) -> SourceDigits:
    """Load the source images and split them 70/10/20, stratified by class; a process does so once for a seed.

    Args:
        seed: Seed of the split.

    Returns:
        Images, labels and the indices of each split.

    Example:
        >>> sources = load_sources()
        >>> {name: len(indices) for name, indices in sources.splits.items()}
        {'train': 1258, 'val': 180, 'test': 359}
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)
    rng = np.random.default_rng([seed, len(SPLITS)])
    parts: dict[str, list[np.ndarray]] = {name: [] for name in SPLITS}
    cuts = np.cumsum([_SOURCE_SHARES[name] for name in SPLITS])[:-1]
    for label in range(10):
        indices = rng.permutation(np.flatnonzero(digits.target == label))
        for name, part in zip(SPLITS, np.split(indices, np.round(cuts * len(indices)).astype(int))):
            parts[name].append(part)
    splits = {name: np.sort(np.concatenate(part)) for name, part in parts.items()}
    labels = digits.target.astype(np.int64)
    # All callers share them.
    for array in (images, labels, *splits.values()):
        array.flags.writeable = False
    return SourceDigits(images, labels, MappingProxyType(splits))


def compose_scenes(config: DigitsConfig, split: str) -> Iterator[Scene]:
    """Compose the scenes of one split, each from its own seed.

    Args:
        config: Parameters of the build.
        split: One of `SPLITS`.

    Yields:
        `config.scenes[split]` scenes. Every source image of the split is a target equally often.

    Raises:
        ValueError: If the split is unknown.

    Example:
        >>> scene = next(compose_scenes(LEVELS["tiny"], "test"))
        >>> scene.image.shape, 0 <= scene.label <= 9
        ((32, 32), True)
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is unknown; valid: {', '.join(SPLITS)}")
    sources = load_sources(config.seed)
    split_seed = SPLITS.index(split)
    targets = np.random.default_rng([config.seed, split_seed]).permutation(sources.splits[split])
    for index in range(config.scenes[split]):
        rng = np.random.default_rng([config.seed, split_seed, index])
        yield _compose(config, sources, sources.splits[split], int(targets[index % len(targets)]), rng)


def _compose(
    config: DigitsConfig, sources: SourceDigits, pool: np.ndarray, target: int, rng: np.random.Generator
) -> Scene:
    canvas = np.zeros((config.canvas, config.canvas), np.uint8)
    clutter = rng.choice(pool, config.clutter)
    for source in clutter:
        digit = scale_digit(sources.images[source], config.digit_size, rng)
        paste(canvas, cut_fragment(digit, config.fragment, config.contrast, rng), rng, config.grid)
    box = paste(canvas, scale_digit(sources.images[target], config.digit_size, rng), rng, config.grid)
    return Scene(canvas, int(sources.labels[target]), target, box, tuple(int(source) for source in clutter))


def scale_digit(digit: np.ndarray, sides: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Resize a square image to a side drawn between two, both included."""
    side = int(rng.integers(sides[0], sides[1] + 1))
    return np.asarray(Image.fromarray(digit).resize((side, side), Image.Resampling.BILINEAR))


def cut_fragment(
    digit: np.ndarray, shares: tuple[float, float], contrast: tuple[float, float], rng: np.random.Generator
) -> np.ndarray:
    """Cut a rectangle from a digit, with sides that are drawn shares of the digit's and ink of a drawn strength."""
    side = len(digit)
    low, high = (max(1, round(side * share)) for share in shares)
    height, width = rng.integers(low, high + 1, 2)
    top, left = rng.integers(0, side - height + 1), rng.integers(0, side - width + 1)
    piece = digit[top : top + height, left : left + width]
    return (piece * rng.uniform(*contrast)).astype(np.uint8)


def paste(canvas: np.ndarray, patch: np.ndarray, rng: np.random.Generator, grid: int = 1) -> tuple[int, int, int, int]:
    """Draw a patch at a random place of a canvas, in place; return its left, top, right and bottom.

    Args:
        canvas: Grey values (rows, columns).
        patch: Grey values of the patch, no larger.
        rng: Draws the place.
        grid: Its upper left corner lies at multiples of so many pixels.
    """
    height, width = patch.shape
    top = grid * int(rng.integers(0, (canvas.shape[0] - height) // grid + 1))
    left = grid * int(rng.integers(0, (canvas.shape[1] - width) // grid + 1))
    region = canvas[top : top + height, left : left + width]
    np.maximum(region, patch, out=region)
    return left, top, left + width, top + height


def build_digits(root: str | Path, config: DigitsConfig | None = None, progress: bool = False) -> dict[str, Any]:
    """Write the shards of a build, or find them already written.

    The shards are written to a temporary folder beside `root` which takes the place of `root` once complete, so an
    interrupted build leaves nothing that could be taken for one. Processes that ask for the same build at
    once wait for the first. Shards hold `KEY.png`, `KEY.cls` and `KEY.json` (how the scene was made).

    Args:
        root: Folder of the build. It must not exist, be empty, or hold a build with the same parameters.
        config: Parameters; `LEVELS["default"]` when not given.
        progress: Show a progress bar.

    Returns:
        The manifest: `format`, `parameters` and, for each shard, its `samples` and `sha256`.

    Raises:
        FileExistsError: If `root` holds another build or files that are no build.
        ValueError: If `root` holds the right build but a shard of it is damaged.

    Example:
        >>> import tempfile
        >>> manifest = build_digits(tempfile.mkdtemp(), LEVELS["tiny"])
        >>> sorted(manifest["shards"])[:2]
        ['test-000000.tar', 'train-000000.tar']
    """
    config = config or LEVELS["default"]

    def compose(split: str) -> Iterator[dict[str, Any]]:
        return starmap(_members, enumerate(compose_scenes(config, split)))

    scenes = {split: config.scenes[split] for split in SPLITS}
    parameters = asdict(config)
    if config.grid == 1:
        # Builds from before there was a grid have no such entry, and the same bytes.
        del parameters["grid"]
    wanted = ShardSet("cluttered digits", FORMAT, parameters, scenes, config.shard_size, 6, compose)
    return build_shards(root, wanted, progress)


def _members(index: int, scene: Scene) -> dict[str, Any]:
    made = {"target": scene.target, "box": scene.box, "clutter": scene.clutter}
    return {
        "__key__": f"{index:06d}",
        "png": encode_png(scene.image),
        "cls": str(scene.label).encode(),
        "json": json.dumps(made).encode(),
    }


def encode_png(image: np.ndarray) -> bytes:
    """Encode grey or RGB values, uint8, (H, W) or (H, W, 3), as a PNG file."""
    png = io.BytesIO()
    Image.fromarray(image).save(png, format="PNG")
    return png.getvalue()


def save_montage(path: str | Path, config: DigitsConfig | None = None, columns: int = 8, rows: int = 4) -> None:
    """Save a picture of the first test scenes.

    Args:
        path: PNG file to write.
        config: Parameters; `LEVELS["default"]` when not given.
        columns: Scenes in a row.
        rows: Number of rows.

    Raises:
        FileExistsError: If the file exists.
    """
    config = config or LEVELS["default"]
    scale, gap = max(1, 96 // config.canvas), 4
    cell = config.canvas * scale + gap
    sheet = np.full((rows * cell + gap, columns * cell + gap), 255, np.uint8)
    for index, scene in zip(range(rows * columns), compose_scenes(config, "test")):
        top, left = gap + index // columns * cell, gap + index % columns * cell
        large = scene.image.repeat(scale, axis=0).repeat(scale, axis=1)
        sheet[top : top + len(large), left : left + len(large)] = large
    with open(path, "xb") as file:
        Image.fromarray(sheet).save(file, format="PNG", optimize=True)
