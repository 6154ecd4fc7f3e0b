"""Max-min selection, against a loop in float64."""

from __future__ import annotations

import pytest
import torch

import mmod
from mmod.routing import DiversityScore
from tests.kit.oracle import max_min_order
from tests.kit.vlm_zoo import make_joint, prompt
from tests.kit.zoo import make_images, make_model


@pytest.mark.parametrize(("tokens", "prefix"), [(7, 0), (16, 1), (33, 3)])
def test_the_best_are_those_of_the_definition(tokens: int, prefix: int) -> None:
    torch.manual_seed(tokens)
    x = torch.randn(2, tokens, 6)
    valid = (torch.arange(tokens) < torch.tensor([[tokens], [tokens - 2]])).expand(2, -1)
    score = DiversityScore(prefix)(x, valid)
    assert (score[:, :prefix] == 2).all()
    for sample in range(2):
        real = int(valid[sample].sum())
        order = max_min_order(x[sample, prefix:real], torch.ones(real - prefix))
        free_score = score[sample, prefix:real]
        for count in (1, 2, (real - prefix) // 2):
            assert set(free_score.topk(count).indices.tolist()) == set(order[:count])
        assert (score[sample, real:] == -1).all()
    # What padding holds does not matter.
    other = torch.where(valid.unsqueeze(-1), x, torch.randn_like(x))
    assert torch.equal(score, DiversityScore(prefix)(other, valid))


def test_copies_of_a_token_come_last() -> None:
    x = torch.randn(1, 4, 6).repeat(1, 3, 1)
    best = DiversityScore()(x).topk(4).indices[0]
    assert sorted((best % 4).tolist()) == [0, 1, 2, 3]


@torch.no_grad()
def test_models_keep_what_is_spread_out() -> None:
    config = mmod.RoutingConfig(router="diversity", capacity=0.5, blocks=(1, 2))
    model, images = make_model("vit_tiny_patch16_224"), make_images("vit_tiny_patch16_224", 2)
    with mmod.trace(mmod.route_(model, config)) as trace:
        model(images)
    assert all(share == pytest.approx(8 / 17) for share in trace.kept_shares().values())
    joint, batch = make_joint("llava"), prompt("llava", (1, 2))
    mmod.route_(joint, language=config)
    mmod.set_capacity_(joint, 1.0)
    real = batch["attention_mask"].bool()
    routed = joint(**batch).logits[real]
    torch.testing.assert_close(routed, mmod.unroute_(joint)(**batch).logits[real], rtol=1e-4, atol=1e-5)
