"""One bootstrap for audits and studies: the same images in each draw, and figures that stay as they were."""

from __future__ import annotations

import numpy as np
import pytest

from mmod.analysis.statistics import Resampling, estimate_of, resampled_means

# What both bootstraps gave before they became one: value, and the ends of both intervals.
FIGURES = [
    (5003, 2000, 0, "0x1.4711a645596afp-8", "-0x1.7fdbe43d93f6bp-6", "0x1.141c24548ac17p-5"),
    (5003, 901, 7, "0x1.4711a645596afp-8", "-0x1.5ce722ab64168p-6", "0x1.1d881917737bdp-5"),
    (17, 300, 1, "-0x1.7d872197d5513p-3", "-0x1.93dcb95b44333p-1", "0x1.8e4d0cad9bd85p-2"),
]


@pytest.mark.parametrize(("images", "draws", "seed", "value", "low", "high"), FIGURES)
def test_figures_of_a_seed_stay(images: int, draws: int, seed: int, value: str, low: str, high: str) -> None:
    values = np.random.default_rng(3).normal(size=5003)[:images]
    found = Resampling(images, draws, seed).mean(values)
    expected = [float.fromhex(text) for text in (value, low, high)]
    # Products of matrices are summed in an order that depends on the processor.
    assert [found.mean, found.low, found.high] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("images", "draws", "seed"), [figures[:3] for figures in FIGURES])
def test_studies_and_audits_draw_the_same_images(images: int, draws: int, seed: int) -> None:
    values = np.random.default_rng(3).normal(size=images)
    audit = estimate_of(values.mean(), resampled_means(values[:, None], draws, seed)[:, 0])
    study = Resampling(images, draws, seed).mean(values)
    # Studies hold all draws at once, in single precision.
    assert (study.low, study.high) == pytest.approx((audit.low, audit.high), rel=1e-6)
