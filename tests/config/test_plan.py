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

PLAN = mmod.Plan((1, 2, 3), (0.0, 0.5, 0.25), 4, ("block", "mlp", "attention"), ("all", "kept", "all"), "stride")


@st.composite
def plans(draw: st.DrawFn) -> mmod.Plan:
    depth = draw(st.integers(1, 9))
    blocks = draw(st.lists(st.integers(0, depth - 1), min_size=1, unique=True))
    operators = tuple(draw(st.sampled_from(OPERATORS)) for _ in blocks)
    contexts = tuple("kept" if operator == "mlp" else draw(st.sampled_from(CONTEXTS)) for operator in operators)
    capacities = tuple(draw(st.sampled_from([0.0, 0.125, 0.5, 1.0])) for _ in blocks)
    importance = draw(st.sampled_from(IMPORTANCE))
    scores = ["stride", mmod.score("attention", importance=importance), mmod.score("linear", bias=True)]
    router = draw(st.sampled_from(scores))
    gate = draw(st.sampled_from([None, mmod.Gate("sigmoid", 0.5)])) if router is scores[2] else None
    prefix = draw(st.booleans())
    return mmod.Plan(tuple(sorted(blocks)), capacities, depth, operators, contexts, router, gate, prefix)


@given(plan=plans())
def test_plans_and_configs_say_the_same(plan: mmod.Plan) -> None:
    assert mmod.Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    config = mmod.RoutingConfig.from_plan(plan)
    assert config.plan(plan.depth) == plan
    assert mmod.RoutingConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    shown = []
    for line in str(plan).splitlines()[4:]:
        blocks, *options = line.strip("| ").replace("|", " ").split()
        first, _, last = blocks.partition("-")
        shown += [[str(block), *options] for block in range(int(first), int(last or first) + 1)]
    assert shown == [[str(block), f"{capacity:g}", *others] for block, capacity, *others in plan.rows]
    assert plan._repr_markdown_() == str(plan)


def test_a_saved_config_holds_every_value_and_prints_what_differs() -> None:
    config = mmod.RoutingConfig(router="linear", skipped="scale")
    saved = Route({"image": config}).to_dict()["parts"]["image"]
    assert saved.keys() == set(ROUTING_FIELDS)
    assert saved["gate"] == {"name": "tanh", "scale": 0.2}
    assert saved["router"].keys() == {"name", *(item.name for item in dataclasses.fields(config.router))}
    assert mmod.RoutingConfig.from_dict(json.loads(json.dumps(saved))) == config
    assert str(config) == "RoutingConfig(router='linear', skipped='scale')"


def test_files_are_strict_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    assert mmod.Plan.load(path) == PLAN
    with pytest.raises(FileExistsError, match="overwrite"):
        PLAN.save(path)
    PLAN.save(path, overwrite=True)
    good = PLAN.to_dict()
    for wrong, message in (
        ({**good, "score": "linear"}, "unknown field of a plan score"),
        ({key: good[key] for key in ("blocks", "depth")}, "a plan needs capacities"),
        ({**good, "router": "strid"}, "router must be one of 'attention', .*'stride', .*got 'strid'"),
        (
            {**good, "router": {"name": "attention", "importance": "first"}},
            "router.importance must be one of 'per_viewer'",
        ),
        ({**good, "router": None, "gate": "tanh"}, "pass router too"),
        ({**good, "capacities": [0, 2, 0.5]}, "capacities must be"),
        ({**good, "operators": ["block"]}, "as many operators, got 1"),
        ({**good, "contexts": ["all", "all", "all"]}, "operator='mlp' needs context='kept'"),
        ([1], "holds no plan"),
    ):
        path.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=message):
            mmod.Plan.load(path)


