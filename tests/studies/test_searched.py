"""Plans that a study searches for the dense model of each seed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmod import RoutingConfig
from mmod.io.store import STORE, Store
from mmod.studies.candidates import comparison_of
from mmod.studies.kind_configs import ImageStudyConfig, PairsStudyConfig
from mmod.studies.measure import Measurer, measure_run
from mmod.studies.study import run_study
from mmod.training.engine.kind import load
from tests.kit.fitted import count_once
from tests.kit.image_study import DENSE
from tests.kit.sets import SETS

QUICK = {"batches": 1, "batch_size": 4, "options": [[0, "mlp", "kept"], [0.5, "block", "kept"]]}


def image_study(folder: Path) -> ImageStudyConfig:
    """Return a study of two budgets, fine-tuned at one of two learning rates."""
    (folder / "dense.yaml").write_text(yaml.safe_dump(DENSE))
    return ImageStudyConfig(
        output=str(folder / "out"),
        dense=str(folder / "dense.yaml"),
        capacities=[0.8, 0.7],
        finetune={"epochs": 1},
        changes={"epoch_steps": 1, "data": {"root": str(SETS / "digits")}},
        rates=[0.5, 1.0],
        rate_split="test",
        routers={"searched": {"search": QUICK}},
        latency_rounds=1,
        maps=0,
        latency_batch=16,
        latency_batches=[],
    )


def test_each_seed_has_plans_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count_once(monkeypatch)
    config = image_study(tmp_path)
    result = run_study(config, progress=False)
    points = {point.name: point for point in result.points}
    budgets = [f"{budget:g}" for budget in config.capacities]
    assert list(points) == ["dense", *(f"searched-{budget}" for budget in budgets)]
    for seed in range(config.seeds):
        folder = Path(config.output) / f"seed{seed}" / "searched.plans"
        # One scoring serves both budgets.
        assert (folder / STORE).is_file()
        assert {path.name for path in folder.glob("*.json")} == {f"flops-{budget}.json" for budget in budgets}
        plans = [RoutingConfig.load(folder / f"flops-{budget}.json") for budget in budgets]
        assert plans[0] != plans[1]
    jobs = {job.name: job for job in comparison_of(config).runs() if job.seed == 0}
    measurer = Measurer(measure_run, Store(tmp_path / STORE))
    loaded: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr("mmod.studies.measure.load", lambda kind: loaded.append(kind) or load(kind))  # type: ignore[func-returns-value]
        cheap, dear = (measurer.ready(jobs[f"searched-{budget}"]).training for budget in reversed(budgets))
    # The dense model is loaded once for all budgets.
    assert len(loaded) == 1
    assert cheap.routing != dear.routing
    # A recommended model is written with its plan.
    assert json.dumps(cheap.routing) in measurer.ready(jobs[f"searched-{budgets[-1]}"]).candidate.config("image", True)
    assert measurer.ready(jobs["dense"]) is jobs["dense"]

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("scored again")

    monkeypatch.setattr("mmod.planning.search.routed", refuse)
    again = run_study(config, progress=False)
    assert [point.figures for point in again.points] == [point.figures for point in result.points]
    assert json.loads((Path(config.output) / "tradeoff.json").read_text())["points"]


def test_what_no_search_can_do_is_refused_before_anything_runs(tmp_path: Path) -> None:
    config = image_study(tmp_path)
    for fields, message in (
        ({"search": {"budgt": 0.5}}, "budgt"),
        ({"search": {"rounds": -1}}, "rounds"),
        ({"search": {}, "blocks": [1]}, "unknown field beside routers.one.search blocks"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(config, routers={"one": fields})
    # Leaving out MLPs alone makes no model as cheap; that is known before the dense model is trained.
    few = {"search": {**QUICK, "options": [[0, "mlp", "kept"]]}}
    dear = dataclasses.replace(config, routers={"one": few}, capacities=[0.1])
    with pytest.raises(ValueError, match=r"model .one-0\.1. of the study: budget must lie in \[0\.\d+, 1\)"):
        run_study(dear, progress=False)
    assert not Path(config.output).exists()
    with pytest.raises(ValueError, match=r"unknown tower in routers\.one search"):
        PairsStudyConfig(output="o", dense="d", routers={"one": {"search": {}}})
