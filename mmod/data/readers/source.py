"""The protocol of image sources: samples with random access."""

from __future__ import annotations

from typing import Any, Protocol

from PIL import Image

from mmod.data.corrupt import Fault


class UnreadableSampleError(Exception):
    """A source cannot read a sample; holds the fault."""

    def __init__(self, fault: Fault):
        super().__init__(str(fault))
        self.fault = fault


class ImageSource(Protocol):
    """Images with a class or caption each, with random access from any process.

    With random access a stream can be shuffled globally, split between processes, and resumed at any batch without
    reading earlier ones.
    """

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def read(self, index: int, mode: str) -> tuple[Image.Image, Any]:
        """Read one sample.

        Args:
            index: Index of the sample.
            mode: PIL mode, "L" or "RGB".

        Returns:
            The decoded image and its class or caption.

        Raises:
            UnreadableSampleError: The image, class or caption cannot be read.
        """
        ...
