from __future__ import annotations

import itertools
import math
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import mmod
from mmod import RoutingConfig
from mmod.ops import signed_sums, spread_evenly, tiles
from mmod.routing import LinearScore, RandomScore, RedundancyScore, Router, apply_gate
from mmod.routing.decision import TokenMasks
from tests.kit.zoo import make_images, make_model


def make(config: RoutingConfig, **changes: object) -> Router:
    return Router(config, **{"dim": 8, "block": 1, "capacity": 0.5, "prefix": 1, **changes})


def test_scores_and_gates_are_fp32_under_autocast_and_in_half_precision() -> None:
    x = torch.randn(2, 6, 8)
    router = make(RoutingConfig(router=mmod.score("linear", init_std=1.0)))
    expected = router(x).score_BN
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(router(x).score_BN, expected)
    assert router.bfloat16()(x.bfloat16()).score_BN.dtype == torch.float32


def test_a_decision_is_shown_by_shapes() -> None:
    decision = make(RoutingConfig(router="linear"))(torch.randn(2, 6, 8))
    kept = "kept=Kept(index_BK=(2, 3))"
    assert repr(decision) == f"Routing({kept}, score_BN=(2, 6), gate_BK=(2, 3), rule=Rule(capacity=Fraction(1, 2)))"
    masks = TokenMasks(valid_BN=torch.ones(2, 6, dtype=torch.bool))
    assert "tokens=TokenMasks(valid_BN=(2, 6))" in repr(decision._replace(tokens=masks))


def test_linear_score_is_the_dot_product() -> None:
    x, score = torch.randn(2, 3, 8), LinearScore(8, bias=True, normalize=False, init_std=1.0, initial=0.5)
    torch.testing.assert_close(score(x), x @ score.weight[0] + 0.5)
    normalised = LinearScore(8, init_std=1.0)
    torch.testing.assert_close(normalised(x), F.rms_norm(x, (8,), eps=1e-6) @ normalised.weight[0])
    assert normalised(torch.zeros(1, 1, 8)).item() == 0


@pytest.mark.parametrize(
    ("gate", "scale", "value"),
    [
        ("linear", 1.0, 0.7),
        ("sigmoid", 0.1, 0.1 / (1 + math.exp(-0.7))),
        ("tanh", 0.2, 1 + 0.2 * math.tanh(0.7)),
    ],
)
def test_gates_follow_their_formulas(gate: str, scale: float, value: float) -> None:
    actual = apply_gate(torch.tensor([0.7]), gate, scale)
    assert actual is not None
    assert actual.item() == pytest.approx(value, abs=1e-6)


def test_identity_gate_is_no_weight_at_all() -> None:
    assert apply_gate(torch.zeros(2), "identity") is None
    assert make(RoutingConfig())(torch.randn(1, 4, 8), torch.rand(1, 4)).gate_BK is None


@pytest.mark.parametrize("seed", [0, 1])
def test_random_scores_differ_by_image_block_and_seed_and_repeat(seed: int) -> None:
    x = torch.randn(3, 40, 8)
    score = RandomScore(seed, 1)(x)
    assert torch.equal(score, RandomScore(seed, 1)(x))
    assert torch.equal(score, RandomScore(seed, 1)(x + 1e-6 * torch.randn_like(x)))
    assert not torch.equal(score[0], score[1])
    assert not torch.equal(score, RandomScore(seed, 3)(x))
    assert not torch.equal(score, RandomScore(seed + 1, 1)(x))


@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1.0, 100.0])
@pytest.mark.parametrize("tokens", [16, 1024])
@pytest.mark.parametrize("padded", [False, True])
def test_images_have_draws_of_their_own_whatever_the_scale_of_tokens(scale: float, tokens: int, padded: bool) -> None:
    x = torch.randn(16, tokens, 64) * scale
    valid = torch.arange(tokens).expand(16, -1) < tokens - 5 if padded else None
    score = RandomScore(0, 1)(x, valid)
    assert len({tuple(row.tolist()) for row in score}) == 16
    if padded:
        assert torch.equal(score[:, : tokens - 5], RandomScore(0, 1)(x[:, : tokens - 5]))


