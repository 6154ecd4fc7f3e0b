"""Class-balanced subsets of a source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from PIL import Image

from mmod.data.readers.source import ImageSource

__all__ = ["LabelledSource", "Subset", "spread"]


class LabelledSource(ImageSource, Protocol):
    """A source that returns the classes of its samples without decoding images."""

    def labels(self) -> Sequence[int]:
        """Return the class of each sample; -1 for several classes or an unreadable one."""
        ...


class Subset:
    """A class-balanced subset of a source.

    Args:
        source: The source.
        count: Size of the subset, at most that of the source.
    """

    def __init__(self, source: LabelledSource, count: int) -> None:
        self.source = source
        self.indices = spread(source.labels(), count)

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int, mode: str) -> tuple[Image.Image, Any]:
        """Read one sample; see `ImageSource.read`."""
        return self.source.read(int(self.indices[index]), mode)


def spread(labels: Sequence[int], count: int, seed: int = 0) -> np.ndarray:
    """Draw a class-balanced random subset: equally many samples per class, as long as a class has more.

    Args:
        labels: Class of each sample.
        count: Size of the subset.
        seed: Seed of the draw.

    Returns:
        Indices of the drawn samples, ascending.

    Example:
        >>> labels = [0] * 8 + [1, 2]
        >>> [labels[index] for index in spread(labels, 4)]
        [0, 0, 1, 2]
    """
    classes = np.asarray(labels)
    order = np.random.default_rng(seed).permutation(len(classes))
    order = order[np.argsort(classes[order], kind="stable")]
    # Rank of each sample within its class. Sorted by rank, the first samples of all classes precede all second ones.
    first = np.searchsorted(classes[order], classes[order])
    rank = np.empty(len(classes), np.int64)
    rank[order] = np.arange(len(classes)) - first
    turns = np.lexsort((np.random.default_rng([seed, 1]).permutation(len(classes)), rank))
    return np.sort(turns[:count])
