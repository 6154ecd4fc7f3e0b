"""Presets by name: resolved by the model's depth, wherever a routing is named, and with advice that works."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import mmod
from mmod.config import PRESETS, Preset, preset_arguments, read_routing, rescaled
from mmod.io.yaml import merged
from mmod.methods.resolve import resolve_methods, resolve_routing
from mmod.training import TrainConfig
from mmod.training.engine.kind import create
from mmod.training.kinds import kind_of
from tests.kit.clip_zoo import make_clip
from tests.kit.cover import in_turn
from tests.kit.vlm_zoo import make_joint
from tests.kit.zoo import make_images, make_model

NAME = "test_vit"
BY_DEPTH = ("evenly-spread", "gamma-mod", "gradual", "ipcv", "mindskip", "p-mod", "tread", "v2drop")
FOR_LANGUAGE = ("evenly-spread", "evs", "gamma-mod", "pixelprune-language", "v2drop", "videollm-mod")
FOR_IMAGES = tuple(name for name in sorted(PRESETS) if name not in (*FOR_LANGUAGE, "contrast-mod"))


def make(depth: int = 6) -> nn.Module:
    return timm.create_model(NAME, depth=depth)


ROUTES: dict[str, Callable[[nn.Module, str], object]] = {
    "config": lambda model, name: mmod.route_(model, mmod.preset(name)),
    "name": mmod.route_,
    "part": lambda model, name: mmod.route_(model, image=name),
    "apply_": mmod.apply_,
    "plain values": lambda model, name: mmod.apply_(model, {"kind": "routing", "parts": {"image": {"preset": name}}}),
    "file": lambda model, name: mmod.route_(model, resolve_routing({"preset": name})),
    "methods of a file": lambda model, name: mmod.apply_(model, *resolve_methods((), {"image": {"preset": name}})),
}


@pytest.mark.parametrize(("name", "way"), in_turn(FOR_IMAGES, ROUTES, times=2))
def test_a_preset_takes_the_depth_from_the_model(name: str, way: str) -> None:
    for depth in (5, 6):
        model = make(depth)
        ROUTES[way](model, name)
        assert mmod.routing_config(model) == mmod.preset(name, depth=depth)
        assert not isinstance(mmod.routing_config(model), Preset)


@pytest.mark.parametrize("name", ["gamma-mod", "p-mod", "videollm-mod", "a-mod"])
def test_a_preset_takes_the_depth_of_a_language_model(name: str) -> None:
    model = mmod.route_(make_joint("llava", num_hidden_layers=7), language=name)
    assert mmod.routing_config(model) == mmod.preset(name, depth=7)


def test_each_tower_has_its_own_depth() -> None:
    model = mmod.route_(make_clip("ViT-B-32"), "p-mod")
    for part, blocks in (("image", model.visual.transformer.resblocks), ("text", model.transformer.resblocks)):
        assert mmod.routing_config(model, part).blocks == mmod.preset("p-mod", depth=len(blocks)).blocks


def test_registered_models_and_loaded_ones_have_the_resolved_config(tmp_path: Path) -> None:
    model = mmod.route_(make(), "gradual").eval()
    mmod.save_pretrained(model, tmp_path / "routed")
    loaded = mmod.load_pretrained(tmp_path / "routed").eval()
    assert mmod.routing_config(loaded) == mmod.preset("gradual", depth=6)
    images = make_images(NAME, 2)
    with torch.no_grad():
        assert torch.equal(loaded(images), model(images))
        for capacity in (0.7, 0.3):
            for each in (model, loaded):
                mmod.set_capacity_(each, capacity)
            assert torch.equal(loaded(images), model(images))
    mmod.save_pretrained(model, tmp_path / "scaled")
    assert mmod.capacities(mmod.load_pretrained(tmp_path / "scaled")) == mmod.capacities(model)


def test_a_training_config_names_a_preset_without_its_depth(tmp_path: Path) -> None:
    fields = {
        "output": str(tmp_path / "run"),
        "model": {"name": NAME, "args": {"num_classes": 10, "in_chans": 1, "img_size": 32, "patch_size": 8}},
        "data": {"source": "digits", "image_size": 32, "channels": 1, "batch_size": 8},
        "routing": {"preset": "gradual", "mean": 0.7, "router": {"channels": 32}},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(fields))
    config = TrainConfig.load(path)
    # As a run folder keeps it.
    path.write_text(yaml.safe_dump(config.to_dict()))
    again = TrainConfig.load(path)
    assert again.to_dict() == config.to_dict()
    for each in (config, again):
        model = create(kind_of(each))
        assert mmod.routing_config(model) == mmod.preset("gradual", depth=6, mean=0.7, router={"channels": 32})


@pytest.mark.parametrize("name", BY_DEPTH)
def test_an_unresolved_preset_has_the_fields_that_do_not_depend_on_depth(name: str) -> None:
    config = mmod.preset(name, protect_prefix=False)
    for depth in (6, 9):
        resolved = config.at_depth(depth)
        assert resolved == mmod.preset(name, depth=depth, protect_prefix=False)
        assert config.resolved(depth) == resolved.resolved(depth)
        for field in ("router", "gate", "select", "skipped", "losses", "language", "protect_prefix", "operator"):
            assert getattr(config, field) == getattr(resolved, field)
    with pytest.raises(AttributeError, match="capacity of a preset depends on the number of blocks"):
        _ = mmod.preset("gradual", capacity=0.45).capacity
    with pytest.raises(AttributeError, match="blocks of a preset depends on the number of blocks: route a model by it"):
        _ = config.blocks
    assert not hasattr(config, "block")
    for same in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), read_routing(config.to_dict())):
        assert same == config
    assert json.loads(json.dumps(config.to_dict(complete=True))) == {"preset": name, "protect_prefix": False}
    assert eval(repr(config), {"preset": mmod.preset}) == config
    assert config != mmod.preset(name)


def test_changes_of_an_unresolved_preset_add_up() -> None:
    config = mmod.preset("p-mod", gate={"scale": 0.1}).replace(router={"init_std": 0.3}, gate={"name": "sigmoid"})
    once = mmod.preset("p-mod", depth=6, gate={"name": "sigmoid"}, router={"init_std": 0.3})
    assert config.at_depth(6) == config.replace(depth=6) == once


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_config_resolves_into_one_with_blocks_written_out(name: str) -> None:
    for config in (mmod.preset(name), mmod.preset(name, depth=9)):
        resolved = config.resolved(9)
        assert resolved.depth == 9
        assert tuple(zip(resolved.blocks, resolved.capacity)) == tuple(row[:2] for row in resolved.rows)
        assert resolved.resolved(9) == resolved.resolved() == resolved
        assert mmod.RoutingConfig.from_dict(resolved.to_dict()) == resolved


# Capacity -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0, 1))
def test_rescaled_capacities_have_the_mean_the_order_and_the_range(capacities: list[float], mean: float) -> None:
    scaled = rescaled(capacities, mean)
    if mean == 0 or sum(capacities):
        assert sum(scaled) / len(scaled) == pytest.approx(mean, abs=1e-6)
    assert all(0 <= share <= 1 for share in scaled)
    order = sorted(range(len(scaled)), key=lambda index: capacities[index])
    assert all(scaled[low] <= scaled[high] for low, high in itertools.pairwise(order))


@pytest.mark.parametrize("capacity", [1e-3, 0.2, 0.6, 0.9, 1])
@pytest.mark.parametrize("name", ["gradual", "p-mod"])
def test_one_capacity_is_the_mean_of_a_planned_fall(name: str, capacity: float) -> None:
    planned = mmod.preset(name, depth=12)
    for config in (mmod.preset(name, depth=12, capacity=capacity), mmod.preset(name, capacity=capacity).at_depth(12)):
        assert config.blocks == planned.blocks
        assert sum(config.capacity) / len(config.capacity) == pytest.approx(capacity, abs=1e-6)
        if capacity < 1:
            assert config.capacity[0] > config.capacity[-1]
    # Setting it later is the same, in any order, and the list that a config began with comes back.
    model = mmod.route_(make(12), name)
    for later in (0.1, capacity):
        mmod.set_capacity_(model, later)
    assert tuple(mmod.capacities(model).values()) == pytest.approx(config.capacity)
    mmod.set_capacity_(model, list(planned.capacity))
    assert tuple(mmod.capacities(model).values()) == planned.capacity


def test_several_capacities_and_own_blocks_replace_the_plan() -> None:
    shares = (0.9, 0.8, 0.7, 0.6, 0.5)
    assert mmod.preset("gradual", depth=6, capacity=shares).capacity == shares
    assert mmod.preset("gradual", capacity=shares).at_depth(6).capacity == shares
    assert mmod.preset("gradual", depth=6, blocks=(1, 2), capacity=0.5).capacity == 0.5
    with pytest.raises(ValueError, match=r"'pixelprune' selects by a threshold.*leave out capacity=0\.5"):
        mmod.preset("pixelprune", capacity=0.5)
    aimed = r"leave out capacity=0, .*or losses=\{'load': 0\.01, 'capacity': 1\.0\}, which aim at it in training"
    with pytest.raises(ValueError, match=rf"'modification' selects by a threshold.*{aimed}"):
        mmod.preset("modification", capacity=0)
    assert mmod.preset("modification", capacity=0.5, losses={"load": 0.01, "capacity": 1.0}).capacity == 0.5
    assert mmod.preset("pixelprune", capacity=0.5, select="topk").capacity == 0.5
    message = r"'gradual' plans capacities for 5 blocks, and blocks='late' are 4: pass capacity too"
    for call in (
        lambda: mmod.preset("gradual", depth=6, blocks="late"),
        lambda: mmod.route_(make(), mmod.preset("gradual", blocks="late")),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    for depth in (3, 6, 12):
        blocks = tuple(range(1, depth))
        assert mmod.preset("gradual", blocks=blocks).at_depth(depth) == mmod.preset("gradual", depth=depth)
        assert mmod.preset("gradual", depth=depth, blocks=blocks) == mmod.preset("gradual", depth=depth)
    for capacity in (0.5, (0.5, 0.4, 0.3, 0.2)):
        model = mmod.route_(make(), mmod.preset("gradual", blocks="late", capacity=capacity))
        assert list(mmod.routed_blocks(model)) == [f"blocks.{index}" for index in range(2, 6)]


@pytest.mark.parametrize("name", ["a-mod", "mod", "distilled"])
def test_one_capacity_sets_all_blocks_where_the_preset_has_one(name: str) -> None:
    assert mmod.preset(name, capacity=0.3).capacity == 0.3
    model = mmod.set_capacity_(mmod.route_(make(), name), 0.3)
    assert set(mmod.capacities(model).values()) == {0.3}


@pytest.mark.parametrize("capacity", [-0.1, 1.5, float("nan"), "0.5", True])
def test_a_capacity_out_of_range_is_named(capacity: Any) -> None:
    model = mmod.route_(make(), "gradual")
    before = mmod.capacities(model)
    for call in (lambda: mmod.preset("gradual", capacity=capacity), lambda: mmod.set_capacity_(model, capacity)):
        with pytest.raises((TypeError, ValueError), match=rf"capacity must be .*, got {re.escape(repr(capacity))}"):
            call()
    assert mmod.capacities(model) == before


# Messages, each advice followed ---------------------------------------------------------------------------------------


def follow(message: str, model: nn.Module) -> nn.Module:
    """Run the call of `mmod.route_` that a message advises."""
    advised = re.search(r"mmod\.route_\(model, .*\)(?=: )", message)
    assert advised is not None, message
    return eval(advised[0], {"mmod": mmod, "model": model})


@pytest.mark.parametrize(
    ("arguments", "parts", "expected"),
    [
        ((), {"preset": "gradual"}, mmod.preset("gradual", depth=6)),
        ((), {"preset": "gradual", "mean": 0.7}, mmod.preset("gradual", depth=6, mean=0.7)),
        (("gradual",), {"start": 2, "capacity": 0.5}, mmod.preset("gradual", 6, start=2, capacity=0.5)),
        (("a-mod",), {"capacity": 0.25}, mmod.preset("a-mod", capacity=0.25)),
        ((), {"router": "norm", "capacity": 0.25}, mmod.RoutingConfig(router="norm", capacity=0.25)),
    ],
)
def test_arguments_taken_for_parts_are_told_their_place(
    arguments: tuple[str, ...], parts: dict[str, Any], expected: mmod.RoutingConfig
) -> None:
    with pytest.raises(ValueError, match=f"^call .*this model has no part {', '.join(sorted(parts))}; ") as refusal:
        mmod.route_(make(), *arguments, **parts)
    assert mmod.routing_config(follow(str(refusal.value), make())) == expected


@pytest.mark.parametrize("depth", [None, 6])
def test_two_budgets_of_a_preset_are_refused(depth: int | None) -> None:
    with pytest.raises(ValueError, match=r"takes mean or capacity, got mean=0\.5 and capacity=0\.9: leave one"):
        mmod.preset("gradual", depth, mean=0.5, capacity=0.9)


def test_a_later_mean_takes_the_place_of_a_capacity() -> None:
    assert mmod.preset("gradual", mean=0.5).replace(capacity=0.9) == mmod.preset("gradual", capacity=0.9)
    assert mmod.preset("gradual", capacity=0.9).replace(mean=0.5) == mmod.preset("gradual", mean=0.5)


def test_another_preset_over_a_config_leaves_out_an_option_of_the_former_by_null() -> None:
    former = {"routing": {"preset": "gradual", "mean": 0.7, "capacity": 0.5}}
    with pytest.raises(ValueError, match=r"preset 'a-mod' has no option mean.*`mean: null`"):
        read_routing(merged(former, {"routing": {"preset": "a-mod"}})["routing"])
    # What both have stays.
    changed = merged(former, {"routing": {"preset": "a-mod", "mean": None}}, null_removes=True)
    assert read_routing(changed["routing"]) == mmod.preset("a-mod", capacity=0.5)


def test_null_leaves_out_an_option_of_a_preset() -> None:
    for name in ("gradual", "a-mod"):
        assert read_routing({"preset": name, "mean": None}) == mmod.preset(name)
    assert read_routing({"preset": "gradual", "mean": 0.7, "capacity": None}) == mmod.preset("gradual", mean=0.7)
    with pytest.raises(ValueError, match="unknown routing option"):
        read_routing({"preset": "gradual", "meen": None})


@pytest.mark.parametrize(("name", "field"), [("norm", "router"), ("late", "blocks")])
def test_values_of_fields_are_told_from_presets(name: str, field: str) -> None:
    with pytest.raises(TypeError, match=f"got '{name}', which is a value of {field}: pass mmod") as refusal:
        mmod.route_(make(), name)
    config = eval(str(refusal.value).rpartition(" pass ")[2], {"mmod": mmod})
    assert mmod.is_routed(mmod.route_(make(), config))


@pytest.mark.parametrize("name", FOR_LANGUAGE)
def test_a_language_preset_on_a_vit_names_those_for_images(name: str) -> None:
    model = make()
    with pytest.raises(ValueError, match=rf"Presets for language models alone are .*'{name}'") as refusal:
        mmod.route_(model, name)
    advised = re.findall(r"'([\w-]+)'", str(refusal.value).partition("presets for images are ")[2])
    assert {*FOR_IMAGES} <= {*advised}


def test_a_preset_has_its_own_arguments_and_those_of_a_config() -> None:
    assert preset_arguments("gradual") == ("mean", "start", *preset_arguments("a-mod"))


# The list -------------------------------------------------------------------------------------------------------------


def test_the_list_says_what_each_preset_is_for() -> None:
    lines = [line for line in repr(mmod.presets()).splitlines() if not line.startswith(("| preset ", "| :"))]
    assert [line.split()[1] for line in lines] == sorted(PRESETS)
    assert all(line.split("|")[4].strip() for line in lines if line.split()[1] in (*FOR_IMAGES, *FOR_LANGUAGE))
    for name in mmod.presets("image"):
        model = mmod.route_(make(), name)
        learned = [key for key, _ in model.named_parameters() if ".router." in key]
        is_dense = not mmod.is_routed(model.eval())
        assert (bool(learned) or is_dense) == (name in mmod.presets(needs_training=True))
    for name in mmod.presets("language"):
        # Frames need a model that gets videos.
        model = make_joint("qwen2-vl" if name == "evs" else "llava", num_hidden_layers=7)
        mmod.route_(model, language=name)
    with pytest.raises(ValueError, match="part must be one of 'image', 'language', got 'text'"):
        mmod.presets("text")


# Thresholds have no capacity.
@pytest.mark.parametrize("name", sorted({*mmod.presets("image")} - {"pixelprune", "modification"}))
def test_a_capacity_of_zero_is_refused(name: str) -> None:
    model = make()
    with pytest.raises(ValueError, match=r"capacity 0 leaves blocks\."):
        mmod.route_(model, mmod.preset(name, capacity=0))
    assert not mmod.is_routed(model)


@pytest.mark.parametrize("name", ["p-mod", "v2drop"])
def test_a_plan_for_language_models_may_keep_no_image_token(name: str) -> None:
    model = mmod.route_(make_joint("llava", num_hidden_layers=7), language=mmod.preset(name, capacity=0))
    assert set(mmod.capacities(model).values()) == {0.0}


@pytest.mark.parametrize("name", mmod.presets("image"))
def test_a_loop_over_presets_needs_no_case(name: str) -> None:
    model = mmod.route_(make(), name).train()
    loss = model(make_images(NAME, 2)).square().mean() + mmod.auxiliary_loss(model)
    loss.backward()
    assert torch.isfinite(loss)


def test_the_package_has_a_version() -> None:
    assert re.match(r"\d+\.\d+", mmod.__version__)
    assert mmod.route_(make_model(NAME), "gradual")