@pytest.mark.parametrize("blocks", ["late", (1, 2, 4, 5), "every_other"])
@pytest.mark.parametrize("router", ["attention", "random", "stride"])
def test_blocks_of_a_span_keep_the_same_tokens(router: str, blocks: str | tuple[int, ...]) -> None:
    model = mmod.route_(make_model("test_vit"), RoutingConfig(router=router, blocks=blocks, capacity=0.3)).eval()
    with torch.no_grad(), mmod.trace(model) as decisions:
        model(make_images("test_vit", 3))
    kept = {int(name.rpartition(".")[2]): routing.keep_BN for name, routing in decisions.items()}
    for block, keep in kept.items():
        for other, keep_other in kept.items():
            same_span = all(between in kept for between in range(min(block, other), max(block, other) + 1))
            if same_span or router == "stride":
                assert torch.equal(keep, keep_other)
            else:
                assert not torch.equal(keep, keep_other)


def test_a_span_of_falling_capacity_keeps_fewer_of_the_same_tokens() -> None:
    config = RoutingConfig(router="random", blocks=(2, 3, 4), capacity=(0.6, 0.4, 0.2))
    model = mmod.route_(make_model("test_vit"), config).eval()
    with torch.no_grad(), mmod.trace(model) as decisions:
        model(make_images("test_vit", 3))
    first, second, third = (routing.keep_BN for routing in decisions.values())
    assert not bool((second & ~first).any() or (third & ~second).any())
    assert third.sum() < second.sum() < first.sum()


def test_random_scores_are_uniform_over_positions() -> None:
    score = RandomScore(0, 1)(torch.randn(4000, 16, 8))
    kept = (score.argsort(1, descending=True)[:, :8]).flatten().bincount(minlength=16) / 4000
    assert (kept - 0.5).abs().max() < 0.05
    assert abs(float(score.mean()) - 0.5) < 0.01


