"""Parts of a source whose samples are spread over its classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from PIL import Image

from mmod.data.readers.source import ImageSource

__all__ = ["LabelledSource", "Subset", "spread"]


class LabelledSource(ImageSource, Protocol):
    """A source that knows the classes of its samples without decoding their images."""

    def labels(self) -> Sequence[int]:
        """Return the class of each sample; -1 where it has several or none that can be read."""
        ...


class Subset:
    """Some samples of a source, spread evenly over its classes.

    Args:
        source: The source.
        count: Samples to take; all where it has no more.
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
    """Choose samples at random, of every class as many as of any other while it has them.

    Args:
        labels: Class of each sample.
        count: Samples to choose; all where there are no more.
        seed: Seed of the draw.

    Returns:
        Numbers of the chosen samples, in rising order.

    Example:
        >>> labels = [0] * 8 + [1, 2]
        >>> [labels[index] for index in spread(labels, 4)]
        [0, 0, 1, 2]
    """
    classes = np.asarray(labels)
    order = np.random.default_rng(seed).permutation(len(classes))
    order = order[np.argsort(classes[order], kind="stable")]
    # The place of each sample within its class: the first of every class come before the second of any.
    first = np.searchsorted(classes[order], classes[order])
    rank = np.empty(len(classes), np.int64)
    rank[order] = np.arange(len(classes)) - first
    turns = np.lexsort((np.random.default_rng([seed, 1]).permutation(len(classes)), rank))
    return np.sort(turns[:count])
