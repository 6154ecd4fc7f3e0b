"""Values from inside routed blocks, brought to all tokens."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from timm.utils import AttentionExtract
from torch import Tensor, nn

import mmod
from mmod.routing.decision import Kept
from tests.kit.zoo import make_images, make_model

NAME = "test_vit"
ROUTINGS = {
    "pass": mmod.RoutingConfig(router="norm", blocks="late", capacity=0.5),
    "follow": mmod.RoutingConfig(router="redundancy", blocks="late", capacity=0.5, skipped="follow"),
    "merge": mmod.RoutingConfig(router="redundancy", blocks="late", capacity=(0.6, 0.6, 0.4, 0.4), skipped="merge"),
    "all": mmod.RoutingConfig(router="norm", blocks="late", capacity=0.5, context="all"),
    "threshold": mmod.RoutingConfig(router="norm", blocks="late", select=mmod.Threshold(1.0)),
    "operator": mmod.RoutingConfig(router="norm", blocks="late", capacity=0.5, operator="mlp"),
}


def watched(routing: str) -> tuple[nn.Module, dict[str, Tensor], mmod.Trace]:
    """Return a routed model, outputs of the modules in it, and the decisions of the same pass."""
    model: Any = make_model(NAME)
    # Attention with context="all" is fused, so its map is not seen.
    for block in model.blocks if routing != "all" else ():
        block.attn.fused_attn = False
    mmod.route_(model, ROUTINGS[routing])
    recorded: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if name.startswith("blocks.") and ".router" not in name and name.count(".") > 1:
            module.register_forward_hook(lambda module, args, output, name=name: recorded.update({name: output}))
    with mmod.trace(model) as decisions, torch.no_grad():
        model(make_images(NAME, 3))
    return model, recorded, decisions


@pytest.mark.parametrize("routing", list(ROUTINGS))
def test_every_module_inside_is_brought_to_all_tokens(routing: str) -> None:
    _, recorded, decisions = watched(routing)
    compared = 0
    for name, routed in decisions.items():
        for inside in ("norm1", "norm2", "mlp", "mlp.fc1"):
            values = recorded[f"{name}.{inside}"]
            all_tokens = mmod.to_all_tokens(values, routed)
            assert all_tokens.shape[:2] == routed.score_BN.shape
            if values.shape[:2] == all_tokens.shape[:2]:
                assert torch.equal(values, all_tokens)
                continue
            compared += 1
            packed = values.shape[0] == 1
            row = 0
            for image in range(len(all_tokens)):
                kept = routed.keep_BN[image].nonzero().flatten()
                rows = values[0, row : row + len(kept)] if packed else values[image, : len(kept)]
                row += len(kept)
                assert torch.equal(all_tokens[image, kept], rows)
                for token in (~routed.keep_BN[image]).nonzero().flatten().tolist():
                    slot = -1 if routed.joined.slot_BN is None else int(routed.joined.slot_BN[image, token])
                    assert torch.equal(all_tokens[image, token], torch.zeros_like(rows[0]) if slot < 0 else rows[slot])
    assert compared


@pytest.mark.parametrize("routing", ["pass", "follow", "merge", "operator"])
def test_attention_maps_are_brought_to_all_tokens(routing: str) -> None:
    _, recorded, decisions = watched(routing)
    for name, routed in decisions.items():
        maps = recorded[f"{name}.attn.attn_drop"]
        full_maps = mmod.to_all_tokens(maps, routed, attention=True)
        tokens = routed.score_BN.shape[1]
        assert full_maps.shape == (*maps.shape[:2], tokens, tokens)
        torch.testing.assert_close(full_maps.sum(-1), torch.ones_like(full_maps[..., 0]))
        torch.testing.assert_close(mmod.to_all_tokens(maps.mean(1), routed, attention=True), full_maps.mean(1))
        if routing == "operator":
            assert torch.equal(full_maps, maps)
            continue
        for image in range(len(full_maps)):
            kept = routed.keep_BN[image].nonzero().flatten().tolist()
            skipped = (~routed.keep_BN[image]).nonzero().flatten().tolist()
            if routing != "merge":
                assert torch.equal(full_maps[image][:, kept][:, :, kept], maps[image])
            for token in skipped:
                if routing == "pass":
                    assert torch.equal(full_maps[image, :, token], torch.eye(tokens)[token].expand(maps.shape[1], -1))
                    continue
                slot = int(routed.joined.slot_BN[image, token])
                assert torch.equal(full_maps[image, :, token], full_maps[image, :, kept[slot]])
            if routing == "merge":
                group = routed.joined.slot_BN[image]
                for slot in range(len(kept)):
                    paid = full_maps[image][:, kept][:, :, group == slot]
                    torch.testing.assert_close(paid.sum(-1), maps[image, :, :, slot])
                    torch.testing.assert_close(paid, paid[..., :1].expand_as(paid))


def test_images_that_are_skipped_as_a_whole_are_zero_or_attend_to_themselves() -> None:
    valid = torch.tensor([[True], [False], [True]]).expand(-1, 4)
    kept = Kept(torch.arange(4).expand(3, -1), valid, image_S=torch.tensor([0, 2]))
    routed = mmod.Routing(kept, torch.zeros(3, 4))
    values, maps = torch.randn(2, 4, 5), torch.rand(2, 2, 4, 4)
    all_tokens = mmod.to_all_tokens(values, routed)
    assert torch.equal(all_tokens[[0, 2]], values)
    assert not all_tokens[1].any()
    all_tokens = mmod.to_all_tokens(maps, routed, attention=True)
    assert torch.equal(all_tokens[[0, 2]], maps)
    assert torch.equal(all_tokens[1], torch.eye(4).expand(2, -1, -1))


def test_gradients_reach_what_the_hook_saw() -> None:
    _, recorded, decisions = watched("merge")
    name, routed = list(decisions.items())[-1]
    values = recorded[f"{name}.norm1"].clone().requires_grad_()
    mmod.to_all_tokens(values, routed).sum().backward()
    assert torch.equal(values.grad[..., 0], routed.joined.size_BK)


def test_values_of_another_block_are_refused() -> None:
    _, recorded, decisions = watched("merge")
    first, *_, last = decisions
    with pytest.raises(ValueError, match="take the decision of the same block"):
        mmod.to_all_tokens(recorded[f"{last}.norm1"], decisions[first])
    with pytest.raises(ValueError, match="that of the block before"):
        mmod.to_all_tokens(recorded[f"{last}.attn.attn_drop"], decisions[first], attention=True)
    with pytest.raises(ValueError, match=r"must be \(B, H, K, K\)"):
        mmod.to_all_tokens(torch.zeros(3), decisions[first], attention=True)


def test_the_map_of_a_block_that_decides_after_its_attention_is_that_of_the_block_before() -> None:
    model: Any = make_model(NAME)
    for block in model.blocks:
        block.attn.fused_attn = False
    mmod.route_(model, mmod.preset("gradual", depth=len(model.blocks)))
    maps: dict[str, Tensor] = {}
    for index, block in enumerate(model.blocks):
        block.attn.attn_drop.register_forward_hook(lambda *args, index=index: maps.update({f"blocks.{index}": args[2]}))
    with mmod.trace(model) as decisions, torch.no_grad():
        model(make_images(NAME, 2))
    names = list(decisions)
    assert maps[names[0]].shape[-1] == decisions[names[0]].score_BN.shape[1]
    for before, name in itertools.pairwise(names):
        full_map = mmod.to_all_tokens(maps[name], decisions[before], attention=True)
        torch.testing.assert_close(full_map.sum(-1), torch.ones_like(full_map[..., 0]))


def test_extraction_by_fx_refuses_what_is_inside_and_hooks_see_it() -> None:
    model: Any = make_model("vit_tiny_patch16_224")
    for block in model.blocks:
        block.attn.fused_attn = False
    x = make_images("vit_tiny_patch16_224", 2)
    dense = AttentionExtract(model, method="fx")(x)
    mmod.route_(model, mmod.RoutingConfig(router="norm", blocks="late", capacity=0.5))
    extracted = AttentionExtract(model, method="fx")
    assert extracted.names == list(dense)
    with pytest.raises(ValueError, match=r"nothing inside it can be extracted.* method='hook'"):
        extracted(x)
    with torch.no_grad():
        assert len(AttentionExtract(model, names=["blocks.*.attn.attn_drop"], method="hook")(x)) == len(dense)
    # What no pattern names is no part of the graph.
    names = AttentionExtract(model, names=["blocks.0.attn.softmax"], method="fx")
    torch.testing.assert_close(names(x)["blocks.0.attn.softmax"], dense["blocks.0.attn.softmax"])
