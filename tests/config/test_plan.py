"""Plans: values that print, save, load strictly and route."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mmod
from mmod.config import IMPORTANCE, ROUTING_FIELDS
from mmod.config.plan import CONTEXTS, OPERATORS
from mmod.methods.route import Route
from mmod.planning import drop_once, falling, ratio_decay, stage_drop
from tests.kit.vlm_zoo import make_joint, prompt
from tests.kit.zoo import make_images, make_model

PLAN = mmod.RoutingConfig(
    router="stride",
    blocks=(1, 2, 3),
    capacity=(0.0, 0.5, 0.25),
    operator=("block", "mlp", "attention"),
    context=("all", "kept", "all"),
    depth=4,
)


@st.composite
def plans(draw: st.DrawFn) -> mmod.RoutingConfig:
    depth = draw(st.integers(1, 9))
    blocks = draw(st.lists(st.integers(0, depth - 1), min_size=1, unique=True))
    operators = tuple(draw(st.sampled_from(OPERATORS)) for _ in blocks)
    contexts = tuple("kept" if operator == "mlp" else draw(st.sampled_from(CONTEXTS)) for operator in operators)
    capacities = tuple(draw(st.sampled_from([0.0, 0.125, 0.5, 1.0])) for _ in blocks)
    importance = draw(st.sampled_from(IMPORTANCE))
    scores = ["stride", mmod.score("attention", importance=importance), mmod.score("linear", bias=True)]
    router = draw(st.sampled_from(scores))
    gate = draw(st.sampled_from([None, mmod.Gate("sigmoid", 0.5)])) if router is scores[2] else None
    config = mmod.RoutingConfig(
        router=router,
        gate=gate,
        blocks=tuple(sorted(blocks)),
        capacity=capacities,
        operator=operators,
        context=contexts,
        protect_prefix=draw(st.booleans()),
        depth=depth,
    )
    return config.resolved()


@given(plan=plans())
def test_a_plan_is_a_config_whose_blocks_are_written_out(plan: mmod.RoutingConfig) -> None:
    assert mmod.RoutingConfig.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert mmod.RoutingConfig.from_dict(json.loads(json.dumps(plan.to_dict(complete=True)))) == plan
    assert plan.resolved() == plan.resolved(plan.depth) == plan
    assert eval(repr(plan), {"RoutingConfig": mmod.RoutingConfig}) == plan
    shown = []
    for line in str(plan).splitlines()[4:]:
        blocks, *options = line.strip("| ").replace("|", " ").split()
        first, _, last = blocks.partition("-")
        shown += [[str(block), *options] for block in range(int(first), int(last or first) + 1)]
    assert shown == [[str(block), f"{capacity:g}", *others] for block, capacity, *others in plan.rows]
    assert plan._repr_markdown_() == str(plan)


def test_a_config_of_any_depth_has_no_table() -> None:
    config = mmod.RoutingConfig(router="norm")
    assert str(config) == repr(config)
    assert config._repr_markdown_() is None
    for known in (config, mmod.preset("gradual")):
        for name in ("rows", "mean_capacity", "resolved"):
            with pytest.raises(ValueError, match=r"call config\.resolved\(number of blocks\)"):
                getattr(known, name)()


def test_a_saved_config_holds_every_value_and_prints_what_differs() -> None:
    config = mmod.RoutingConfig(router="linear", skipped="scale")
    saved = Route({"image": config}).to_dict()["parts"]["image"]
    assert saved.keys() == {*ROUTING_FIELDS, "depth"}
    assert saved["gate"] == {"name": "tanh", "scale": 0.2}
    assert saved["router"].keys() == {"name", *(item.name for item in dataclasses.fields(config.router))}
    assert mmod.RoutingConfig.from_dict(json.loads(json.dumps(saved))) == config
    assert str(config) == "RoutingConfig(router='linear', skipped='scale')"


def test_files_are_strict_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    assert mmod.RoutingConfig.load(path) == PLAN
    with pytest.raises(ValueError, match=r'at_depth\(number of blocks\), or write routing: {"preset": "gradual"}'):
        mmod.preset("gradual").save(tmp_path / "preset.json")
    with pytest.raises(FileExistsError, match="overwrite"):
        PLAN.save(path)
    PLAN.save(path, overwrite=True)
    good = PLAN.to_dict(complete=True)
    for wrong, message in (
        ({**good, "score": "linear"}, "unknown routing option score"),
        (
            {**good, "router": "strid"},
            "router 'strid' is unknown; near ones: stride; valid ones are 'attention', .*'stride'",
        ),
        (
            {**good, "router": {"name": "attention", "importance": "first"}},
            "router.importance must be one of 'per_viewer'",
        ),
        ({**good, "capacity": [0, 2, 0.5]}, "capacity must be"),
        ({**good, "operator": ["block"]}, "3 routed blocks need one operator or as many, got 1"),
        ({**good, "context": ["all", "all", "all"]}, "operator='mlp' needs context='kept', got 'all' for block 2"),
        ({**good, "depth": 3}, r"blocks must be ascending numbers from 0 to 2"),
        ([1], "holds no routing config"),
    ):
        path.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=message):
            mmod.RoutingConfig.load(path)


def test_a_plan_routes_and_its_model_is_saved(tmp_path: Path) -> None:
    images = make_images("test_vit", 2)
    plan = mmod.RoutingConfig(router="stride", blocks=(2, 3), capacity=(0.0, 0.0), operator=("block", "mlp"), depth=6)
    model = mmod.route_(make_model("test_vit"), plan)
    mmod.save_pretrained(model, tmp_path / "routed")
    again = mmod.load_pretrained(tmp_path / "routed")
    assert mmod.routing_config(again) == plan
    with torch.no_grad():
        assert torch.equal(model(images), again(images))


def test_language_models_keep_their_plan(tmp_path: Path) -> None:
    batch = prompt("llava", (1, 2))
    model = mmod.route_(make_joint("llava"), language=PLAN)
    model.save_pretrained(tmp_path / "routed")
    again = mmod.load_pretrained(tmp_path / "routed")
    assert mmod.routing_config(again) == PLAN
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, again(**batch).logits)


def test_another_router_takes_the_place_of_the_score_of_a_plan() -> None:
    router = {"name": "attention", "importance": "last_token"}
    plan = mmod.RoutingConfig(router=router, blocks=(1,), capacity=(0.5,), depth=4)
    assert plan.replace(router={"importance": "mean"}).router.importance == "mean"
    config = falling(6, 0.6).replace(router="linear")
    assert (config.router, config.gate.name) == (mmod.score("linear"), "tanh")
    assert "1 of 4 blocks are routed by attention (last_token)" in str(plan)


@pytest.mark.parametrize("depth", ["12", 10**400, 0, None])
def test_depths_are_checked_wherever_they_are_given(depth: Any) -> None:
    calls = [
        *(lambda make=make: make(depth) for make in (ratio_decay, stage_drop, drop_once, falling)),
        lambda: mmod.RoutingConfig().at_depth(depth),
        lambda: mmod.RoutingConfig().resolved(depth),
    ]
    names = ("p-mod", "mindskip", "gradual", "gamma-mod", "ipcv", "v2drop", "evenly-spread", "tread")
    calls += [lambda name=name: mmod.preset(name).resolved(depth) for name in names if depth is not None]
    calls += [lambda name=name: mmod.preset(name, depth=depth) for name in names if depth is not None]
    for call in calls:
        with pytest.raises((TypeError, ValueError), match="depth"):
            call()
