"""Redundancy of images is that of a plain loop over patches, and says what is wrong with what is no image."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmod


def defined(images: np.ndarray, side: int, tolerance: float) -> tuple[float, float, float]:
    """Return the shares of a batch (B, C, H, W), patch by patch."""
    flat, kept = [], {0.99: [], 0.95: []}
    limit = tolerance * (images.max() - images.min())
    for image in images:
        rows, columns = image.shape[1] // side, image.shape[2] // side
        patches = [
            image[:, r * side : (r + 1) * side, c * side : (c + 1) * side] for r in range(rows) for c in range(columns)
        ]
        flat.append(np.mean([all(channel.std() <= limit for channel in patch) for patch in patches]))
        variances = sorted((sum(channel.var() for channel in patch) for patch in patches), reverse=True)
        for share, counts in kept.items():
            held, count = 0.0, 0
            while held < share * sum(variances):
                held, count = held + variances[count], count + 1
            counts.append(max(count, 1) / len(patches))
    return float(np.mean(flat)), float(np.mean(kept[0.99])), float(np.mean(kept[0.95]))


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 3),
    channels=st.integers(1, 3),
    rows=st.integers(1, 5),
    columns=st.integers(1, 5),
    side=st.integers(1, 6),
    empty=st.floats(0, 1),
    seed=st.integers(0, 2**16),
)
def test_shares_are_those_of_a_loop(
    batch: int, channels: int, rows: int, columns: int, side: int, empty: float, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    images = generator.normal(size=(batch, channels, rows * side, columns * side))
    images[..., : int(empty * columns * side)] *= 1e-3
    result = mmod.redundancy(torch.from_numpy(images), side)
    assert (result.images, result.patch_size) == (batch, side)
    assert (result.flat, result.kept_99, result.kept_95) == pytest.approx(defined(images, side, 0.01), abs=1e-9)


def test_batches_count_by_their_images() -> None:
    full, flat = torch.rand(3, 1, 8, 8), torch.zeros(1, 1, 8, 8)
    assert mmod.redundancy([full, flat], 4).flat == 0.25
    assert mmod.redundancy(flat, 4) == mmod.analysis.RedundancyReport(1, 4, 1.0, 0.25, 0.25)


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4), seed=st.integers(0, 2**16))
def test_batches_do_not_matter(sizes: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Images of very different contrast, so that the range of a batch is not that of all images.
    contrast = torch.logspace(-4, 2, sum(sizes))[:, None, None, None]
    images = contrast * torch.randn(sum(sizes), 2, 12, 12, generator=generator)
    together = mmod.redundancy(images, 4)
    batched = mmod.redundancy(iter(images.split(sizes)), 4)
    assert batched.images == together.images
    shares = [(result.flat, result.kept_99, result.kept_95) for result in (batched, together)]
    assert shares[0] == pytest.approx(shares[1])


def test_noise_is_not_redundant_and_one_colour_is() -> None:
    noise = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    result = mmod.redundancy(noise, 8)
    assert (result.flat, result.kept_99) == (0, 1)
    colours = torch.rand(4, 3, 1, 1).expand(-1, -1, 32, 32)
    assert mmod.redundancy(colours, 8) == mmod.analysis.RedundancyReport(4, 8, 1.0, 1 / 16, 1 / 16)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([], "at least one batch"),
        (torch.zeros(2, 8, 8), r"\(B, C, H, W\) of at least 4 pixels, got \(2, 8, 8\)"),
        (torch.zeros(2, 1, 3, 8), "at least 4 pixels"),
        (torch.rand(1, 3, 15, 16), r"15 x 16 pixels are no multiples of patch_size=4: crop them, as to 12 x 16"),
        (torch.zeros(0, 3, 8, 8), r"got \(0, 3, 8, 8\)"),
        (torch.full((1, 1, 4, 4), torch.nan), "must be finite"),
        (["image.png"], "got str"),
        (torch.zeros(1, 1, 4, 4, dtype=torch.uint8), "floating-point"),
    ],
    ids=["none", "one image", "small", "no multiple", "empty", "nan", "a path", "integers"],
)
def test_what_is_no_image_is_refused(images: object, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        mmod.redundancy(images, 4)  # type: ignore[arg-type]
