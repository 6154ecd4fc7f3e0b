"""Sources of streams: images by number."""

from __future__ import annotations

from typing import Any, Protocol

from PIL import Image

from mmod.data.corrupt import Fault


class UnreadableSampleError(Exception):
    """Raised by a source for one sample that cannot be read; carries the fault."""

    def __init__(self, fault: Fault):
        super().__init__(str(fault))
        self.fault = fault


class ImageSource(Protocol):
    """Images and what belongs to each (a class, a caption) by number, in any order and from any process.

    Random access is what makes a stream exact: it can be shuffled globally, split between processes and
    resumed at any batch without reading what comes before.
    """

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def read(self, index: int, mode: str) -> tuple[Image.Image, Any]:
        """Read one sample.

        Args:
            index: Its number.
            mode: PIL mode to convert to, "L" or "RGB".

        Returns:
            The decoded image and its class or caption.

        Raises:
            UnreadableSampleError: If the image or what belongs to it cannot be read.
        """
        ...
