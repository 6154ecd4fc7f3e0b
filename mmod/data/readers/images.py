"""Sources of images, their files and formats, and decoding to 8 bits per channel, the same for all readers."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from mmod.data.corrupt import UnusableError
from mmod.data.labels import UNLABELLED
from mmod.io.files import check_regular
from mmod.values import IGNORED

EXTENSIONS = {
    "JPEG": ("jpg", "jpeg", "jfif", "jpe"),
    "PNG": ("png", "apng"),
    "WEBP": ("webp",),
    "BMP": ("bmp",),
    "PPM": ("ppm", "pgm", "pbm", "pnm"),
    "TIFF": ("tif", "tiff"),
    "GIF": ("gif",),
    "JPEG2000": ("jp2", "j2k", "jpx"),
    "AVIF": ("avif",),
}
"""Supported formats by Pillow's name, with their extensions in folders and shards; the first one is written."""
IMAGE_EXTENSIONS = tuple(chain.from_iterable(EXTENSIONS.values()))
MAX_BYTES = 1 << 28
"""Maximum size of a file or shard member in bytes: Pillow's pixel limit at 3 bytes per pixel."""

_NOT_FOUND = "image not found"
_OUTSIDE = "image outside the folder"
_WHITE_IS_ZERO = 0
_BITS_PER_SAMPLE = 258
_PHOTOMETRIC = 262


def identify_image(data: bytes) -> Image.Image:
    """Open an image without decoding it, of the formats in `EXTENSIONS`: Pillow starts other programs for some."""
    Image.init()
    return Image.open(io.BytesIO(data), formats=[name for name in EXTENSIONS if name in Image.OPEN])


@contextmanager
def _decoding(data: bytes) -> Iterator[None]:
    """Turn errors of an image's bytes into a ValueError."""
    try:
        yield
    # Pillow's decoders raise OSError, SyntaxError, struct.error and others on damaged files.
    except Exception as error:
        reason = str(error)
        if isinstance(error, UnidentifiedImageError):
            # Pillow's message contains a memory address, which would make equal faults count as different.
            reason = f"it is damaged or of none of the formats {', '.join(EXTENSIONS)}"
        raise ValueError(f"image of {len(data)} bytes cannot be decoded: {reason}") from error


def open_image(data: bytes) -> Image.Image:
    """Decode an image completely, upright, in its stored mode; of a file with several the first."""
    with _decoding(data):
        image = identify_image(data)
        image.load()
    return turn_upright(image)