def test_stride_spreads_any_count_evenly() -> None:
    score = make(RoutingConfig(router="stride")).score(torch.zeros(1, 64, 1))[0]
    for count in (2, 4, 16, 32):
        kept = score.argsort(descending=True, stable=True)[:count].sort().values
        assert kept.diff().tolist() == [64 // count] * (count - 1)


def test_a_function_may_score_and_learn() -> None:
    torch.manual_seed(1)
    router = make(RoutingConfig(router=torch.nn.Sequential(torch.nn.Linear(8, 1), torch.nn.Flatten(1))))
    routing = router(torch.randn(2, 6, 8))
    assert routing.gate_BK.requires_grad
    assert {name for name, _ in router.named_parameters()} == {"score.function.0.weight", "score.function.0.bias"}
    with pytest.raises(ValueError, match=r"\(2, 6\) \(images, tokens\), got \(2,\)"):
        make(RoutingConfig(router=lambda x: x.sum((1, 2))))(torch.randn(2, 6, 8))


def test_attention_routing_says_what_it_misses() -> None:
    router = make(RoutingConfig())
    with pytest.raises(ValueError, match="needs the scores or the importance of a block before this one"):
        router(torch.randn(1, 4, 8))
    with pytest.raises(ValueError, match=r"importance has shape \(1, 5\).*\(1, 4\)"):
        router(torch.randn(1, 4, 8), torch.rand(1, 5))


def test_nan_scores_rank_last() -> None:
    importance = torch.tensor([[0.1, float("nan"), 0.3, 0.2]])
    assert make(RoutingConfig(), prefix=0)(torch.zeros(1, 4, 8), importance).kept.index_BK.tolist() == [[2, 3]]


@pytest.mark.parametrize("score", [float("nan"), -float("inf")], ids=["nan", "-inf"])
@pytest.mark.parametrize("router", ["attention", "redundancy"])
def test_a_dropped_token_stays_dropped_whatever_the_kept_ones_score(router: str, score: float) -> None:
    """A kept token without a score comes last among the kept ones, before every token that a block dropped."""
    config = RoutingConfig(router=router, skipped="follow")
    importance = torch.full((2, 12), score)
    importance[:, [0, 4, 6, 7]] = torch.rand(2, 4)
    decides = (make(config, prefix=1, capacity=capacity) for capacity in (7 / 12, 0.5, 5 / 12))
    x = torch.randn(2, 12, 8)
    if router == "redundancy":
        # Scored anew from the rows.
        importance = None
        x[:, [8, 9, 10, 11]] = score
    routing = next(decides)(x, importance)
    for narrower in decides:
        before_BN = routing.keep_BN
        routing = narrower(x.gather(1, routing.kept.index_BK.unsqueeze(-1).expand(-1, -1, 8)), None, None, routing)
        assert not (routing.keep_BN & ~before_BN).any()
    if router == "attention":
        assert routing.keep_BN[:, [0, 4, 6, 7]].all()


def test_gate_gradient_reaches_kept_tokens_only() -> None:
    router = make(RoutingConfig(router=mmod.score("linear", init_std=1.0)), prefix=0)
    routing = router(torch.randn(1, 6, 8))
    (gradient,) = torch.autograd.grad(routing.gate_BK.sum(), routing.score_BN)
    assert torch.equal(gradient[0] != 0, routing.keep_BN[0])


class TestPresets:
    def test_mod_weighs_the_update_by_the_raw_score(self) -> None:
        router = make(mmod.preset("mod"), prefix=0)
        x = torch.randn(1, 8, 8)
        with torch.no_grad():
            router.score.weight.normal_()
        routing = router(x)
        torch.testing.assert_close(routing.gate_BK, (x @ router.score.weight[0] + 1).gather(1, routing.kept.index_BK))
        assert router.config.capacity == 0.125

    def test_a_mod_has_no_parameter_and_no_gate(self) -> None:
        router = make(mmod.preset("a-mod"))
        assert list(router.parameters()) == []
        assert router.config.gate.name == "identity"

    def test_p_mod_starts_dense_and_reweighs_skipped_tokens(self) -> None:
        config = mmod.preset("p-mod", depth=32)
        assert config.blocks == tuple(range(8, 32))
        expected = [0.5 * math.cos(math.pi * block / 31) + 0.5 for block in range(8, 32)]
        assert config.capacity == pytest.approx([max(0.15, ratio) for ratio in expected], abs=1e-6)
        router = make(config, prefix=0)
        x = torch.randn(2, 6, 8)
        routing = router(x)
        assert torch.equal(routing.gate_BK, torch.ones(2, 3))
        assert torch.equal(routing.skipped_BN, torch.ones(2, 6))
        with torch.no_grad():
            router.score.weight.fill_(100.0)
        weight = router(x).skipped_BN
        assert bool(((weight >= 0.8) & (weight <= 1.2)).all())
        router(x).skipped_BN.sum().backward()
        assert router.score.weight.grad is not None

    def test_modification_decides_token_by_token(self) -> None:
        router = make(mmod.preset("modification", router={"init_std": 1.0}), prefix=0)
        x = torch.randn(1, 12, 8)
        keep = router(x).keep_BN[0]
        assert torch.equal(keep, torch.sigmoid(router(x).score_BN[0]) >= 0.5)
        for token in range(12):
            assert bool(router(x[:, token : token + 1]).keep_BN.any()) == bool(keep[token])


def test_signed_sums_keep_distances() -> None:
    torch.manual_seed(0)
    for dim, channels in ((384, 64), (100, 32), (768, 64)):
        x = torch.randn(1, 60, dim)
        sums = signed_sums(x, channels)
        ratio = (torch.pdist(sums[0]) / torch.pdist(x[0])).square()
        assert sums.shape == (1, 60, channels)
        assert abs(ratio.mean().item() - 1) < 0.1
        assert ratio.std().item() < 1.5 * (2 / channels) ** 0.5
    assert torch.equal(signed_sums(x, 768), x)


def test_fewer_channels_find_the_same_copies_for_fewer_flops() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 1, 64).repeat(1, 17, 1) + 4 * torch.randn(2, 4, 64)[:, torch.arange(17) % 4]
    routings = [
        make(RoutingConfig(router=mmod.score("redundancy", channels=channels), skipped="merge"), dim=64, capacity=0.3)(
            x
        )
        for channels in (None, 16)
    ]
    for image in range(2):
        groups = [
            {frozenset((routing.joined.slot_BN[image] == slot).nonzero().flatten().tolist()) for slot in range(1, 5)}
            for routing in routings
        ]
        assert groups[0] == groups[1]
    model = make_model("vit_tiny_patch16_224")
    cost = {}
    for channels in (None, 8):
        config = RoutingConfig(
            router=mmod.score("redundancy", channels=channels), skipped="merge", blocks=(1, 2), capacity=0.5
        )
        cost[channels] = mmod.flops(mmod.route_(model, config), make_images("vit_tiny_patch16_224", 1).shape[-1]).routed
        mmod.unroute_(model)
    assert cost[8] < cost[None]
    with pytest.raises(ValueError, match="channels must be an integer of at least 1"):
        mmod.score("redundancy", channels=0)


