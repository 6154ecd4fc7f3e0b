"""Leaving tokens out one by one: worth is exact where it is known, and planted routers agree with it or do not."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

import mmod
from mmod.audits.oracle import rank_agreement
from mmod.routing import kept_count
from tests.kit.planted import PLANTED, TOKENS, batches_of, plant


def test_rank_agreement_is_that_of_scipy() -> None:
    free = torch.rand(20, 15) < 0.7
    one, other = torch.randint(6, (20, 15)).float(), torch.randn(20, 15)
    agreement = rank_agreement(one, other, free)
    for image in range(20):
        expected = spearmanr(one[image, free[image]], other[image, free[image]]).statistic
        assert float(agreement[image]) == pytest.approx(expected)
    assert rank_agreement(torch.zeros(2, 5), torch.rand(2, 5), torch.ones(2, 5, dtype=torch.bool)).isnan().all()


@pytest.mark.parametrize("sign", [1, -1])
def test_scores_that_are_what_tokens_are_worth_agree_wholly(sign: int) -> None:
    worth = torch.randn(1 + TOKENS)

    def evaluate(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
        with mmod.trace(model) as decisions:
            model(batch)
        kept = decisions["blocks.1"].keep_BN
        return -(kept * worth).sum(1), torch.ones(len(kept))

    model = plant(lambda x_BND: (sign * worth).expand(x_BND.shape[:2]), blocks=(1,))
    batches = [batches_of(6, seed=0)[0][0], batches_of(5, seed=1)[0][0]]
    audit = mmod.audit(
        model, batches, mmod.AuditConfig(conditions=["random"], draws=1, leave_one_out=1), evaluate=evaluate
    ).leave_one_out
    assert audit is not None
    assert audit.images == 6
    assert audit.agreement["blocks.1"].value == pytest.approx(sign)
    count = kept_count(1 + TOKENS, Fraction(1, 4), prefix=1) - 1
    best = worth[1:].topk(count).values.sum()
    kept = (sign * worth[1:]).topk(count).values.sum() * sign
    assert audit.oracle.value == pytest.approx(float(kept - best), abs=1e-5)


def test_planted_routers_agree_with_worth_or_do_not() -> None:
    audits = {
        kind: mmod.audit(
            plant(score), batches_of(200, seed=4), mmod.AuditConfig(conditions=["random"], draws=1, leave_one_out=1)
        ).leave_one_out
        for kind, score in PLANTED.items()
    }
    content, random = audits["content"], audits["no better than random"]
    assert content is not None
    assert random is not None
    assert content.agreement["blocks.0"].low > 0
    chance = random.agreement["blocks.0"]
    assert abs(chance.value) < chance.high - chance.low
    assert content.random.low > 0
    assert random.oracle.high < 0


def test_nothing_is_left_out_unless_asked() -> None:
    assert (
        mmod.audit(
            plant("norm"), batches_of(8, 0), mmod.AuditConfig(conditions=["random"], resamples=100)
        ).leave_one_out
        is None
    )
