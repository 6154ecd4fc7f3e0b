"""Replaced decisions keep as many tokens, the best by rank, and leave everything else as it was."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

import mmod
from mmod.audits.replace import keep_best, replaced_decisions
from mmod.routing import DecoderRouter, Router, Routing, TokenMasks, assign_groups
from tests.kit.zoo import make_images, make_model

CONFIGS = {
    "attention": {"router": "attention", "blocks": "late"},
    "linear": {"router": "linear", "capacity": 0.3},
    "reweighted": {"router": "linear", "gate": "sigmoid", "skipped": "scale"},
    "threshold": {"router": "norm", "select": {"threshold": 1.0, "min_tokens": 2}},
    "random": {"router": "random", "blocks": "all", "capacity": (0.75, 0.5, 0.5, 0.25)},
    "all": {"router": "attention", "context": "all"},
    "branch": {"router": "linear", "operator": "mlp", "capacity": 0.4},
    "follow": {"router": "attention", "skipped": "follow", "blocks": "late", "capacity": 0.4},
    "merge": {"router": "linear", "skipped": "merge", "capacity": 0.4},
}
# Merged further from block to block, by one score and by one that is made anew on what is left.
FALLING = {
    "attention": {"router": "attention", "skipped": "merge", "blocks": (1, 2, 3), "capacity": (0.75, 0.5, 0.4)},
    "redundancy": {"router": "redundancy", "skipped": "merge", "blocks": "all", "capacity": (0.75, 0.5, 0.5, 0.25)},
    "follow": {"router": "random", "skipped": "follow", "blocks": "all", "capacity": (0.6, 0.6, 0.4, 0.3)},
}
BEFORE_MLP = {**FALLING["redundancy"], "skipped": mmod.Merged("mlp")}


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224", "vit_little_patch16_reg4_gap_256"])
@pytest.mark.parametrize("config", [*CONFIGS, *(f"falling {name}" for name in FALLING)])
def test_a_decision_replaced_by_itself_changes_nothing(name: str, config: str) -> None:
    images = make_images(name, 3)
    falling = FALLING.get(config.removeprefix("falling "), {})
    unchanged(name, falling if config.startswith("falling") else CONFIGS[config], images)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_little_patch16_reg4_gap_256"])
def test_so_does_one_between_attention_and_mlp(name: str) -> None:
    unchanged(name, BEFORE_MLP, make_images(name, 3))


def unchanged(name: str, fields: dict[str, Any], images: Tensor) -> None:
    model = mmod.route_(make_model(name), mmod.RoutingConfig(**fields))
    routers = {place: block.router for place, block in mmod.routed_blocks(model).items()}
    asked = []

    def same(place: str, x_BND: Tensor, routing: Routing, left_BN: Tensor | None) -> Routing:
        asked.append(place)
        assert x_BND.shape[:2] == routing.score_BN.shape
        return keep_best(routing.keep_BN.float(), routing, routing, routers[place], left_BN)

    with torch.no_grad():
        expected = model(images)
        with replaced_decisions(model, same):
            actual = model(images)
        assert torch.equal(model(images), expected)
    assert torch.equal(actual, expected)
    # Blocks of a span that keep as many decide once.
    assert asked[0] == next(iter(routers))
    assert len(asked) == len(set(asked))
    assert not any(router._forward_hooks for router in routers.values())


@pytest.mark.parametrize("skipped", ["follow", "merge", mmod.Merged("mlp")], ids=str)
def test_a_foreign_choice_merges_as_a_router_that_makes_it(skipped: Any) -> None:
    name, fields = "vit_tiny_patch16_224", {**FALLING["redundancy"], "skipped": skipped}
    images, chosen = make_images(name, 3), {}
    other = mmod.route_(make_model(name), mmod.RoutingConfig(**{**fields, "router": "stride"}))
    model = mmod.route_(make_model(name), mmod.RoutingConfig(**fields))
    model.load_state_dict(other.state_dict())
    with torch.no_grad():
        with mmod.trace(other) as decisions:
            expected = other(images)
            chosen = dict(decisions)

        def foreign(place: str, x_BND: Tensor, routing: Routing, left_BN: Tensor | None) -> Routing:
            router = mmod.routed_blocks(model)[place].router
            return keep_best(chosen[place].keep_BN.float(), routing, routing, router, left_BN)

        with replaced_decisions(model, foreign):
            actual = model(images)
        assert not torch.equal(model(images), expected)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("config", [*FALLING.values(), BEFORE_MLP], ids=[*FALLING, "before the MLP"])
def test_models_that_merge_are_audited(config: dict[str, Any]) -> None:
    name = "vit_tiny_patch16_224"
    model = mmod.route_(make_model(name), mmod.RoutingConfig(**config))
    images, targets = make_images(name, 6), torch.arange(6) % 7
    one, other = (
        mmod.audit(
            model,
            list(zip(images.split(size), targets.split(size))),
            mmod.AuditConfig(["random", "centre", "inverted"], draws=2, resamples=100, leave_one_out=left_out),
        )
        for size, left_out in ((6, 1), (3, 0))
    )
    assert one.verdict == other.verdict
    assert one.across.decisions == list(dict.fromkeys(one.across.decisions))
    # What was dropped in a span is gone for its later blocks.
    assert one.across.returning.value == 0
    assert one.leave_one_out is not None
    for a, b in zip(one.conditions, other.conditions):
        assert a.loss.value == pytest.approx(b.loss.value, rel=1e-5)
    assert len({round(condition.loss.value, 6) for condition in one.conditions}) > 3


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", ["prefix", "padding", "protected", "groups"])
def test_the_best_free_tokens_are_kept_and_as_many(kind: str, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    images, tokens = (int(torch.randint(low, high, (), generator=draw)) for low, high in ((1, 5), (6, 20)))
    x_BND = torch.randn(images, tokens, 8, generator=draw)
    rank_BN = torch.randint(4, (images, tokens), generator=draw).float()
    rank_BN[torch.rand(images, tokens, generator=draw) < 0.1] = torch.nan
    config = mmod.RoutingConfig(router="linear", capacity=0.5)
    options = {"dim": 8, "block": 1, "capacity": Fraction(1, 2)}
    if kind == "groups":
        free_BN = torch.rand(images, tokens, generator=draw) < 0.7
        groups = assign_groups(free_BN, free_BN, torch.ones_like(free_BN), frames="span", strict=False)
        router, marks = DecoderRouter(config, **options), groups
        group_BN = groups.group_BN
    else:
        valid_BN = torch.arange(tokens) < torch.randint(4, tokens + 1, (images, 1), generator=draw)
        protect_BN = torch.arange(tokens) == torch.randint(4, (images, 1), generator=draw)
        router = Router(config, prefix=1, **options)
        marks = {
            "prefix": TokenMasks(),
            "padding": TokenMasks(valid_BN),
            "protected": TokenMasks(valid_BN, protect_BN),
        }[kind]
        protected = protect_BN if kind == "protected" else torch.arange(tokens).expand(images, -1) == 0
        group_BN = (~protected & (valid_BN if kind != "prefix" else torch.ones_like(valid_BN))).long()
    learned = router(x_BND, tokens=marks)
    kept = keep_best(rank_BN, learned, learned, router)
    assert torch.equal(learned.free(router.prefix), group_BN > 0)
    for image in range(images):
        expected = set((learned.keep_BN & (group_BN <= 0))[image].nonzero().flatten().tolist())
        for group in range(1, int(group_BN[image].max()) + 1):
            members = (group_BN[image] == group).nonzero().flatten().tolist()
            count = sum(bool(learned.keep_BN[image, place]) for place in members)
            level = [-1.0 if rank != rank else rank for rank in rank_BN[image].tolist()]
            expected |= set(sorted(members, key=lambda place: (-level[place], place))[:count])
        assert set(kept.keep_BN[image].nonzero().flatten().tolist()) == expected
    assert kept.kept.index_BK.shape == learned.kept.index_BK.shape
    assert kept.gate_BK is not None
    filled = torch.ones_like(kept.kept.index_BK, dtype=torch.bool) if kept.kept.valid_BK is None else kept.kept.valid_BK
    weights = 1 + 0.2 * learned.score_BN.gather(1, kept.kept.index_BK).tanh()
    gated = torch.ones_like(filled) if kind != "groups" else groups.gated_BN.gather(1, kept.kept.index_BK)
    torch.testing.assert_close(kept.gate_BK[filled & gated], weights[filled & gated])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            mmod.RoutingConfig(router=mmod.score("cells", side=2), skipped="merge", capacity=0.5),
            r"blocks\.1 has router='cells', whose tokens join the first of their group",
        ),
        (mmod.preset("mindskip", depth=4), "keeps or skips whole images"),
    ],
    ids=["groups", "whole"],
)
def test_what_has_no_choice_among_tokens_is_refused(config: mmod.RoutingConfig, message: str) -> None:
    model = mmod.route_(make_model("vit_tiny_patch16_224"), config)
    with (
        pytest.raises(ValueError, match=message),
        replaced_decisions(model, lambda *decision: None),
    ):
        pass
