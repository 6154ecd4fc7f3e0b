"""What another package registers is routed, saved, loaded, counted, traced and trained like what mmod registers."""

from __future__ import annotations

import dataclasses
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

import mmod
from mmod import RoutingConfig, Threshold
from mmod.config import registry
from mmod.lab import match_topk_
from tests.kit.own_methods import Contrast, ContrastScore
from tests.kit.processes import run_processes
from tests.kit.zoo import make_images, make_model

NAME = "test_vit"
SCORES = [mmod.score("contrast", power=2.0), "weighed-importance"]


@pytest.mark.parametrize("router", SCORES, ids=["contrast", "weighed-importance"])
def test_a_registered_score_routes_and_survives_saving(router: object, tmp_path: Path) -> None:
    model = mmod.route_(make_model(NAME), RoutingConfig(router=router, capacity=0.25, blocks="late"))
    images = make_images(NAME, 2)
    with torch.no_grad(), mmod.trace(model) as decisions:
        expected = model(images)
    assert all(routing.keep_BN.sum() == 2 * 9 for routing in decisions.values())
    mmod.save_pretrained(model, tmp_path)
    loaded = mmod.load_pretrained(tmp_path)
    assert mmod.routing_config(loaded) == mmod.routing_config(model)
    with torch.no_grad():
        assert torch.equal(loaded(images), expected)
    assert mmod.flops(model, 160).share < 0.65


def test_a_registered_score_learns_and_is_squashed_as_it_says() -> None:
    model = mmod.route_(make_model(NAME), mmod.preset("contrast-mod", depth=6)).train()
    assert list(mmod.routed_blocks(model)) == ["blocks.3", "blocks.4", "blocks.5"]
    scores = [block.router.score for block in mmod.routed_blocks(model).values()]
    assert all(isinstance(score, ContrastScore) for score in scores)
    model(make_images(NAME, 2))
    routings = [block.mod_state.routing for block in mmod.routed_blocks(model).values()]
    loss = mmod.auxiliary_loss(model)
    torch.testing.assert_close(loss, -0.1 * torch.stack([routing.score_BN.std() for routing in routings]).sum())
    loss.backward()
    assert all(score.weight.grad.abs().sum() > 0 for score in scores)

    images = make_images(NAME, 4)
    model = mmod.route_(make_model(NAME), RoutingConfig(router="contrast", select=Threshold(0.5)))
    with torch.no_grad(), mmod.trace(model) as decisions:
        model(images)
    for routing in decisions.values():
        reached = routing.score_BN / routing.score_BN.amax(dim=1, keepdim=True) >= 0.5
        assert torch.equal(routing.keep_BN[:, 1:], reached[:, 1:])
    match_topk_(model, images)
    with torch.no_grad(), mmod.trace(model) as decisions:
        model(images)
    assert decisions.kept_shares() == pytest.approx(dict.fromkeys(decisions, 18 / 37), abs=0.02)


def load_without_contrast(folder: Path) -> None:
    """Load a model where nobody has imported what registers its score."""
    for name in ("contrast", "weighed-importance"):
        del registry.SCORES._entries[name], registry.SCORES._places[name]
    mmod.load_pretrained(folder)


def test_names_that_nobody_registered_are_refused_with_the_valid_ones(tmp_path: Path) -> None:
    model = mmod.route_(make_model(NAME), RoutingConfig(router="contrast"))
    mmod.save_pretrained(model, tmp_path)
    assert run_processes(load_without_contrast, tmp_path, log=tmp_path / "log") == [1]
    said = (tmp_path / "log").read_text()
    assert (
        "router must be one of 'attention', 'cells', 'change', 'coin', 'diversity', 'duplicate', 'function', 'linear', "
        "'norm', 'random', 'redundancy', 'stride', 'temporal', got" in said
    )
    assert "mmod.register_score" in said
    with pytest.raises(
        ValueError, match=r"a loss 'sprad' is unknown; near ones: spread; valid ones are 'capacity', .*register_loss"
    ):
        RoutingConfig(router="contrast", losses={"sprad": 1.0})
    with pytest.raises(AttributeError, match="blocks of a preset depends on the number of blocks: route a model"):
        _ = mmod.preset("contrast-mod").blocks
    assert mmod.preset("contrast-mod").at_depth(6).blocks == (3, 4, 5)
    with pytest.raises(ValueError, match="option of router 'contrast': pover; near ones: power; valid ones are power"):
        RoutingConfig(router={"name": "contrast", "pover": 2})


def test_a_config_names_the_options_of_a_registered_score() -> None:
    config = RoutingConfig(router=mmod.score("contrast", power=3.0))
    saved = json.loads(json.dumps(config.to_dict()))
    assert saved["router"] == {"name": "contrast", "power": 3.0}
    assert RoutingConfig.from_dict(saved) == config
    assert config.router == Contrast(power=3.0)


def test_names_are_not_taken_twice_and_scores_are_checked() -> None:
    with pytest.raises(ValueError, match=r"router 'linear' is mmod\.routing.score\.linear\.Linear already"):

        @mmod.register_score("linear")
        @dataclasses.dataclass(frozen=True)
        class Linear(mmod.Score):
            """Another one."""

    with pytest.raises(TypeError, match=r"derived from mmod\.Score and decorated by @dataclass"):
        mmod.register_score("thawed")(type("Thawed", (mmod.Score,), {}))
    with pytest.raises(ValueError, match="Both cannot be shared"):

        @mmod.register_score("both")
        @dataclasses.dataclass(frozen=True)
        class Both(mmod.Score):
            """A score that is shared and learns."""

            learns = True
            shared = True

    assert mmod.register_score("contrast")(Contrast) is Contrast


def test_a_script_that_imports_itself_registers_its_names_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"__module__": "__main__", "__qualname__": "Contrast"}
    of_script = dataclasses.dataclass(frozen=True)(type("Contrast", (Contrast,), names))
    with pytest.raises(ValueError, match=r"Contrast already; choose another name for .*\.Contrast"):
        mmod.register_score("contrast")(of_script)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", ModuleSpec(Contrast.__module__, None))
    assert mmod.register_score("contrast")(of_script) is of_script
    assert mmod.register_score("contrast")(Contrast) is Contrast


@pytest.mark.parametrize("names", [registry.SCORES, registry.PRESETS, registry.LOSSES])
@pytest.mark.parametrize("name", ["unknown", "", None, ["stride"], 3])
def test_an_unknown_name_is_refused_with_every_registered_one(names: registry.Registry[object], name: object) -> None:
    with pytest.raises(ValueError, match=r"must be one of|is unknown; ") as error:
        names[name]  # type: ignore[index]
    assert all(repr(valid) in str(error.value) for valid in names)
    assert repr(name) in str(error.value)
