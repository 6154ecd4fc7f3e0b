from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmod.config import rational
from mmod.routing import kept_count, select_threshold, select_topk
from tests.kit.oracle import kept_of

# A few values only, so that ties are the rule.
SCORES = st.sampled_from([-math.inf, -1.0, 0.0, 0.25, 0.5, 0.75, 2.0, math.inf, math.nan])


@st.composite
def score_rows(draw: st.DrawFn) -> list[list[float]]:
    images, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    return [[draw(SCORES) for _ in range(tokens)] for _ in range(images)]


@given(rows=score_rows(), percent=st.integers(1, 100), prefix=st.integers(0, 3))
def test_topk_is_a_stable_sort(rows: list[list[float]], percent: int, prefix: int) -> None:
    tokens, capacity = len(rows[0]), Fraction(percent, 100)
    prefix = min(prefix, tokens)
    kept, _ = select_topk(torch.tensor(rows), capacity, prefix)
    assert kept.valid_BK is None
    count = max(1, prefix, tokens * percent // 100)
    assert kept.index_BK.tolist() == [kept_of(row, count, prefix) for row in rows]


@given(rows=score_rows(), percent=st.integers(1, 100), prefix=st.integers(0, 2), data=st.data())
def test_topk_of_padded_images_is_that_of_the_images_alone(rows, percent: int, prefix: int, data) -> None:
    capacity, tokens = Fraction(percent, 100), len(rows[0])
    prefix = min(prefix, tokens)
    lengths = [data.draw(st.integers(max(1, prefix), tokens)) for _ in rows]
    valid = torch.arange(tokens) < torch.tensor(lengths).unsqueeze(1)
    together, _ = select_topk(torch.tensor(rows), capacity, prefix, valid)
    for row, length, kept, slots in zip(rows, lengths, together.index_BK, together.valid_BK, strict=True):
        alone, _ = select_topk(torch.tensor([row[:length]]), capacity, prefix)
        assert kept[slots].tolist() == alone.index_BK[0].tolist()
        assert len(set(kept.tolist())) == len(kept)


@given(rows=score_rows(), level=st.sampled_from([0.0, 0.25, 0.5, 3.0]), prefix=st.integers(0, 2), data=st.data())
def test_threshold_keeps_what_reaches_it_within_the_bounds(rows, level: float, prefix: int, data) -> None:
    tokens = len(rows[0])
    prefix = min(prefix, tokens)
    least = data.draw(st.integers(0, tokens))
    most = data.draw(st.one_of(st.none(), st.integers(max(1, least), tokens + 2)))
    index, valid, total, *_ = select_threshold(
        torch.tensor(rows), level, prefix=prefix, min_tokens=least, max_tokens=most
    )
    valid = torch.ones_like(index, dtype=torch.bool) if valid is None else valid
    for row, kept, slots in zip(rows, index, valid, strict=True):
        passing = prefix + sum(value >= level for value in row[prefix:])
        count = max(passing, least, prefix)
        count = count if most is None else min(count, max(most, prefix))
        assert kept[slots].tolist() == kept_of(row, count, prefix)
        assert len(set(kept.tolist())) == len(kept)
    assert total is None if most is not None else total == int(valid.sum())


@pytest.mark.parametrize(
    ("tokens", "capacity", "prefix", "kept"),
    [
        (197, 0.5, 1, 98),
        (197, 0.125, 1, 24),
        (10, 0.3, 0, 3),
        (7, 0.01, 0, 1),
        (7, 0.01, 5, 5),
        (100, 0.29, 0, 29),
    ],
)
def test_kept_count_follows_the_decimal_capacity(tokens: int, capacity: float, prefix: int, kept: int) -> None:
    assert kept_count(tokens, rational(capacity), prefix) == kept


def test_selection_is_a_decision_without_a_gradient() -> None:
    score = torch.randn(2, 5, requires_grad=True)
    kept, _ = select_topk(score, Fraction(1, 2))
    assert not kept.index_BK.requires_grad
