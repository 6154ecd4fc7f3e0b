"""The study of routed vision-language models: what it compares, and that it goes on where it stopped."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path

import pytest
import yaml

from mmod import RoutingConfig
from mmod.io.yaml import read_yaml
from mmod.methods.resolve import resolve_routing
from mmod.studies.candidates import comparison_of
from mmod.studies.kind_configs import ChatStudyConfig, ImageStudyConfig
from mmod.studies.study import run_study
from mmod.training.chat.config import TrainConfig
from tests.kit.chat_configs import vlm_config

ROOT = Path(__file__).parents[2]
ROUTERS = {"p-mod": {"preset": "p-mod"}, "random": {"router": "random", "blocks": [1, 2], "capacity": 0.25}}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> ChatStudyConfig:
    folder = tmp_path_factory.mktemp("study")
    fields = vlm_config(folder).to_dict()
    fields["trainer"] |= {"save_strategy": "no", "max_steps": 1}
    (folder / "dense.yaml").write_text(yaml.safe_dump(fields))
    return ChatStudyConfig(
        output=str(folder / "out"),
        dense=str(folder / "dense.yaml"),
        routers=ROUTERS,
        finetune={"trainer": {"max_steps": 2}},
        seeds=1,
        latency_batch=2,
        latency_rounds=2,
    )


def test_a_study_compares_and_can_be_continued(study: ChatStudyConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    baselines = {"resolution": {0.25: {"kind": "resolution", "image_size": 16}}}
    study = dataclasses.replace(study, baselines=baselines, controls={"p-mod": "random"})
    result = run_study(study, progress=False)
    points = {point.name: point for point in result.points}
    assert list(points) == ["dense", "p-mod", "random", "resolution-0.25"]
    dense, smaller = points["dense"], points["resolution-0.25"]
    assert dense.cost["image_share"] == dense.cost["flops_share"] == dense.row()["kept"] == 1
    assert dense.cost["prefill_speedup"] == 1
    assert smaller.cost["image_share"] == pytest.approx(0.25, abs=0.03)
    assert smaller.cost["cache_bytes"] < 0.6 * dense.cost["cache_bytes"]
    for name, kept in (("p-mod", (1 + 0.75 + 0.25 + 2 / 16) / 4), ("random", (2 + 2 * 0.25) / 4)):
        # Attention falls with the square.
        assert kept - 0.1 < points[name].cost["image_share"] < kept
    assert all(len(point.figures) == 1 for point in result.points)
    assert dense.to_dense is dense.to_control is None
    # Of another series, and at most a tenth dearer.
    assert smaller.to_baselines == {"to_baseline": None, "baseline": None}
    assert {points[name].to_baselines["baseline"] for name in ("p-mod", "random")} <= {
        "p-mod",
        "random",
        "resolution-0.25",
    }
    assert dense.to_baselines["baseline"] in ("p-mod", "random", "resolution-0.25")
    for name in ("p-mod", "random"):
        gap = points[name].to_dense
        assert gap is not None
        assert gap.value == pytest.approx(points[name].row()["right"] - dense.row()["right"])
        assert (points[name].to_control is None) == (name == "random")
    # Every image token that a layer skips leaves the keys and values of one token, fp32, out of its cache.
    per_token = 2 * 32 * 4
    skipped = round(4 * 16 * (1 - (2 + 2 * 0.25) / 4))
    assert dense.cost["cache_bytes"] - points["random"].cost["cache_bytes"] == skipped * per_token
    folder = Path(result.folder)
    assert (folder / "tradeoff.png").stat().st_size
    assert (folder / "answers.png").stat().st_size
    assert sorted(path.name for path in folder.glob("maps-*.png")) == ["maps-p-mod.png", "maps-random.png"]
    assert "One seed: intervals are over samples" in result.table
    rows = list(csv.DictReader((folder / "tradeoff.csv").open()))
    assert [row["name"] for row in rows] == list(points)
    assert float(rows[0]["right/count"]) == dense.row()["right/count"]
    prior = json.loads((folder / "tradeoff.json").read_text())["prior"]
    assert set(prior) == {name[6:] for name in dense.figures[0] if name.startswith("right/")}
    table = result.table.split("\n\n")[0].splitlines()
    assert table[-1].startswith("| language-only prior")
    assert len({line.count("|") for line in table}) == 1

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr("mmod.training.chat.loop.RoutedTrainer", refuse)
    again = run_study(study, progress=False)
    assert [point.figures for point in again.points] == [point.figures for point in result.points]


def test_jobs_start_from_the_dense_model_of_their_seed(study: ChatStudyConfig) -> None:
    routers = {"p-mod": {"preset": "p-mod"}, "random": {"router": "random", "blocks": [1, 2]}}
    jobs = comparison_of(dataclasses.replace(study, routers=routers, capacities=[0.5, 0.25], seeds=2)).runs()
    names = ["base", "dense", "p-mod-0.5", "p-mod-0.25", "random-0.5", "random-0.25"]
    names += ["random-p-mod-0.5", "random-p-mod-0.25"]
    assert [job.name for job in jobs] == names * 2
    for job in jobs:
        assert job.training.seed == job.seed
        if job.name != "base":
            assert job.training.model.checkpoint == f"{study.output}/seed{job.seed}/base"
            assert job.training.trainer["max_steps"] == 2
    capacities = [job.training.routing["language"]["capacity"] for job in jobs if job.training.routing]
    assert capacities == [0.5, 0.25] * 6


def test_a_given_checkpoint_is_not_trained(study: ChatStudyConfig) -> None:
    jobs = comparison_of(dataclasses.replace(study, train_dense=False)).runs()
    assert [job.name for job in jobs] == ["dense", "p-mod", "random", "random-p-mod"]


def test_wrong_studies_are_named(study: ChatStudyConfig) -> None:
    with pytest.raises(ValueError, match="latency_rounds"):
        dataclasses.replace(study, latency_rounds=0)
    with pytest.raises(ValueError, match="maps must be an integer of at least 0, got -1"):
        dataclasses.replace(study, maps=-1)
    with pytest.raises(ValueError, match=r"baselines.prune.kind must be .*'resolution'"):
        dataclasses.replace(study, baselines={"prune": {0.5: {"kind": "prune"}}})
    with pytest.raises(ValueError, match=r"no data\.val"):
        comparison_of(dataclasses.replace(study, changes={"data": {"val": None}})).runs()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"routers": {"deep": {"router": "random", "blocks": [1, 99]}}},
            "'deep' of the study: .*from 0 to 3, each once",
        ),
        (
            {"finetune": {"trainer": {"max_steps": 2, "warmup_steps": 2}}},
            "'dense' of the study: finetune.trainer.warmup_steps=2 is as long as the run, finetune.trainer.max_steps=2",
        ),
    ],
)
def test_what_a_later_run_would_refuse_is_refused_before_the_first(
    study: ChatStudyConfig, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    fields = {**changes, "output": str(tmp_path / "out")}
    with pytest.raises(ValueError, match=message):
        run_study(dataclasses.replace(study, **fields), progress=False)
    assert not (tmp_path / "out").exists()


def shipped(name: str) -> dict[str, TrainConfig]:
    path = ROOT / "configs" / "tradeoff" / name
    config = ChatStudyConfig(**read_yaml(path))
    assert f"mmod tradeoff configs/tradeoff/{name}" in path.read_text()
    return {
        job.name: job.training
        for job in comparison_of(dataclasses.replace(config, dense=str(ROOT / config.dense), seeds=1)).runs()
    }


def test_shipped_studies_are_read_and_say_what_they_are() -> None:
    small, full = shipped("vlm.yaml"), shipped("vlm-controls.yaml")
    assert list(small)[:2] == list(full)[:2] == ["base", "dense"]
    assert all((full[name].routing, full[name].trainer) == (c.routing, c.trainer) for name, c in small.items())
    plans = {name: plan_of(config) for name, config in full.items() if config.routing}
    # The same share of image tokens everywhere, and for each method the same plan with random tokens.
    assert all(plan.mean_capacity == pytest.approx(0.53125, abs=0.01) for plan in plans.values())
    assert plans["distilled"].rows == plans["a-mod"].rows == plans["random"].rows == plans["stride"].rows
    assert plans["p-mod"].rows == plans["p-mod-random"].rows
    assert plans["gamma-mod"].rows == plans["gamma-mod-random"].rows


def test_plans_of_methods_without_training_cost_what_their_controls_do() -> None:
    configs = shipped("vlm-plans.yaml")
    assert configs["searched-0.35"].routing is None
    plans = {name: plan_of(config) for name, config in configs.items() if config.routing}
    fields = read_yaml(ROOT / "configs/tradeoff/vlm-plans.yaml")
    for name, control in fields["controls"].items():
        if name in plans and control:
            assert plans[name].mean_capacity == pytest.approx(plans[control].mean_capacity, abs=0.02), name


def test_a_plan_in_a_file_routes(tmp_path: Path) -> None:
    plan = RoutingConfig(
        blocks=(1, 2), capacity=(0.0, 0.5), depth=4, operator=("block", "mlp"), context=("all", "kept"), router="norm"
    )
    plan.save(tmp_path / "plan.json")
    fields = {"plan": str(tmp_path / "plan.json")}
    assert resolve_routing(fields).resolved(4) == plan
    assert resolve_routing({**fields, "router": "stride"}).router.name == "stride"
    assert vlm_config(tmp_path, routing={"language": fields}).routing == {"language": fields}
    with pytest.raises(ValueError, match="a preset or a plan"):
        resolve_routing({**fields, "preset": "p-mod"})


def plan_of(config: TrainConfig) -> RoutingConfig:
    assert config.routing is not None
    fields = config.routing["language"]
    return resolve_routing({**fields, **({"depth": 8} if "preset" in fields else {})}).resolved(8)


def test_a_dense_model_of_the_hub_is_no_missing_file() -> None:
    dense = {"base": str(ROOT / "configs/vlm/tiny-llava.yaml"), "model": {"checkpoint": "owner/name"}}
    ChatStudyConfig.check_dense({"dense": dense})
    with pytest.raises(FileNotFoundError, match="no checkpoint at 'owner/name': name the dense model's training run"):
        ImageStudyConfig.check_dense({"dense": dense})
