"""Decoding: every reader gives the same 8-bit image of a file, or says why it has none; `tests/hostile` has more."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mmod.data.convert.packing import file_extension
from mmod.data.corrupt import CorruptDataError
from mmod.data.readers.images import EXTENSIONS, convert_image, decode_image, open_image
from tests.kit.bad_files import IMAGES
from tests.kit.bad_readers import READERS, read_conversation
from tests.kit.deep_images import DEEP, RAMP, UNSCALED, encode, encode_image


def twelve_bits() -> bytes:
    """Write a TIFF of 12 bits a pixel, which Pillow reads and does not write: 0, 16, 2048 and 4095 in one row."""
    packed = bytes([0x00, 0x00, 0x10, 0x80, 0x0F, 0xFF])
    tags = {256: 4, 257: 1, 258: 12, 259: 1, 262: 1, 273: 8, 277: 1, 278: 1, 279: len(packed)}
    entries = [tag.to_bytes(2, "little") + b"\3\0\1\0\0\0" + value.to_bytes(4, "little") for tag, value in tags.items()]
    start = 8 + len(packed)
    return b"II*\0" + start.to_bytes(4, "little") + packed + bytes([len(tags), 0]) + b"".join(entries) + bytes(4)


@pytest.mark.parametrize("name", DEEP)
def test_16_bits_become_their_upper_8(name: str) -> None:
    for mode in ("L", "RGB"):
        pixels = np.asarray(decode_image(DEEP[name], mode))
        assert np.array_equal(pixels[..., 0] if mode == "RGB" else pixels, RAMP >> 8)


def test_other_depths_of_tiff() -> None:
    assert list(decode_image(twelve_bits(), "L").tobytes()) == [0, 1, 128, 255]
    inverted = encode(RAMP, "TIFF", tiffinfo={262: 0})
    assert np.array_equal(np.asarray(decode_image(inverted, "L")), 255 - (RAMP >> 8))


@given(st.integers(0, 255), st.sampled_from([1, 256, 257]))
def test_grey_and_colour_of_16_bits_agree(value: int, scale: int) -> None:
    # Both usual ways to write 8 bits as 16 come back as they were.
    deep = np.full((2, 2), value * scale, np.uint16)
    header = b"P6 2 2 65535\n" + np.repeat(deep[..., None], 3, -1).astype(">u2").tobytes()
    grey = decode_image(encode(deep, "PNG"), "RGB")
    assert np.asarray(grey)[0, 0, 0] == (value if scale > 1 else 0)
    assert np.abs(np.asarray(decode_image(header, "RGB")).astype(int) - np.asarray(grey)).max() <= 1


@pytest.mark.parametrize("name", UNSCALED)
def test_pixels_of_unknown_range_are_no_image(name: str) -> None:
    with pytest.raises(ValueError, match="whose range the file does not state"):
        decode_image(UNSCALED[name], "RGB")


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
@pytest.mark.parametrize("target", ["L", "RGB"])
def test_images_of_8_bits_are_converted_as_pillow_does(mode: str, target: str) -> None:
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).convert(mode)
    assert convert_image(image, target).tobytes() == image.convert(target).tobytes()


def test_every_format_has_an_extension_that_shards_know() -> None:
    pixels = np.zeros((8, 8, 3), np.uint8)
    for kind, extensions in EXTENSIONS.items():
        assert file_extension(open_image(encode(pixels, kind))) == extensions[0]
    several = encode(pixels, "MPO", save_all=True, append_images=[Image.fromarray(pixels)])
    assert file_extension(open_image(several)) == "jpg"


def test_formats_that_start_other_programs_are_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a program was started"))
    monkeypatch.setattr(subprocess, "check_call", lambda *_, **__: pytest.fail("a program was started"))
    with pytest.raises(ValueError, match="it is damaged or of none of the formats JPEG, PNG"):
        decode_image(encode(np.zeros((8, 8, 3), np.uint8), "EPS"), "RGB")


PLAIN = np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)
OTHER = Image.fromarray(255 - PLAIN)
TURNED = Image.Exif()
TURNED[0x0112] = 6
LOSSLESS = {"lossless": True, "save_all": True, "append_images": [OTHER]}
FIRST = {"save_all": True, "append_images": [OTHER]}
CMYK = Image.fromarray(PLAIN).convert("CMYK")
# What is read of each.
OUTCOMES: dict[str, tuple[bytes, np.ndarray]] = {
    "CMYK": (encode_image(CMYK, "TIFF"), np.asarray(CMYK.convert("RGB"))),
    "16 bits": (DEEP["png"], np.repeat((RAMP >> 8).astype(np.uint8)[..., None], 3, -1)),
    "EXIF orientation": (encode(PLAIN, "PNG", exif=TURNED), np.rot90(PLAIN, -1)),
    "animated PNG": (encode(PLAIN, "PNG", **FIRST), PLAIN),
    "animated WebP": (encode(PLAIN, "WEBP", **LOSSLESS), PLAIN),
    "pages of a TIFF": (encode(PLAIN, "TIFF", **FIRST), PLAIN),
    "transparency": (encode(np.dstack([PLAIN, np.zeros((256, 256), np.uint8)]), "PNG"), PLAIN),
}


@pytest.mark.parametrize("reader", [*READERS, "conversation"])
@pytest.mark.parametrize("name", OUTCOMES)
@pytest.mark.usefixtures("trap_folder")
def test_every_reader_has_one_outcome_for_unusual_images(name: str, reader: str) -> None:
    data, expected = OUTCOMES[name]
    images, _ = READERS.get(reader, read_conversation)(data, "raise", side=256)
    assert np.array_equal(images[0].round().permute(1, 2, 0).numpy().astype(np.uint8), expected)


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.usefixtures("trap_folder")
def test_a_conversation_whose_image_is_none_always_stops(name: str) -> None:
    for on_corrupt in ("raise", "skip"):
        with pytest.raises(CorruptDataError, match=r"0\.png.*image of \d+ bytes cannot be decoded"):
            read_conversation(IMAGES[name], on_corrupt)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_more_pixels_than_a_photograph_has_are_not_decoded(kind: str) -> None:
    with pytest.raises(ValueError, match=r"200000000 pixels\) exceeds limit"):
        decode_image(encode_image(Image.new("1", (20_000, 10_000)), kind), "RGB")