def test_redundancy_keeps_what_no_token_before_can_stand_for() -> None:
    torch.manual_seed(0)
    for tokens, prefix in ((7, 0), (16, 1), (33, 3)):
        x = torch.randn(2, tokens, 5, dtype=torch.float64)
        # Every token but a few is a copy of one of those.
        x[:, prefix:] = x[:, prefix : prefix + 3][:, torch.arange(tokens - prefix) % 3]
        score, order = RedundancyScore(prefix)(x), spread_evenly(tokens - prefix, x.device)
        assert (score[:, :prefix] == 2).all()
        for image, token in itertools.product(range(2), range(tokens - prefix)):
            before = [other for other in range(tokens - prefix) if order[other] > order[token]]
            alike = [torch.cosine_similarity(*x[image, prefix:][[token, other]], dim=0).item() for other in before]
            assert score[image, prefix + token].item() == pytest.approx(1 - max(alike, default=-1.0), abs=1e-6)
        best = score.topk(prefix + 3).indices
        assert all(len({tuple(row.tolist()) for row in x[image, best[image]]}) == prefix + 3 for image in range(2))
        # What padding holds does not matter.
        valid = (torch.arange(tokens) < tokens - 2).expand(2, -1)
        other = torch.where(valid.unsqueeze(-1), x, torch.randn_like(x))
        padded, scored = (RedundancyScore(prefix)(stream, valid)[valid] for stream in (x, other))
        assert torch.equal(padded, scored)


def test_redundancy_ranks_tokens_among_those_that_count() -> None:
    x, valid = torch.randn(1, 9, 16), torch.tensor([[False, True, True, False, True, True, False, False, True]])
    torch.testing.assert_close(RedundancyScore()(x, valid)[valid], RedundancyScore()(x[valid][None])[0])


class Largest(TorchDispatchMode):
    """Records the most elements that a tensor holds which an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.untyped_storage().nbytes() // 4 for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


@pytest.mark.parametrize("router", ["linear", "attention", "random", "redundancy"])
@pytest.mark.parametrize("skipped", ["follow", "merge"])
def test_a_decision_holds_tensors_and_numbers_and_its_text_no_config(router: str, skipped: str) -> None:
    model = mmod.route_(make_model("deit_tiny_patch16_224"), RoutingConfig(router=router, skipped=skipped))
    with torch.no_grad(), mmod.trace(model) as decisions:
        model(make_images("deit_tiny_patch16_224", 2))
    for decision in decisions.values():
        assert decision.rule is not None
        leaves, spec = tree_flatten(decision)
        assert all(leaf is None or isinstance(leaf, torch.Tensor | bool | int) for leaf in leaves)
        # What has no leaves is kept as it is.
        assert tree_unflatten(leaves, spec).rule is decision.rule
        assert decision.detach().rule is decision.rule
        assert "RoutingConfig" not in repr(decision)
        assert repr(decision.rule) == f"Rule(capacity={decision.rule.capacity!r})"
        assert pickle.loads(pickle.dumps(decision)).rule == decision.rule


@pytest.mark.parametrize("skipped", ["merge", "follow"])
@pytest.mark.parametrize("channels", [None, 16])
def test_a_decision_by_similarity_holds_no_map_of_pairs(channels: int | None, skipped: str) -> None:
    router = make(
        RoutingConfig(router=mmod.score("redundancy", channels=channels), skipped=skipped, capacity=0.5), dim=32
    )
    for tokens in (1025, 6145):
        with torch.no_grad(), Largest() as largest:
            router(torch.randn(1, tokens, 32))
        # A tile of the map, or rows and their indices.
        assert largest.elements <= max(tiles.CHUNK_ELEMENTS, 20 * tokens * 32), tokens
