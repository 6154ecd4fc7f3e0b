"""Image formats, and decoding to 8 bits per channel, the same for all readers and converters."""

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
"""Supported formats by Pillow's name, with their extensions in shards; the first one is written."""
IMAGE_EXTENSIONS = tuple(extension for extensions in EXTENSIONS.values() for extension in extensions)
MAX_BYTES = 1 << 28
"""Maximum size of a file or shard member in bytes: Pillow's pixel limit at 3 bytes per pixel."""

# MPO files hold several photographs; the first is a regular JPEG.
_ALIASES = {"MPO": "JPEG"}
_WHITE_IS_ZERO, _BITS_PER_SAMPLE, _PHOTOMETRIC = 0, 258, 262


def open_image(data: bytes) -> Image.Image:
    """Decode an image completely, in its stored mode; of a file with several the first, without EXIF orientation."""
    Image.init()
    try:
        # Only the formats in `EXTENSIONS`, because Pillow starts other programs for some formats.
        image = Image.open(io.BytesIO(data), formats=[name for name in EXTENSIONS if name in Image.OPEN])
        image.load()
    except UnidentifiedImageError as error:
        # Pillow's message contains a memory address, which would make equal faults count as different.
        reason = f"it is damaged or of none of the formats {', '.join(EXTENSIONS)}"
        raise ValueError(f"image of {len(data)} bytes cannot be decoded: {reason}") from error
    except Exception as error:
        # Pillow's decoders raise OSError, SyntaxError, struct.error and others on damaged files.
        raise ValueError(f"image of {len(data)} bytes cannot be decoded: {error}") from error
    return image


def convert_image(image: Image.Image, mode: str) -> Image.Image:
    """Convert an image to 8 bits per channel, mode "L" or "RGB"."""
    bits = _grey_bits(image)
    if bits is not None:
        # The upper 8 bits, as Pillow does for colour. For grey, Pillow would turn all values above 255 white.
        pixels = (np.asarray(image).astype(np.int64) >> (bits - 8)).astype(np.uint8)
        image = Image.fromarray(255 - pixels if _is_inverted(image) else pixels)
    return image.convert(mode)


def decode_image(data: bytes, mode: str) -> Image.Image:
    """Decode an image completely, to 8 bits per channel, mode "L" or "RGB"."""
    image = open_image(data)
    try:
        return convert_image(image, mode)
    except ValueError as error:
        raise ValueError(f"image of {len(data)} bytes cannot be decoded: {error}") from error


def file_extension(image: Image.Image) -> str:
    """Return the extension in shards for the format of an opened image."""
    name = image.format or ""
    return EXTENSIONS[_ALIASES.get(name, name)][0]


def is_deep(image: Image.Image) -> bool:
    """Return whether an image has more than 8 bits of grey, which few other readers scale correctly."""
    return image.mode.startswith("I") or image.mode == "F"


def _grey_bits(image: Image.Image) -> int | None:
    """Return the bits per pixel if Pillow's conversion does not scale them; None otherwise."""
    if not is_deep(image):
        return None
    # Pillow holds 16-bit PPM, and before version 11 PNG, as integers of 32 bits.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return _tag(image, _BITS_PER_SAMPLE, 16)
    pixel_type = "floating-point" if image.mode == "F" else "32-bit or signed"
    raise ValueError(f"{pixel_type} pixels, whose range the file does not state; save it with 8 or 16 bits")


def _is_inverted(image: Image.Image) -> bool:
    # TIFF photometric 0 means white is zero. Pillow inverts such images itself up to 8 bits.
    return _tag(image, _PHOTOMETRIC, 1) == _WHITE_IS_ZERO


def _tag(image: Image.Image, number: int, default: int) -> int:
    """Return the first value of a TIFF tag; the default in other formats."""
    value = getattr(image, "tag_v2", {}).get(number, default)
    return int(value[0] if isinstance(value, tuple) else value)
