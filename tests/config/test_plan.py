"""Plans: values that print, save, load strictly and route."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mmod
from mmod.config.plan import CONTEXTS, OPERATORS
from tests.adapters.vlm_zoo import make_joint, prompt
from tests.zoo import make_images, make_model

PLAN = mmod.Plan((1, 2, 3), (0.0, 0.5, 0.25), 4, ("block", "mlp", "attention"), ("all", "kept", "all"))


@st.composite
def plans(draw: st.DrawFn) -> mmod.Plan:
    depth = draw(st.integers(1, 9))
    blocks = draw(st.lists(st.integers(0, depth - 1), min_size=1, unique=True))
    operators = tuple(draw(st.sampled_from(OPERATORS)) for _ in blocks)
    contexts = tuple("kept" if operator == "mlp" else draw(st.sampled_from(CONTEXTS)) for operator in operators)
    capacities = tuple(draw(st.sampled_from([0.0, 0.125, 0.5, 1.0])) for _ in blocks)
    return mmod.Plan(tuple(sorted(blocks)), capacities, depth, operators, contexts)


@given(plan=plans())
def test_plans_and_configs_say_the_same(plan: mmod.Plan) -> None:
    assert mmod.Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    config = mmod.RoutingConfig.from_plan(plan, router="stride")
    assert config.plan(plan.depth) == plan
    assert mmod.RoutingConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    lines = str(plan).splitlines()
    assert len(lines) == len(plan.blocks) + 2
    for line, (block, capacity, operator, context) in zip(lines[1:], plan.rows):
        assert line.split() == [str(block), f"{capacity:g}", operator, context]


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
        ({key: good[key] for key in ("blocks", "depth")}, "needs capacities, operators, contexts"),
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
    plan = mmod.Plan((2, 3), (0.0, 0.0), len(make_model("test_vit").blocks), ("block", "mlp"))
    model = mmod.route_(make_model("test_vit"), plan)
    mmod.save_pretrained(model, tmp_path / "routed")
    again = mmod.load_pretrained(tmp_path / "routed")
    assert mmod.routing_config(again).plan(plan.depth) == plan
    with torch.no_grad():
        assert torch.equal(model(images), again(images))
    with pytest.raises(ValueError, match="the plan is for 4 blocks, and there are"):
        mmod.route_(make_model("test_vit"), PLAN)
    with pytest.raises(TypeError, match="RoutingConfig or a Plan"):
        mmod.route_(make_model("test_vit"), "late")  # type: ignore[arg-type]


def test_language_models_keep_their_plan(tmp_path: Path) -> None:
    batch = prompt("llava", (1, 2))
    model = mmod.route_(make_joint("llava"), language=mmod.RoutingConfig.from_plan(PLAN, router="stride"))
    model.save_pretrained(tmp_path / "routed")
    again = mmod.load_pretrained(tmp_path / "routed")
    assert mmod.routing_config(again).plan(4) == PLAN
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, again(**batch).logits)
