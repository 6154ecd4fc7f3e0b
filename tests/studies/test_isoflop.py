"""An isoFLOP study spends what it says, tries rates apart from what it reports, and goes on where it stopped."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mmod import preset
from mmod.config.parse import read_config
from mmod.io.records import FolderTakenError
from mmod.studies import isoflop as study
from mmod.studies.isoflop import describe, run_isoflop, settings_of, training_flops
from mmod.studies.isoflop_config import IsoflopConfig
from mmod.training.engine.start import create_models
from mmod.training.text.kind import TextKind, window_flops
from tests.kit.counting import flop_counter
from tests.kit.cover import in_turn
from tests.kit.disk import contents
from tests.kit.text_configs import LLAMA, PREDICTOR, SCORE, text_config

ROOT = Path(__file__).parents[2]
SIZES = {f"w{width}": {"hidden_size": width, "intermediate_size": 2 * width} for width in (8, 16, 24)}


def isoflop(folder: Path, **changes: Any) -> IsoflopConfig:
    base = folder / "base.yaml"
    fields = {
        "model": {"config": {**LLAMA, "num_hidden_layers": 2, "num_attention_heads": 1}},
        "data": {"length": 32, "batch_size": 2, "val_limit": 4},
        "epochs": 1,
        # The study sets it.
        "optim": {"lr": 0},
        "device": "cpu",
    }
    base.write_text(json.dumps(fields))
    config = IsoflopConfig(
        output=str(folder / "study"),
        dense=str(base),
        sizes=SIZES,
        budgets=[1e7],
        routings={"dense": None, "mod": PREDICTOR},
        rates=[1e-2, 1e-3],
        seeds=2,
    )
    return dataclasses.replace(config, **changes)


def test_the_config_that_comes_with_mmod_is_the_grid_of_its_header() -> None:
    config = read_config([str(ROOT / "configs" / "isoflop" / "text.yaml")], IsoflopConfig)
    assert (len(config.budgets), len(config.sizes), config.seeds) == (3, 4, 3)
    assert list(config.routings) == ["dense", "mod", "random"]
    assert (ROOT / config.dense).is_file()


@pytest.mark.parametrize("layers", [1, 4])
def test_flops_of_a_dense_pass_are_those_that_torch_counts(tmp_path: Path, layers: int) -> None:
    model, _ = create_models(TextKind(text_config(tmp_path, model={"config": {"num_hidden_layers": layers}})))
    with flop_counter() as counter, torch.no_grad():
        model(input_ids=torch.zeros(1, 48, dtype=torch.long))
    assert window_flops(model, 48) == counter.get_total_flops()


WAYS: dict[str, dict[str, Any]] = {
    "dense": {},
    "score": {"routing": SCORE},
    "predictor": {"routing": PREDICTOR},
    "random": {"routing": {"router": "random", "capacity": 0.25}},
    "attention": {"routing": {"router": {"name": "attention", "importance": "mean"}, "capacity": 0.25}},
    "all": {"routing": {"router": "linear", "capacity": 0.25, "context": "all"}},
    "mlp": {"routing": {"router": "linear", "capacity": 0.25, "operator": "mlp"}},
    "shared": {"routing": {"router": {"name": "linear", "tied": True}, "blocks": "all"}},
    "experts": {"methods": [{"kind": "experts", "choice": "predictor"}]},
    "integrated": {"methods": [{"kind": "experts", "capacity": 0.5, "idle": 1, "choice": "predictor"}]},
    "staged": {"methods": [{"kind": "experts", "choice": "predictor"}], "routing": PREDICTOR},
}


@pytest.mark.parametrize(("way", "width"), in_turn(WAYS, [16, 64]))
def test_a_training_step_spends_what_is_counted(tmp_path: Path, way: str, width: int) -> None:
    sizes = {"hidden_size": width, "intermediate_size": 2 * width}
    config = text_config(tmp_path, **WAYS[way], model={"config": sizes}, data={"length": 64})
    # In fp64 importance has products of its own on a CPU too.
    model = create_models(TextKind(config))[0].double().train()
    task = TextKind(config).task(model, None)
    tokens = torch.randint(0, 256, (1, 64), generator=torch.Generator().manual_seed(0))
    with flop_counter() as counter:
        task.forward(tokens, tokens)["loss"].backward()
    assert training_flops(model, 64) == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_a_routed_pass_counts_what_training_keeps(tmp_path: Path) -> None:
    dense, _ = create_models(TextKind(text_config(tmp_path)))
    costs = []
    for capacity in (0.25, 0.5, 1.0):
        routing = {**PREDICTOR, "capacity": capacity}
        costs.append(window_flops(create_models(TextKind(text_config(tmp_path, routing=routing)))[0], 48))
    assert costs == sorted(costs)
    routers = costs[-1] - window_flops(dense, 48)
    assert 0 < routers < 0.05 * costs[-1]


def test_each_budget_is_spent(tmp_path: Path) -> None:
    settings = settings_of(isoflop(tmp_path, budgets=[2e8, 5e8]))
    assert [setting.budget for setting in settings] == [2e8] * 6 + [5e8] * 6
    for setting in settings:
        assert setting.spent == pytest.approx(setting.budget, rel=0.05)
        assert setting.steps == setting.config.epochs * (setting.config.epoch_steps or 0)
    steps = {setting.name: setting.steps for setting in settings}
    assert steps["mod-w24-5e+08"] > steps["dense-w24-5e+08"] > steps["dense-w24-2e+08"]
    assert "12 models, each trained 4 times (2 rates, 2 seeds) for" in describe(isoflop(tmp_path, budgets=[2e8, 5e8]))


def test_a_study_goes_on_and_reports_no_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = isoflop(tmp_path, sizes={"w8": SIZES["w8"]})
    train, trained = study._train, []

    def watched(job: Any, callback: Any, store: Any) -> Any:
        trained.append((job.training.output, job.seed))
        if len(trained) == 6:
            raise KeyboardInterrupt
        return train(job, callback, store)

    monkeypatch.setattr(study, "_train", watched)
    with pytest.raises(KeyboardInterrupt):
        run_isoflop(config, progress=False)
    result = run_isoflop(config, progress=False)
    assert {seed for output, seed in trained if "rates" in output} == {2}
    assert {seed for output, seed in trained if "rates" not in output} == {0, 1}
    monkeypatch.setattr(study, "_train", train)
    again = run_isoflop(config, progress=False)
    assert again.points == result.points
    written = {path.suffix for path in result.folder.glob("isoflop.*")}
    assert written == {".csv", ".json", ".md", ".png", ".svg"}
    for point in result.points:
        losses = [figures["loss"] for figures in point["seeds"].values()]
        assert point["loss"] == pytest.approx(sum(losses) / 2)
        assert point["rate"] in config.rates
    before = contents(result.folder)
    for changes, said in (
        ({"budgets": [2e7]}, r"models dense-w8-1e\+07, mod-w8-1e\+07: measured there, left out now"),
        ({"rates": [1e-2]}, "rates: .*0.001, 0.01.* there, .*0.01.* now"),
        ({"changes": {"data": {"val_limit": 2}}}, "data.val_limit: 4 there, 2 now"),
    ):
        with pytest.raises(FolderTakenError, match=said):
            run_isoflop(dataclasses.replace(config, **changes), progress=False)
    assert contents(result.folder) == before


def test_rates_that_diverge_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = study._train

    def diverging(job: Any, callback: Any, store: Any) -> Any:
        if job.training.optim.lr > least:
            raise FloatingPointError("the loss stopped being finite")
        return train(job, callback, store)

    monkeypatch.setattr(study, "_train", diverging)
    config, least = isoflop(tmp_path, sizes={"w8": SIZES["w8"]}, seeds=1), 5e-3
    assert [point["rate"] for point in run_isoflop(config, progress=False).points] == [1e-3, 1e-3]
    least = 0.0
    with pytest.raises(FloatingPointError, match="trained by none of the rates"):
        run_isoflop(dataclasses.replace(config, output=str(tmp_path / "other")), progress=False)


def test_a_series_may_have_methods_and_routing(tmp_path: Path) -> None:
    both = {"methods": [{"kind": "experts", "choice": "predictor"}], "routing": PREDICTOR}
    settings = settings_of(isoflop(tmp_path, routings={"dense": None, "routed": PREDICTOR, "both": both}))
    configs = {setting.series: setting.config for setting in settings}
    kinds = {series: [method.kind for method in config.applied] for series, config in configs.items()}
    assert kinds == {"dense": [], "routed": ["routing"], "both": ["experts", "routing"]}
    assert configs["both"].routings == configs["routed"].routings


def test_a_preset_routes_the_blocks_of_each_size(tmp_path: Path) -> None:
    sizes = {str(layers): {"num_hidden_layers": layers} for layers in (6, 8)}
    settings = settings_of(isoflop(tmp_path, sizes=sizes, budgets=[2e8], routings={"p": {"preset": "tread"}}))
    for setting in settings:
        assert setting.config.routings["language"] == preset("tread", depth=int(setting.size))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"budgets": [1e6]}, "pays for .* steps"),
        ({"budgets": [1e15]}, "the text has"),
        ({"budgets": [1e7, 1e7]}, "budgets must name at least one value, and each once"),
        ({"rates": []}, "rates must name at least one value"),
        ({"changes": {"seed": 1}}, "the study sets them"),
        ({"budgets": [math.inf]}, "budgets"),
        (
            {"routings": {"dense": None, "a": {"methods": [{"kind": "experts"}], "epochs": 2}}},
            "unknown field beside routings.a.methods epochs; valid ones are methods, routing",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        settings_of(isoflop(tmp_path, **changes))
