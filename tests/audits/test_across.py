"""What decisions have in common: early exit and choices of single blocks are told apart, and counts are exact."""

from __future__ import annotations

import re

import pytest
import torch

import mmod
from mmod.analysis.statistics import Resampling, adjusted, sign_test
from mmod.audits.across import across_of
from tests.kit.decisions import decided
from tests.kit.zoo import make_images, make_model

NAME = "vit_tiny_patch16_224"
PLANTED = {
    # Blocks that share a score and keep fewer and fewer: who is dropped stays so.
    "early exit": mmod.RoutingConfig(router="attention", blocks=(1, 2, 3), capacity=(0.75, 0.5, 0.25)),
    "block-specific": mmod.RoutingConfig(router="random", blocks=(1, 3), capacity=0.4),
    "one decision": mmod.RoutingConfig(router="attention", blocks=(1, 2, 3)),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_planted_decisions_are_told_apart(kind: str) -> None:
    model = mmod.route_(make_model(NAME), PLANTED[kind])
    batches = [(make_images(NAME, 40, seed), torch.arange(40) % 7) for seed in range(2)]
    effects = mmod.audit(model, batches, mmod.AuditConfig(conditions=["random"], draws=1, resamples=100)).across
    assert effects.kind == kind
    assert sum(map(len, effects.blocks.values())) == len(mmod.routed_blocks(model))


def test_counts_are_those_of_a_slow_definition() -> None:
    keeps = {f"blocks.{block}": torch.rand(30, 11) < 0.4 for block in (1, 2, 4)}
    free = torch.ones(30, 11, dtype=torch.bool)
    free[:, 0] = False
    routed = ["blocks.1", "blocks.2", "blocks.3", "blocks.4"]
    actual = across_of(decided(keeps, free, sizes=(7, 13, 10)), routed)
    names = list(keeps)
    assert actual.blocks == {"blocks.1": ["blocks.1"], "blocks.2": ["blocks.2", "blocks.3"], "blocks.4": ["blocks.4"]}
    for i, first in enumerate(names):
        assert actual.kept[first].value == pytest.approx(float(keeps[first][:, 1:].float().mean()))
        for j, second in enumerate(names):
            shares = [
                float((a & b).sum() / a.sum()) for a, b in zip(keeps[first][:, 1:], keeps[second][:, 1:]) if a.any()
            ]
            assert actual.again[i][j].value == pytest.approx(sum(shares) / len(shares))
    never = ~torch.stack(list(keeps.values())).any(0)[:, 1:]
    assert actual.never["blocks.1"].value == pytest.approx(float(never.float().mean()))


def test_what_never_happened_is_not_told() -> None:
    all_kept = torch.ones(6, 5, dtype=torch.bool)
    none_kept = torch.zeros_like(all_kept)
    one_drops = all_kept.clone()
    one_drops[0, 0] = False
    for keeps, verdict in (
        ([all_kept, all_kept], "no decision dropped any before another one kept some"),
        ([none_kept, none_kept], "no decision dropped any before another one kept some"),
        # In one image alone: no interval, and nothing clear.
        (
            [one_drops, one_drops],
            "Inconclusive whether tokens leave for good or .* 0.00 times",
        ),
    ):
        across = across_of(decided(dict(zip(("a.0", "a.1"), keeps)), all_kept, sizes=(2, 4)), ["a.0", "a.1"])
        assert across.kind == "inconclusive"
        assert re.search(verdict, across.verdict)
        again = "no samples" if keeps[0] is none_kept else "1.0"
        assert list(map(str, across.again[0])) == [again, again]


def test_intervals_cover_and_tests_hold_their_level() -> None:
    rng = torch.Generator().manual_seed(0)
    covered = rejected = 0
    for seed in range(200):
        values = torch.randn(60, 1, generator=rng, dtype=torch.float64).numpy()
        means_S = sorted(Resampling(60, 400, seed).means(values)[:, 0])
        low, high = means_S[9], means_S[389]
        covered += low <= 0 <= high
        rejected += sign_test(values, 400, seed)[0] < 0.05
    assert 178 <= covered <= 199
    assert 1 <= rejected <= 22


def test_corrected_tests_are_never_more_certain() -> None:
    p = torch.rand(20).tolist()
    adjusted_p = adjusted(p)
    assert all(after >= before for after, before in zip(adjusted_p, p))
    assert [adjusted_p[i] for i in sorted(range(20), key=p.__getitem__)] == sorted(adjusted_p)
