"""Presets of vision-language methods, each pinned by what its source fixes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import mmod
from mmod.planning import ratio_decay
from tests.kit.vlm_zoo import IMAGE, PATCHES, make_joint, make_language, prompt


def test_gamma_mod_shares_one_score_and_sums_its_losses() -> None:
    model = make_joint("llava", num_hidden_layers=7)
    config = mmod.preset("gamma-mod", depth=7)
    mmod.route_(model, language=config).train()
    blocks = list(mmod.routed_blocks(model).values())
    assert [block.self_attn.layer_idx for block in blocks] == [3, 4, 5]
    assert len({id(block.router.score.held) for block in blocks}) == 1
    assert sum("router" in name for name, _ in model.named_parameters()) == 1
    batch = prompt("llava", (1,))
    ids = batch["input_ids"]
    after = int((ids[0] == IMAGE).nonzero().max()) + 1
    protected = torch.zeros_like(ids, dtype=torch.bool)
    protected[:, after:] = True
    model(**batch, protected_mask=protected)
    expected = 0.0
    for block in blocks:
        routing = block.mod_state.routing
        assert bool(routing.keep_BN[:, after:].all())
        assert int(routing.keep_BN[:, :after].sum()) == after // 2
        expected += 0.01 * F.binary_cross_entropy_with_logits(routing.score_BN, routing.keep_BN.float())
    torch.testing.assert_close(mmod.auxiliary_loss(model), expected)


@torch.no_grad()
def test_gamma_mod_keeps_above_its_threshold_in_evaluation() -> None:
    model = mmod.route_(make_joint("llava", num_hidden_layers=7), language=mmod.preset("gamma-mod", depth=7))
    model.model.language_model.shared_router.weight.mul_(100)
    with mmod.trace(model) as decisions:
        model(**prompt("llava", (1,)))
    assert len(decisions) == 3
    for routing in decisions.values():
        assert torch.equal(routing.keep_BN, torch.sigmoid(routing.score_BN) >= 0.005)
    assert not all(bool(routing.keep_BN.all()) for routing in decisions.values())


@torch.no_grad()
@pytest.mark.parametrize("gate_on", ["update", "mlp"])
def test_p_mod_weighs_image_tokens_alone(gate_on: str) -> None:
    depth = 6
    model = make_joint("llava", num_hidden_layers=depth)
    batch = prompt("llava", (2, 1))
    config = mmod.preset("p-mod", depth=depth, language={"gate_on": gate_on})
    plan = ratio_decay(depth)
    mmod.route_(model, language=config)
    recorded = {}
    for name, block in mmod.routed_blocks(model).items():
        assert not block.router.score.weight.any()
        block.router.score.weight.normal_(std=0.05)
        block.register_forward_hook(lambda m, i, o, name=name: recorded.update({name: (i[0], o)}))
    with mmod.trace(model) as decisions:
        model(**batch)
    images = batch["input_ids"] == IMAGE
    real = batch["attention_mask"].bool()
    for (name, routing), capacity in zip(decisions.items(), plan.capacity):
        kept = routing.keep_BN & images
        assert kept.sum(1).tolist() == [int(PATCHES * number * mmod.config.rational(capacity)) for number in (2, 1)]
        before, after = recorded[name]
        weight = 1 + 0.2 * torch.tanh(routing.score_BN).unsqueeze(-1)
        skipped = images & ~kept
        torch.testing.assert_close(after[skipped], (weight * before)[skipped])
        assert bool(((weight > 0.8) & (weight < 1.2)).all())
        assert routing.gate_BK is not None
        text_BK = ~images.gather(1, routing.kept.index_BK)
        assert bool((routing.gate_BK[text_BK] == 1).all())
        assert torch.equal(after[~real], before[~real])


@torch.no_grad()
def test_modification_decides_every_token_alone() -> None:
    config = mmod.preset("modification", language={"gate_on": "branches"}, router={"init_std": 0.3})
    model = mmod.route_(make_language("llama"), config)
    ids = torch.randint(3, IMAGE, (1, 12))
    with mmod.trace(model) as long:
        model(input_ids=ids)
    with mmod.trace(model) as short:
        model(input_ids=ids[:, :7])
    for name in long:
        assert torch.equal(long[name].keep_BN[:, :7], short[name].keep_BN)


def test_mod_trains_by_rank_and_decides_alone_in_evaluation() -> None:
    config = mmod.preset(
        "mod",
        capacity=0.25,
        language={"inference_threshold": 0.5},
        losses={"membership": 0.01},
        router={"init_std": 0.3},
    )
    model = mmod.route_(make_language("llama"), config).train()
    ids = torch.randint(3, IMAGE, (2, 16))
    model(input_ids=ids)
    for block in mmod.routed_blocks(model).values():
        assert block.mod_state.routing.keep_BN.sum(1).tolist() == [4, 4]
    model.eval()
    with torch.no_grad(), mmod.trace(model) as decisions:
        model(input_ids=ids)
    for routing in decisions.values():
        assert torch.equal(routing.keep_BN, routing.score_BN >= 0)


def test_a_mod_adds_nothing_to_learn() -> None:
    model = make_joint("llava")
    keys = list(model.state_dict())
    mmod.route_(model, language=mmod.preset("a-mod"))
    assert list(model.state_dict()) == keys
