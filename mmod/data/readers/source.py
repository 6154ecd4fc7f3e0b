"""Image sources: samples with random access, and class-balanced subsets of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from PIL import Image

from mmod.data.corrupt import Fault


class UnreadableSampleError(Exception):
    """A source cannot read a sample; holds the fault."""

    def __init__(self, fault: Fault):
        super().__init__(str(fault))
        self.fault = fault


class ImageSource(Protocol):
    """Images with a class or caption each, with random access from any process."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def read(self, index: int, mode: str) -> tuple[Image.Image, Any]:
        """Read the image, in mode "L" or "RGB", and the class or caption; an `UnreadableSampleError` if that fails."""
        ...


class LabelledSource(ImageSource, Protocol):
    """A source that returns the classes of its samples without decoding images."""

    def labels(self) -> Sequence[int]:
        """Return the class of each sample; -1 for several classes or an unreadable one."""
        ...


class Subset:
    """A class-balanced subset of a source, of at most `count` samples."""

    def __init__(self, source: LabelledSource, count: int) -> None:
        self.source = source
        self.indices = spread(source.labels(), count)

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int, mode: str) -> tuple[Image.Image, Any]:
        """Read one sample; see `ImageSource.read`."""
        return self.source.read(int(self.indices[index]), mode)


def spread(labels: Sequence[int], count: int, seed: int = 0) -> np.ndarray:
    """Draw `count` indices, ascending: equally many of each class, as long as a class has more."""
    classes = np.asarray(labels)
    order = np.random.default_rng(seed).permutation(len(classes))
    order = order[np.argsort(classes[order], kind="stable")]
    # Rank of each sample within its class. Sorted by rank, the first samples of all classes precede all second ones.
    first = np.searchsorted(classes[order], classes[order])
    rank = np.empty(len(classes), np.int64)
    rank[order] = np.arange(len(classes)) - first
    turns = np.lexsort((np.random.default_rng([seed, 1]).permutation(len(classes)), rank))
    return np.sort(turns[:count])
