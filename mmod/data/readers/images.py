"""Encoded images: which are read, and how they become the 8-bit images that transforms take.

Every reader and every converter decodes here, so that an image which one of them calls sound is read by all.
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image, UnidentifiedImageError

EXTENSIONS = {
    "JPEG": ("jpg", "jpeg", "jfif"),
    "PNG": ("png",),
    "WEBP": ("webp",),
    "BMP": ("bmp",),
    "PPM": ("ppm", "pgm"),
    "TIFF": ("tif", "tiff"),
    "GIF": ("gif",),
    "JPEG2000": ("jp2",),
    "AVIF": ("avif",),
}
"""Pillow's names of the formats that are read, and their extensions in shards, first the one that is written."""
IMAGE_EXTENSIONS = tuple(extension for extensions in EXTENSIONS.values() for extension in extensions)
MAX_BYTES = 1 << 28
"""Longest file or member of a shard that is read: Pillow's limit of pixels, 3 bytes each."""

# Several photographs in one file, of which the first is a JPEG like any other.
_ALIASES = {"MPO": "JPEG"}
_WHITE_IS_ZERO, _BITS_PER_SAMPLE, _PHOTOMETRIC = 0, 258, 262


def open_image(data: bytes) -> Image.Image:
    """Decode an image completely, as it is stored.

    Formats beyond `EXTENSIONS` are not tried: for some of them Pillow starts other programs. Of an animation or of
    several pages the first is taken. Pixels stay as they are stored: as in timm, torchvision and open_clip, an EXIF
    orientation does not turn them.

    Args:
        data: The encoded file.

    Returns:
        The image, of any mode.

    Raises:
        ValueError: If the bytes are no image that can be read to its end, or it has more pixels than twice Pillow's
            `MAX_IMAGE_PIXELS`.
    """
    Image.init()
    try:
        image = Image.open(io.BytesIO(data), formats=[name for name in EXTENSIONS if name in Image.OPEN])
        image.load()
    except UnidentifiedImageError as error:
        # Its own message names an address in memory, by which one fault met twice would count as two.
        reason = f"it is damaged or of none of the formats {', '.join(EXTENSIONS)}"
        raise ValueError(f"image of {len(data)} bytes cannot be decoded: {reason}") from error
    except Exception as error:
        # Pillow's decoders raise OSError, SyntaxError, struct.error and others on damaged files.
        raise ValueError(f"image of {len(data)} bytes cannot be decoded: {error}") from error
    return image


def convert_image(image: Image.Image, mode: str) -> Image.Image:
    """Convert an image to 8 bits a channel.

    Of 16 bits the upper 8 are kept, as Pillow does in colour; in grey its own conversion makes all above 255 white.

    Args:
        image: An image of any mode.
        mode: PIL mode to convert to, "L" or "RGB".

    Returns:
        The image.

    Raises:
        ValueError: If the file does not state the range of the pixels (32-bit integers and floating-point numbers).
    """
    bits = _grey_bits(image)
    if bits is not None:
        pixels = (np.asarray(image).astype(np.int64) >> (bits - 8)).astype(np.uint8)
        image = Image.fromarray(255 - pixels if _is_inverted(image) else pixels)
    return image.convert(mode)


def decode_image(data: bytes, mode: str) -> Image.Image:
    """Decode an image completely, to 8 bits a channel.

    Args:
        data: The encoded file.
        mode: PIL mode to convert to, "L" or "RGB".

    Returns:
        The image.

    Raises:
        ValueError: If the bytes are no image that can be read to its end and converted.

    Example:
        >>> file = io.BytesIO()
        >>> Image.fromarray(np.array([[0, 300, 65535]], np.uint16)).save(file, format="PNG")
        >>> list(decode_image(file.getvalue(), "L").tobytes())
        [0, 1, 255]
    """
    image = open_image(data)
    try:
        return convert_image(image, mode)
    except ValueError as error:
        raise ValueError(f"image of {len(data)} bytes cannot be decoded: {error}") from error


def file_extension(image: Image.Image) -> str:
    """Return the extension under which shards hold files of an opened image's format."""
    name = image.format or ""
    return EXTENSIONS[_ALIASES.get(name, name)][0]


def is_deep(image: Image.Image) -> bool:
    """Whether an image has more than 8 bits of grey, which few other readers scale."""
    return image.mode.startswith("I") or image.mode == "F"


def _grey_bits(image: Image.Image) -> int | None:
    """Return the bits of a pixel where Pillow's own conversion does not scale them."""
    if not is_deep(image):
        return None
    # Pillow holds 16-bit PPM, and before version 11 PNG, as integers of 32 bits.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return _tag(image, _BITS_PER_SAMPLE, 16)
    kind = "floating-point" if image.mode == "F" else "32-bit or signed"
    raise ValueError(f"{kind} pixels, whose range the file does not state; save it with 8 or 16 bits")


def _is_inverted(image: Image.Image) -> bool:
    # Pillow inverts such images itself where a pixel has up to 8 bits.
    return _tag(image, _PHOTOMETRIC, 1) == _WHITE_IS_ZERO


def _tag(image: Image.Image, number: int, default: int) -> int:
    """Return the first value of a TIFF tag; the default in other formats."""
    value = getattr(image, "tag_v2", {}).get(number, default)
    return int(value[0] if isinstance(value, tuple) else value)
