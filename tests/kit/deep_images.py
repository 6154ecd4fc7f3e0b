"""Images of more than 8 bits, in formats that scale them and in formats that do not."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

RAMP = np.arange(65536, dtype=np.uint16).reshape(256, 256)


def encode_image(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format=kind, **options)
    return file.getvalue()


def encode(pixels: np.ndarray, kind: str, **options: Any) -> bytes:
    return encode_image(Image.fromarray(pixels), kind, **options)


DEEP = {
    "png": encode(RAMP, "PNG"),
    "tiff": encode(RAMP, "TIFF"),
    "big-endian tiff": encode(RAMP.astype(">u2"), "TIFF"),
    "pgm": encode(RAMP, "PPM"),
    "jpeg 2000": encode(RAMP, "JPEG2000", irreversible=False),
}
UNSCALED = {
    "float tiff": encode(RAMP.astype(np.float32) / 65535, "TIFF"),
    "32-bit tiff": encode(RAMP.astype(np.int32), "TIFF"),
    "pfm": encode(RAMP.astype(np.float32), "PPM"),
}
