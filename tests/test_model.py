from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import timm
import torch

import mmod
from mmod import RoutingConfig
from mmod.methods.base import undo_
from mmod.methods.route import deciding_by
from tests.kit.zoo import make_images, make_model

NAME = "test_vit"


class TestRoute:
    @pytest.mark.parametrize(
        ("name", "why"),
        [
            ("beit_base_patch16_224", "Block.*on the meta device: load its weights"),
            (
                "vit_relpos_small_patch16_224",
                "RelPosBlock.*relative_position_index on the meta device: load its weights",
            ),
            ("swin_tiny_patch4_window7_224", r"gets a tensor \(2, 56, 56, 96\).* windows read every .* cheaper$"),
            ("cait_xxs24_224", "LayerScaleBlock.*by another way than attention"),
            ("hiera_tiny_224", "HieraBlock.*does not run on 12 of its 3136 tokens.* by windows"),
            ("convnext_atto", r"gets a tensor \(2, 40, 56, 56\)"),
            ("resnet18", "must get tokens.* Convolutions and windows read every place of a map.* so does .*Channels"),
            ("samvit_base_patch16", r"gets a tensor \(2, 64, 64, 768\)"),
        ],
    )
    def test_what_cannot_be_routed_says_why(self, name: str, why: str) -> None:
        with torch.device("meta"):
            model = timm.create_model(name)
        with pytest.raises(ValueError, match=f"(?s)cannot route.*{why}"):
            mmod.route_(model, mmod.RoutingConfig())

    @pytest.mark.parametrize("name", [n for n in timm.list_models("vit_*") if re.search(r"_r\d*_|resnet", n)][::4])
    def test_stages_of_a_convolutional_stem_are_no_blocks(self, name: str) -> None:
        with torch.device("meta"):
            model = mmod.route_(timm.create_model(name), mmod.RoutingConfig())
        assert set(mmod.routed_blocks(model)) == {f"blocks.{i}" for i in range(1, len(model.blocks), 2)}

    @pytest.mark.parametrize(
        "call",
        [
            mmod.is_routed,
            mmod.routed_blocks,
            mmod.capacities,
            mmod.unroute_,
            mmod.freeze_dense_,
            mmod.auxiliary_loss,
            undo_,
            lambda model: mmod.set_capacity_(model, 0.5),
            lambda model: mmod.trace(model).__enter__(),
            lambda model: mmod.flops(model, 64),
            lambda model: mmod.flops(model, mmod.Prompt(4)),
            lambda model: mmod.search_plan(model, [], 0.5),
            lambda model: mmod.attention_ranks(model, []),
            lambda model: mmod.save_pretrained(model, "folder"),
        ],
    )
    def test_a_name_where_a_model_is_expected_is_refused(self, call: Callable[[Any], object]) -> None:
        with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got 'test_vit'"):
            call("test_vit")

    def test_prefix_protection_can_be_given_up(self) -> None:
        model = mmod.route_(make_model(NAME), RoutingConfig(router="norm", capacity=0.1, protect_prefix=False))
        with mmod.trace(model) as decisions:
            model(make_images(NAME, 8))
        assert not all(bool(routing.keep_BN[:, 0].all()) for routing in decisions.values())
        with pytest.raises(
            ValueError, match="protect_prefix must be True: rotary positions need the prefix tokens first"
        ):
            mmod.route_(make_model("eva02_tiny_patch14_224"), RoutingConfig(protect_prefix=False))


class TestCapacity:
    def test_another_budget_on_the_same_weights(self) -> None:
        model, images = mmod.route_(make_model(NAME), mmod.RoutingConfig()), make_images(NAME, 1)
        for value, expected in [
            (0.25, [0.25, 0.25, 0.25]),
            ([0.5, 0.25, 1.0], [0.5, 0.25, 1.0]),
            ({"blocks.3": 0.125}, [0.5, 0.125, 1.0]),
        ]:
            mmod.set_capacity_(model, value)
            assert list(mmod.capacities(model).values()) == expected
            with mmod.trace(model) as decisions:
                model(images)
            assert [r.kept.index_BK.shape[1] for r in decisions.values()] == [int(37 * c) for c in expected]


class TestTrace:
    def test_a_trace_without_a_forward_pass_says_so(self) -> None:
        model = mmod.route_(timm.create_model("test_vit"), mmod.RoutingConfig())
        with mmod.trace(model) as decisions:
            assert not decisions
        assert str(decisions) == "no decisions: no forward pass in this thread had tokens to choose from"
        with pytest.raises(ValueError, match=r"no decisions: .* run the model within"):
            decisions.maps(prefix=1, grid=(10, 10))

    def test_statistics_and_maps(self) -> None:
        model = mmod.route_(make_model(NAME), mmod.RoutingConfig())
        with mmod.trace(model) as decisions:
            model(make_images(NAME, 2))
        assert list(decisions) == ["blocks.1", "blocks.3", "blocks.5"]
        assert decisions.kept_shares() == pytest.approx(dict.fromkeys(decisions, 18 / 37))
        maps = decisions.maps(prefix=1, grid=(6, 6))
        assert maps.shape == (3, 2, 6, 6)
        assert int(maps.sum()) == 3 * 2 * 17
        with pytest.raises(ValueError, match="a grid of 5 x 6 does not hold 36 patches"):
            decisions.maps(prefix=1, grid=(5, 6))
        with pytest.raises(KeyError, match=r"blocks\.2"):
            decisions["blocks.2"]

    def test_a_closed_trace_stays_as_it_was(self) -> None:
        model = mmod.route_(make_model(NAME), mmod.RoutingConfig()).train()
        with mmod.trace(model) as decisions:
            model(make_images(NAME, 2))
        model(make_images(NAME, 1))
        assert decisions["blocks.1"].kept.index_BK.shape[0] == 2

    def test_evaluation_keeps_nothing_outside_a_trace(self) -> None:
        model = mmod.route_(make_model(NAME), mmod.RoutingConfig())
        model(make_images(NAME, 2))
        assert all(block.mod_state.routing is None for block in mmod.routed_blocks(model).values())


def test_configs_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RoutingConfig().capacity = 0.1


def test_another_way_to_decide_holds_in_its_thread_alone() -> None:
    config = RoutingConfig(router="linear", blocks="all", capacity=0.3)
    model, images = mmod.route_(make_model(NAME), config).eval(), make_images(NAME, 2)
    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        alone = model(images)
        with deciding_by(model, lambda config: config.replace(select={"threshold": 0.0})):
            every_token = model(images)
            meanwhile = pool.submit(torch.no_grad()(model), images).result()
    assert not torch.equal(every_token, alone)
    assert torch.equal(meanwhile, alone)