def test_a_plan_routes_and_its_model_is_saved(tmp_path: Path) -> None:
    images = make_images("test_vit", 2)
    plan = mmod.Plan((2, 3), (0.0, 0.0), len(make_model("test_vit").blocks), ("block", "mlp"), router="stride")
    model = mmod.route_(make_model("test_vit"), plan)
    mmod.save_pretrained(model, tmp_path / "routed")
    again = mmod.load_pretrained(tmp_path / "routed")
    assert mmod.routing_config(again).plan(plan.depth) == plan
    with torch.no_grad():
        assert torch.equal(model(images), again(images))
    with pytest.raises(ValueError, match="the plan is for 4 blocks, the model has 6"):
        mmod.route_(make_model("test_vit"), PLAN)
    with pytest.raises(TypeError, match="RoutingConfig or a Plan"):
        mmod.route_(make_model("test_vit"), "late")  # type: ignore[arg-type]


def test_language_models_keep_their_plan(tmp_path: Path) -> None:
    batch = prompt("llava", (1, 2))
    model = mmod.route_(make_joint("llava"), language=PLAN)
    model.save_pretrained(tmp_path / "routed")
    again = mmod.load_pretrained(tmp_path / "routed")
    assert mmod.routing_config(again).plan(4) == PLAN
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, again(**batch).logits)


def test_a_plan_without_a_score_routes_only_where_nothing_is_chosen() -> None:
    model, depth = make_model("test_vit"), len(make_model("test_vit").blocks)
    for plan in (mmod.Plan((1, 2), (1.0, 0.5), depth), falling(depth, 0.6)):
        with pytest.raises(ValueError, match=r"no router: .*from_plan\(plan, router='attention'\).*'stride'"):
            mmod.route_(model, plan)
        assert not mmod.is_routed(model)
        assert mmod.RoutingConfig.from_plan(plan, router="norm").router.name == "norm"
    assert mmod.routing_config(mmod.route_(model, mmod.Plan((1, 2), (1, 0.0), depth))).router.name == "stride"


def test_another_router_takes_the_place_of_the_score_of_a_plan() -> None:
    plan = mmod.Plan((1,), (0.5,), 4, router={"name": "attention", "importance": "last_token"})
    assert mmod.RoutingConfig.from_plan(plan, router={"importance": "mean"}).router.importance == "mean"
    config = mmod.RoutingConfig.from_plan(plan, router="linear")
    assert (config.router, config.gate.name) == (mmod.score("linear"), "tanh")
    assert "1 of 4 blocks are routed by attention (last_token)" in str(plan)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"depth": 10**400}, r"depth must be an integer in \[1, 100000\], got 1000"),
        ({"depth": 10**5000}, "depth must be an integer in"),
        ({"depth": "4"}, "depth must be an integer in .*, got '4'"),
        ({"blocks": "late"}, "blocks must be several values"),
        ({"gate": "tanh"}, "pass router too"),
        ({"router": 3}, "router must be a name, a score or a function, got 3"),
        ({"protect_prefix": "no"}, "protect_prefix must be true or false, got 'no'"),
    ],
)
def test_plans_are_strict(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        mmod.Plan(**{"blocks": (1,), "capacities": (0.5,), "depth": 4, **fields})


@pytest.mark.parametrize("depth", ["12", 10**400, 0, None])
def test_depths_are_checked_wherever_they_are_given(depth: Any) -> None:
    calls = [
        lambda: mmod.RoutingConfig().plan(depth),
        *(lambda make=make: make(depth) for make in (ratio_decay, stage_drop, drop_once, falling)),
        lambda: mmod.RoutingConfig().at_depth(depth),
        lambda: mmod.RoutingConfig().resolved(depth),
    ]
    names = ("p-mod", "mindskip", "gradual", "gamma-mod", "ipcv", "v2drop")
    calls += [lambda name=name: mmod.preset(name).resolved(depth) for name in names if depth is not None]
    calls += [lambda name=name: mmod.preset(name, depth=depth) for name in names if depth is not None]
    for call in calls:
        with pytest.raises((TypeError, ValueError), match="depth"):
            call()
