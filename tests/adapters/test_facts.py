"""What adapters know of timm's and open_clip's blocks is what a trial of them finds."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import timm
from open_clip import transformer

from mmod.adapters import find_parts, find_stack, tokens
from mmod.adapters.base import BlockStack
from mmod.blocks import CallForm
from tests.kit.clip_zoo import ZOO as CLIP_ZOO
from tests.kit.clip_zoo import make_captions, make_clip
from tests.kit.zoo import ZOO, make_model

FIELDS = [form.name for form in dataclasses.fields(CallForm)]
# What no trial can see, by the model: a trial takes all tokens in front for class tokens, the grid of NaFlex's patches
# stands beside their tokens, a norm behind a branch silences it too, and rotary rows that no model passes are unknown.
UNSEEN: dict[str, set[str]] = {
    "test_vit2": {"class_token"},
    "test_vit3": {"class_token"},
    "vit_little_patch16_reg4_gap_256": {"class_token"},
    "vit_so150m_patch16_reg4_gap_256": {"class_token"},
    "vit_dlittle_patch16_reg1_gap_256": {"class_token"},
    "vit_mediumd_patch16_rope_reg1_gap_256": {"class_token"},
    "naflexvit_base_patch16_gap": {"class_token", "grid"},
    "naflexvit_base_patch16_par_gap": {"class_token", "grid"},
    "vit_base_patch16_rpn_224": {"operators"},
    "eva_giant_patch14_224": {"rows", "rope_prefix"},
}


def described(stack: BlockStack) -> list[dict[str, Any]]:
    """Return what is known of every block of a stack."""
    shared = {name: getattr(stack, name) for name in ("prefix", "dim", "class_token", "host")}
    shared["grid"] = None if stack.grid is None else stack.grid.module
    blocks = []
    for name, block in zip(stack.names, stack.blocks):
        call: Any = stack.call_of(block, None)
        form = {field: getattr(call, field) for field in FIELDS}
        branches = {"operators": dict(call.operators), "tuples": call.tuples, "halves": call.halves is not None}
        blocks.append({"name": name, **shared, **form, **branches})
    return blocks


def differing(known: BlockStack, tried: BlockStack) -> set[str]:
    """Return the names of what differs in any block of two stacks."""
    names = set()
    for first, second in zip(described(known), described(tried), strict=True):
        names |= {name for name, value in first.items() if value != second[name]}
    return names


@pytest.mark.parametrize("name", [name for name in ZOO if not name.startswith("beit")])
def test_facts_of_timm_are_what_a_trial_finds(name: str) -> None:
    model = make_model(name)
    assert differing(find_stack(model), tokens.find_blocks(model, "timm")) == UNSEEN.get(name, set())


def test_blocks_that_make_a_bias_are_left_to_a_trial_which_refuses_them() -> None:
    with pytest.raises(
        ValueError, match="computes with their positions: by windows, a bias for each pair of positions"
    ):
        find_stack(timm.create_model("beit_base_patch16_224", depth=2, img_size=32))


def test_a_bias_that_an_adapter_narrows_is_refused_by_a_trial() -> None:
    model = make_model("beit_base_patch16_224")
    assert find_stack(model).call_of(find_stack(model).blocks[0], None).mask == "shared_rel_pos_bias"
    with pytest.raises(
        ValueError, match="computes with their positions: by windows, a bias for each pair of positions"
    ):
        tokens.find_blocks(model, "timm")


@pytest.mark.parametrize("name", CLIP_ZOO)
def test_facts_of_image_towers_of_open_clip_are_what_a_trial_finds(name: str) -> None:
    tower: Any = make_clip(name).visual
    if not isinstance(tower, transformer.VisionTransformer):
        # Models of timm.
        assert find_stack(tower).blocks == find_stack(tower.trunk).blocks
        return
    known = find_stack(tower)
    tried = tokens.find_blocks(tower, "open_clip")
    # torch's attention takes masks by head, which no trial passes.
    by_head = name != "custom-blocks"
    assert differing(known, tried) == ({"mask"} if by_head else set())
    for block in known.blocks:
        # Partial functions are equal to no others, and their texts are.
        assert repr(known.call_of(block, None).halves) == repr(tried.call_of(block, None).halves)


@pytest.mark.parametrize("name", ["ViT-B-32", "ViT-B-16-SigLIP", "coca_ViT-B-32", "custom-blocks"])
def test_facts_of_text_towers_of_open_clip_are_what_a_trial_finds(name: str) -> None:
    model: Any = make_clip(name)
    tower: Any = getattr(model, "text", model)
    known = find_parts(model)["text"]()
    # A trial refuses causal attention, whose mask the adapter narrows: it sees the blocks without it.
    tower.attn_mask = None
    tower.cls_emb = None
    tower.mod_tokens = tokens.Tokens("transformer.resblocks", example={"text": make_captions(name, (5, 7))})
    tried = dataclasses.replace(tokens.find_blocks(tower, "open_clip"), block_list=known.block_list)
    # Two captions of the example are alike, so that all of their tokens seem to be the same for every image.
    unseen = {"prefix", "class_token", "suffix"}
    assert differing(known, tried) == (unseen if name == "custom-blocks" else {*unseen, "mask"})
    for block in known.blocks:
        assert repr(known.call_of(block, None).halves) == repr(tried.call_of(block, None).halves)
