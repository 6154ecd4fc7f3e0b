from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from mmod.training.tradeoff import TradeoffConfig, jobs, run_tradeoff

DENSE = {
    "output": "unused",
    "model": {
        "name": "vit_tiny_patch16_224",
        "args": {"img_size": 32, "patch_size": 8, "in_chans": 1, "num_classes": 10}
        | {"embed_dim": 16, "depth": 4, "num_heads": 2},
    },
    "data": {"source": "digits:tiny", "image_size": 32, "channels": 1, "batch_size": 64},
    "epochs": 1,
}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> TradeoffConfig:
    folder = tmp_path_factory.mktemp("study")
    (folder / "dense.yaml").write_text(yaml.safe_dump(DENSE))
    return TradeoffConfig(
        output=str(folder / "out"),
        dense=str(folder / "dense.yaml"),
        changes={"data": {"root": str(folder / "data"), "val_split": "test"}},
        finetune={"optim": {"lr": 1e-4}},
        routers={"a-mod": {"preset": "a-mod"}, "threshold": {"router": "linear", "select": "threshold"}},
        capacities=[0.5],
        seeds=2,
        latency_rounds=2,
        maps=2,
    )


def test_a_study_compares_and_can_be_continued(study: TradeoffConfig) -> None:
    result = run_tradeoff(study, progress=False)
    points = {point.name: point for point in result.points}
    assert list(points) == ["dense", "a-mod-0.5", "threshold-0.5", "isoflop-3"]
    assert points["dense"].gflops > points["isoflop-3"].gflops > 0
    assert points["dense"].gflops > points["a-mod-0.5"].gflops
    assert points["a-mod-0.5"].kept == pytest.approx(8 / 17)
    assert points["isoflop-3"].before is None
    assert points["dense"].before is not None
    assert points["a-mod-0.5"].before is not None
    assert all(point.seeds == 2 and point.accuracy_std is not None for point in result.points)
    folder = Path(result.folder)
    runs = {path: path.stat().st_mtime_ns for path in folder.rglob("result.json")}
    assert len(runs) == 10
    for name in ("tradeoff.csv", "tradeoff.md", "tradeoff.png", "maps-a-mod-0.5.png", "maps-threshold-0.5.png"):
        assert (folder / name).stat().st_size
    assert len(json.loads((folder / "tradeoff.json").read_text())["points"]) == 4

    again = run_tradeoff(study, progress=False)
    assert [point.accuracy_mean for point in again.points] == [point.accuracy_mean for point in result.points]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("result.json")} == runs


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"routers": {}}, ValueError, "at least one entry in routers and in capacities"),
        ({"seeds": 0}, ValueError, "seeds must be at least 1, got 0"),
        ({"changes": {"seed": 3}}, ValueError, "changes must not set seed: the study sets them"),
        ({"dense": "nowhere.yaml"}, FileNotFoundError, "no config file at 'nowhere.yaml'"),
        ({"routers": {"x": {"router": "atention"}}}, ValueError, "router must be one of"),
        ({"finetune": {"epoch": 1}}, ValueError, "unknown config key 'epoch'"),
    ],
)
def test_wrong_studies_fail_before_the_first_run(
    study: TradeoffConfig, tmp_path: Path, changes: dict[str, object], error: type[Exception], message: str
) -> None:
    fields = {**vars(study), "output": str(tmp_path / "out"), **changes}
    with pytest.raises(error, match=message):
        run_tradeoff(TradeoffConfig(**fields), progress=False)
    assert not (tmp_path / "out").exists()


# Those of other kinds of model say so.
STUDIES = sorted(path for path in Path("configs/tradeoff").glob("*.yaml") if "\nkind:" not in path.read_text())


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_study_configs_plan_their_runs(path: Path) -> None:
    config = TradeoffConfig(**yaml.safe_load(path.read_text()))
    planned = list(jobs(config))
    assert [job.router for job in planned[:2]] == ["base", "dense"]
    routed = [job for job in planned if job.config.routing is not None]
    assert len(routed) == config.seeds * len(config.routers) * len(config.capacities)
    assert all(job.config.model.has_weights and job.config.routing_config() for job in routed)
    assert len({job.config.output for job in planned}) == len(planned)
    assert f"tools/tradeoff.py {path}" in path.read_text()