def turn_upright(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation of a decoded image in place, and return it; every reader of pictures and maps does."""
    try:
        ImageOps.exif_transpose(image, in_place=True)
    except MemoryError:
        raise
    except Exception:
        # Pillow's parser of EXIF raises errors of many types. Metadata that cannot be parsed states no orientation.
        return image
    return image


def convert_image(image: Image.Image, mode: str) -> Image.Image:
    """Convert an image to 8 bits per channel, mode "L" or "RGB"."""
    bits = _grey_bits(image)
    if bits is not None:
        # The upper 8 bits, as Pillow does for colour. For grey, Pillow would turn all values above 255 white.
        values = np.asarray(image).astype(np.int64)
        pixels = (values >> (bits - 8)).astype(np.uint8)
        # TIFF photometric 0 means white is zero. Pillow inverts such images itself up to 8 bits.
        if _tag(image, _PHOTOMETRIC, 1) == _WHITE_IS_ZERO:
            pixels = 255 - pixels
        image = Image.fromarray(pixels)
    return image.convert(mode)


def decode_image(data: bytes, mode: str) -> Image.Image:
    """Decode an image completely, to 8 bits per channel, mode "L" or "RGB"."""
    image = open_image(data)
    with _decoding(data):
        return convert_image(image, mode)


def is_deep(image: Image.Image) -> bool:
    """Return whether an image has more than 8 bits of grey, which few other readers scale correctly."""
    return image.mode.startswith("I") or image.mode == "F"


def _grey_bits(image: Image.Image) -> int | None:
    """Return the bits per pixel if Pillow's conversion does not scale them; None otherwise."""
    if not is_deep(image):
        return None
    # Pillow holds 16-bit PPM, and before version 11 PNG, as integers of 32 bits.
    is_wide = image.mode == "I" and image.format in ("PNG", "PPM")
    if is_wide or image.mode.startswith("I;16"):
        return _tag(image, _BITS_PER_SAMPLE, 16)
    pixel_type = "floating-point" if image.mode == "F" else "32-bit or signed"
    raise ValueError(f"{pixel_type} pixels, whose range the file does not state; save it with 8 or 16 bits")


def _tag(image: Image.Image, number: int, default: int) -> int:
    """Return the first value of a TIFF tag; the default in other formats."""
    value = getattr(image, "tag_v2", {}).get(number, default)
    if isinstance(value, tuple):
        value = value[0]
    return int(value)


class ImageFiles:
    """Image files of a folder, by the paths of a data set.

    Args:
        folder: The folder; it is listed once, which is much faster than one disk request per file.
        follow_links: Also accept files outside the folder that symbolic links in it point to.
    """

    def __init__(self, folder: str | Path, follow_links: bool = False) -> None:
        self.folder = str(folder)
        # Links that lead outside are refused by their real path, unless the user follows them.
        self._resolve = os.path.abspath if follow_links else os.path.realpath
        self._root = self._resolve(self.folder)
        self._listed: dict[str, frozenset[str]] = {}

    def locate(self, name: str) -> str:
        """Return the path of an image in the folder; an `UnusableError` unless it is a regular file there."""
        path = os.path.join(self.folder, name)
        parent, base = os.path.split(path)
        # One listing of a folder in place of a request to the file system for each image.
        if parent not in self._listed:
            self._listed[parent] = self._list(parent)
        if base not in self._listed[parent]:
            # A symbolic link, or no regular file.
            with _faults_of(path):
                if not self._is_inside(path):
                    raise UnusableError(_OUTSIDE, f"{path} is not in {self.folder}")
                check_regular(path)
        return path

    def hint(self, reasons: Iterable[str], items: int, option: str = "`images`") -> str:
        """Say what to do if images of most items are not found, by the reasons why some cannot be used; else empty.

        Args:
            option: How a user names the folder.
        """
        if 2 * sum(reason.startswith((_NOT_FOUND, _OUTSIDE)) for reason in reasons) <= items:
            return ""
        return f"the images are looked for in {self.folder!r}: name the folder of their paths by {option}"

    def _list(self, folder: str) -> frozenset[str]:
        """Return the names of the regular files of a folder inside the root; links are left out."""
        try:
            if not self._is_inside(folder):
                return frozenset()
            with os.scandir(folder) as entries:
                return frozenset(entry.name for entry in entries if entry.is_file(follow_symlinks=False))
        except (OSError, ValueError):
            return frozenset()

    def _is_inside(self, path: str) -> bool:
        return os.path.commonpath([self._root, self._resolve(path)]) == self._root


def read_image(path: str) -> bytes:
    """Read an image of at most `MAX_BYTES` from a regular file; an `UnusableError` if that is impossible."""
    with _faults_of(path):
        check_regular(path)
        if os.path.getsize(path) > MAX_BYTES:
            raise UnusableError("image file too long", f"{path} has more than {MAX_BYTES} bytes")
        with open(path, "rb") as file:
            return file.read(MAX_BYTES)


@contextmanager
def _faults_of(path: str) -> Iterator[None]:
    """Turn errors of a file into `UnusableError`s with one of a few reasons."""
    try:
        yield
    except UnusableError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UnusableError(_NOT_FOUND, path) from error
    except (OSError, ValueError) as error:
        # ValueError: a name that no file can have (such messages lack the path), or no regular file.
        details = str(error)
        if path not in details:
            details = f"{path!a}: {details}"
        raise UnusableError("image cannot be read", details) from error


Target = int | list[int] | str
"""What a sample is trained on: its class, the classes of its patches, or its caption."""


class ImageSource(Protocol):
    """Images with a class or caption each, with random access from any process."""

    def __len__(self) -> int: ...

    def read(self, index: int, mode: str) -> tuple[Image.Image, Target]:
        """Read the image, in mode "L" or "RGB", and the class or caption.

        An OSError or ValueError is a fault of the sample, a CorruptDataError one of the whole source.
        """

    def place(self, index: int) -> tuple[str, str]:
        """Return the file that a sample is in and its name there, empty for all of the file, as a `Fault` has them."""


@dataclass(eq=False)
class Subset:
    """The samples of a source at some indices (S)."""

    source: ImageSource
    indices: np.ndarray

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int, mode: str) -> tuple[Image.Image, Target]:
        """Read one sample; see `ImageSource.read`."""
        return self.source.read(int(self.indices[index]), mode)

    def place(self, index: int) -> tuple[str, str]:
        """Return where a sample is; see `ImageSource.place`."""
        return self.source.place(int(self.indices[index]))

    def labels(self) -> list[int]:
        """Return the class of every sample, of a source that has classes."""
        # Captions are no classes, so that not every source has them.
        classes: Sequence[int] = self.source.labels()  # type: ignore[attr-defined]
        return [classes[index] for index in self.indices]


def patch_classes(labels_HH: np.ndarray, side: int) -> list[int]:
    """Return the most frequent class of each patch of a square label map, row by row; the lowest in a tie.

    Args:
        labels_HH: Class of each pixel. Pixels of value `UNLABELLED` are not counted.
        side: Side of a patch in pixels; divides that of the map.

    Returns:
        A class for each patch; `IGNORED` for a patch without a labelled pixel.

    Raises:
        ValueError: No pixel of the map has a class.

    Example:
        >>> patch_classes(np.array([[0, 0, 3, 3], [0, 1, 3, 1], [2, 2, 255, 255], [2, 2, 255, 255]]), side=2)
        [0, 3, 2, -100]
    """
    steps = len(labels_HH) // side
    # To (patches, their pixels): split both axes, and bring the two patch axes together.
    grid = labels_HH.reshape(steps, side, steps, side).swapaxes(1, 2)
    patches = grid.reshape(steps**2, side**2)
    labelled = patches != UNLABELLED
    known = labelled.any(1)
    if not known.any():
        raise ValueError(f"the label map has no pixel with a class: all are {UNLABELLED}")
    last = int(patches[labelled].max())
    counts = [(patches == label).sum(1) for label in range(last + 1)]
    # `argmax` takes the first maximum, which is the lowest class.
    most = np.argmax(counts, axis=0)
    return [int(label) for label in np.where(known, most, IGNORED)]
