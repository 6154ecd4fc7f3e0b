"""What skipped tokens of an image or caption miss: a branch or the whole block, against slow definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmod
from tests.kit import clip_zoo
from tests.kit.cover import in_turn
from tests.kit.operators import Layers, weighed
from tests.kit.zoo import PLAIN, ZOO, make_images, make_model

WAYS = [("attention", "kept"), ("attention", "all"), ("mlp", "kept")]
OTHERS = ["vit_base_patch16_rpn_224", "vit_base_patch16_xp_224", "vit_small_patch16_18x2_224"]


def defined(block: Any, x: Tensor, routing: mmod.Routing, way: tuple[str, str], arguments: dict[str, Any]) -> Tensor:
    """Return a routed block's output: the dense block with its mask, and a hook on a branch."""
    arguments = {name: value for name, value in arguments.items() if value is not None and value is not False}
    if way == ("attention", "kept"):
        name = "shared_rel_pos_bias" if "shared_rel_pos_bias" in arguments else "attn_mask"
        bias = torch.zeros_like(x[:, None, :, 0]).masked_fill(~routing.keep_BN[:, None], torch.finfo(x.dtype).min)
        arguments[name] = arguments.get(name, 0) + bias[:, :, None].expand(-1, 1, x.shape[1], -1)
    return weighed(block, x, routing, "mlp" if way[0] == "mlp" else "attn", arguments)


@pytest.mark.parametrize(("name", "way"), in_turn(PLAIN, WAYS))
def test_every_block_by_its_definition(name: str, way: tuple[str, str]) -> None:
    images = make_images(name, 3).double()
    learned = mmod.score("linear", init_std=0.5)
    least = 0 if make_model(name).num_prefix_tokens else 0.1
    for options in ({"router": learned}, {"select": mmod.Threshold(0.5)}, {"capacity": least}):
        fields: dict[str, Any] = {"router": "random", "blocks": (1, 2), **options}
        config = mmod.RoutingConfig(**fields, operator=way[0], context=way[1])
        model = mmod.route_(make_model(name).double(), config)
        layers = Layers(model)
        with torch.no_grad(), mmod.trace(model) as decisions:
            model(images)
        mmod.unroute_(model)
        for place, (x, arguments, out) in layers.recorded.items():
            with torch.no_grad():
                expected = defined(model.get_submodule(place), x, decisions[place], way, arguments)
            torch.testing.assert_close(out, expected, rtol=1e-7, atol=1e-9)


def test_a_norm_behind_attention_keeps_it_for_all_tokens() -> None:
    model = clip_zoo.make_clip("custom-blocks")
    with pytest.raises(ValueError, match="possible are block, mlp"):
        mmod.route_(model, mmod.RoutingConfig(router="stride", operator="attention"))
    mmod.route_(model, mmod.RoutingConfig(router="stride", operator="mlp"))


@pytest.mark.parametrize("name", OTHERS)
def test_blocks_without_two_plain_branches_are_refused(name: str) -> None:
    model = make_model(name)
    with pytest.raises(ValueError, match="no such residual branch"):
        mmod.route_(model, mmod.RoutingConfig(router="stride", operator="mlp"))
    assert not mmod.is_routed(model)


@pytest.mark.parametrize("name", ZOO)
def test_capacity_zero_leaves_protected_tokens(name: str) -> None:
    model, images = make_model(name), make_images(name, 2)
    prefix = model.num_prefix_tokens
    config = mmod.RoutingConfig(router="stride", blocks=(2,), capacity=(0.0,))
    if not prefix:
        with pytest.raises(ValueError, match=r"must be in \(0, 1\]"):
            mmod.route_(model, config)
        mmod.route_(model, config.replace(capacity=0.5))
        with pytest.raises(ValueError, match=r"must be in \(0, 1\]"):
            mmod.set_capacity_(model, 0)
        return
    mmod.route_(model, config)
    recorded: list[tuple[Tensor, Tensor]] = []
    model.blocks[2].register_forward_hook(lambda _, args, out: recorded.append((args[0], out)))
    with torch.no_grad():
        model(images)
    ((before, after),) = recorded
    assert torch.equal(before[:, prefix:], after[:, prefix:])
    assert not torch.equal(before[:, :prefix], after[:, :prefix])
