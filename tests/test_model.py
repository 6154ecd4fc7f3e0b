from __future__ import annotations

import dataclasses
import json
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


class TestConfig:
    def test_survives_json(self) -> None:
        config = RoutingConfig(router="linear", capacity=(0.5, 0.25), blocks=(3, 1), losses={"membership": 0.1})
        assert RoutingConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config

    def test_unknown_option_names_the_valid_ones(self) -> None:
        with pytest.raises(
            ValueError, match="unknown routing option capcity; near ones: capacity; valid ones are router"
        ):
            RoutingConfig.from_dict({"capcity": 0.5})

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            (
                {"router": "atention"},
                "router must be one of 'attention', .*'linear', 'norm', .*, got 'atention'; .*register_score",
            ),
            (
                {"capacity": -0.5},
                r"capacity must be a number in \[0, 1\] or several .*, got -0.5",
            ),
            ({"capacity": 1.5}, r"capacity must be a number in \[0, 1\] .*, got 1.5"),
            (
                {"blocks": "odd"},
                "blocks must be one of 'every_other', 'late', 'all' or several values",
            ),
            ({"select": "top-k"}, "select must be one of 'topk', 'threshold', got 'top-k'"),
            ({"gate": "relu"}, "gate must be one of 'identity', 'linear', 'sigmoid', 'tanh', 'step', got 'relu'"),
            ({"gate": "tanh"}, "gate 'tanh' needs a score that learns"),
            ({"losses": {"membership": 1.0}}, "losses .* needs a score that learns, .* router 'attention' does not"),
            ({"router": "linear", "gate": "identity", "losses": {"load": 1.0}}, "losses.load needs gate 'linear'"),
            ({"router": "linear", "losses": {"bce": 1.0}}, "a loss must be one of 'capacity', 'importance', 'load'"),
            (
                {"router": "linear", "losses": {"load": 0.0}},
                "losses must be a mapping of names to a number above 0",
            ),
            (
                {"router": "linear", "gate": "identity", "skipped": "scale"},
                "skipped='scale' needs .* gate",
            ),
            (
                {"select": {"name": "topk", "max_tokens": 4}},
                "select='topk' has no options, got max_tokens; 'threshold'",
            ),
            ({"select": {"name": "threshold", "min_tokens": 5, "max_tokens": 4}}, r"at least min_tokens \(5\), got 4"),
            (
                {"select": {"name": "threshold", "min_tokens": -1}},
                "min_tokens must be an integer of at least 0, got -1",
            ),
        ],
    )
    def test_wrong_values_are_named(self, fields: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            RoutingConfig(**fields)

    def test_capacity_of_a_wrong_type(self) -> None:
        with pytest.raises(TypeError, match="capacity must be a number"):
            RoutingConfig(capacity="half")

    def test_a_function_cannot_be_saved(self) -> None:
        with pytest.raises(ValueError, match="router is a function cannot be saved"):
            RoutingConfig(router=lambda x: x.sum(-1)).to_dict()

    @pytest.mark.parametrize(
        ("blocks", "capacities", "message"),
        [
            ((), (), r"from 0 to 3, each once, got \[\]"),
            ((5,), (0.5,), r"from 0 to 3, each once, got \[5\]"),
            ((1, 1), (0.5, 0.5), r"ascending numbers from 0 to 3, each once, got \[1, 1\]"),
            ((1, 3), (0.5,), "2 routed blocks need one capacity or as many, got 1"),
        ],
    )
    def test_plans_fit_the_model(self, blocks, capacities, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            RoutingConfig(blocks=blocks, capacity=capacities, depth=4)


class TestRoute:
    def test_routing_twice(self) -> None:
        model = mmod.route_(make_model(NAME))
        with pytest.raises(ValueError, match=r"already routed; call mmod\.undo_ first, or mmod\.set_capacity_"):
            mmod.route_(model)

    def test_unrouting_a_dense_model(self) -> None:
        with pytest.raises(ValueError, match="nothing in this VisionTransformer is routed"):
            mmod.unroute_(make_model(NAME))

    def test_an_impossible_plan_leaves_the_model_as_it_was(self) -> None:
        model = make_model(NAME)
        with pytest.raises(ValueError, match="block 0 needs the importance of a dense block before it"):
            mmod.route_(model, RoutingConfig(blocks="all"))
        assert not mmod.is_routed(model)
        mmod.route_(model)

    @pytest.mark.parametrize(
        ("name", "why"),
        [
            ("beit_base_patch16_224", "Block.*on the meta device: load its weights"),
            (
                "vit_relpos_small_patch16_224",
                "RelPosBlock.*relative_position_index on the meta device: load its weights",
            ),
            ("swin_tiny_patch4_window7_224", r"gets a tensor \(2, 56, 56, 96\)"),
            ("cait_xxs24_224", "LayerScaleBlock.*by another way than attention"),
            ("hiera_tiny_224", "HieraBlock.*does not run on 12 of its 3136 tokens.*a window"),
            ("convnext_atto", r"gets a tensor \(2, 40, 56, 56\)"),
            ("resnet18", "blocks must get tokens"),
            ("samvit_base_patch16", r"gets a tensor \(2, 64, 64, 768\)"),
        ],
    )
    def test_what_cannot_be_routed_says_why(self, name: str, why: str) -> None:
        with torch.device("meta"):
            model = timm.create_model(name)
        with pytest.raises(ValueError, match=f"(?s)cannot route.*{why}"):
            mmod.route_(model)

    @pytest.mark.parametrize("name", [n for n in timm.list_models("vit_*") if re.search(r"_r\d*_|resnet", n)])
    def test_stages_of_a_convolutional_stem_are_no_blocks(self, name: str) -> None:
        with torch.device("meta"):
            model = mmod.route_(timm.create_model(name))
        assert set(mmod.routed_blocks(model)) == {f"blocks.{i}" for i in range(1, len(model.blocks), 2)}

    def test_models_of_no_supported_library(self) -> None:
        with pytest.raises(ValueError, match=r"Linear: supported are models of open_clip, timm, transformers, and"):
            mmod.route_(torch.nn.Linear(2, 2))
        with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got 'deit_small_patch16_224'"):
            mmod.route_("deit_small_patch16_224")
        with pytest.raises(TypeError, match=r"config must be a RoutingConfig, got 0\.5, or the name of"):
            mmod.route_(make_model(NAME), 0.5)

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

    def test_a_wrong_sequence_length_is_an_error(self) -> None:
        model = mmod.route_(make_model(NAME))
        model.blocks[0](torch.randn(2, 10, 64))
        with pytest.raises(ValueError, match="the sequence changed between the two blocks"):
            model.blocks[1](torch.randn(2, 12, 64))

    def test_unknown_block_arguments_are_an_error(self) -> None:
        model = mmod.route_(make_model(NAME))
        with pytest.raises(ValueError, match=r"got 'rope', of which no trial showed .* known are attn_mask"):
            model.blocks[1](torch.randn(1, 4, 64), rope=torch.zeros(4, 8))

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
        model, images = mmod.route_(make_model(NAME)), make_images(NAME, 1)
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

    @pytest.mark.parametrize(
        ("capacity", "message"),
        [
            (-1, r"in \[0, 1\], got -1"),
            ([0.5], "3 blocks are routed, got 1 capacities"),
            ({"blocks.0": 0.5}, r"blocks.0 is not a routed block; routed are blocks.1, blocks.3, blocks.5"),
        ],
    )
    def test_wrong_budgets(self, capacity, message: str) -> None:
        model = mmod.route_(make_model(NAME))
        with pytest.raises(ValueError, match=message):
            mmod.set_capacity_(model, capacity)
        assert set(mmod.capacities(model).values()) == {0.5}

    def test_thresholds_have_no_budget(self) -> None:
        model = mmod.route_(make_model(NAME), RoutingConfig(select="threshold"))
        with pytest.raises(ValueError, match="reach a threshold, so no capacity applies: call mmod"):
            mmod.set_capacity_(model, 0.5)


class TestTrace:
    def test_a_trace_without_a_forward_pass_says_so(self) -> None:
        model = mmod.route_(timm.create_model("test_vit"))
        with mmod.trace(model) as decisions:
            assert not decisions
        assert str(decisions) == "no decisions: no forward pass in this thread had tokens to choose from"
        with pytest.raises(ValueError, match=r"no decisions: .* run the model within"):
            decisions.maps(prefix=1, grid=(10, 10))

    def test_statistics_and_maps(self) -> None:
        model = mmod.route_(make_model(NAME))
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
        model = mmod.route_(make_model(NAME)).train()
        with mmod.trace(model) as decisions:
            model(make_images(NAME, 2))
        model(make_images(NAME, 1))
        assert decisions["blocks.1"].kept.index_BK.shape[0] == 2

    def test_evaluation_keeps_nothing_outside_a_trace(self) -> None:
        model = mmod.route_(make_model(NAME))
        model(make_images(NAME, 2))
        assert all(block.mod_state.routing is None for block in mmod.routed_blocks(model).values())


class TestCheckpointing:
    @pytest.mark.parametrize("router", ["attention", "linear"])
    def test_gradients_are_those_without(self, router: str) -> None:
        gradients = []
        for checkpointing in (False, True):
            model = mmod.route_(make_model(NAME), RoutingConfig(router=router)).train()
            model.set_grad_checkpointing(checkpointing)
            model(make_images(NAME, 2)).square().sum().backward()
            gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        assert gradients[0].keys() == gradients[1].keys()
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-6)


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
