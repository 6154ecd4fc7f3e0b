"""Max-min selection, weighed by importance or not, against a loop in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mmod
from mmod.routing import DiversityScore
from tests.kit.vlm_zoo import make_joint, prompt
from tests.kit.zoo import make_images, make_model


def chosen(x_ND: Tensor, weight_N: Tensor, count: int) -> list[int]:
    """Return what max-min selection takes, in order."""
    unit = torch.nn.functional.normalize(x_ND.double(), dim=-1)
    far = 1 - unit @ unit.T
    taken: list[int] = []
    for _ in range(count):
        value = {}
        for one in set(range(len(x_ND))) - set(taken):
            others = taken or [other for other in range(len(x_ND)) if other != one]
            value[one] = float(weight_N[one] * min(far[one, other] for other in others))
        taken.append(max(value, key=value.__getitem__))
    return taken


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize(("tokens", "prefix"), [(7, 0), (16, 1), (33, 3)])
def test_the_best_are_those_of_the_definition(tokens: int, prefix: int, weighed: bool) -> None:
    torch.manual_seed(tokens)
    x, importance = torch.randn(2, tokens, 6), torch.rand(2, tokens)
    valid = (torch.arange(tokens) < torch.tensor([[tokens], [tokens - 2]])).expand(2, -1)
    score = DiversityScore(prefix)(x, valid, importance if weighed else None)
    assert (score[:, :prefix] == 2).all()
    for sample in range(2):
        real = int(valid[sample].sum())
        weight = importance[sample, prefix:real] if weighed else torch.ones(real - prefix)
        order = chosen(x[sample, prefix:real], weight, real - prefix)
        free_score = score[sample, prefix:real]
        for count in (1, 2, (real - prefix) // 2):
            assert set(free_score.topk(count).indices.tolist()) == set(order[:count])
        assert (score[sample, real:] == -1).all()
    # What padding holds does not matter.
    other = torch.where(valid.unsqueeze(-1), x, torch.randn_like(x))
    assert torch.equal(score, DiversityScore(prefix)(other, valid, importance if weighed else None))


def test_copies_of_a_token_come_last() -> None:
    x = torch.randn(1, 4, 6).repeat(1, 3, 1)
    best = DiversityScore()(x).topk(4).indices[0]
    assert sorted((best % 4).tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("router", ["diversity", "important_diversity"])
@torch.no_grad()
def test_models_keep_what_is_spread_out(router: str) -> None:
    config = mmod.RoutingConfig(router=router, capacity=0.5, blocks=(1, 2))
    model, images = make_model("vit_tiny_patch16_224"), make_images("vit_tiny_patch16_224", 2)
    blocks = config.replace(blocks=(1, 3)) if router == "important_diversity" else config
    with mmod.trace(mmod.route_(model, blocks)) as trace:
        model(images)
    assert all(share == pytest.approx(8 / 17) for share in trace.kept_shares().values())
    joint, batch = make_joint("llava"), prompt("llava", (1, 2))
    mmod.route_(joint, language=blocks)
    mmod.set_capacity_(joint, 1.0)
    real = batch["attention_mask"].bool()
    routed = joint(**batch).logits[real]
    torch.testing.assert_close(routed, mmod.unroute_(joint)(**batch).logits[real], rtol=1e-4, atol=1e-5)
