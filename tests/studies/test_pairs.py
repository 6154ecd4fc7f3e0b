from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mmod.io.yaml import read_yaml
from mmod.studies.config import PairsStudyConfig
from mmod.studies.study import comparison_of, run_study
from tests.kit.pairs_worker import MODEL, write_model
from tests.kit.sets import SETS

ROUTERS = {
    "a-mod": {"image": {"preset": "a-mod"}, "text": {"preset": "a-mod"}},
    "threshold": {"image": {"router": "linear", "select": "threshold"}},
}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> PairsStudyConfig:
    folder = tmp_path_factory.mktemp("study")
    vision = {**MODEL["vision_cfg"], "image_size": 48, "patch_size": 16}  # type: ignore[dict-item]
    text = {**MODEL["text_cfg"], "context_length": 12}  # type: ignore[dict-item]
    fields = {
        "output": "unused",
        "model": write_model(folder, "study-clip", vision_cfg=vision, text_cfg=text),
        "data": {"train": "scenes:tiny/train", "val": "scenes:tiny/val", "root": str(SETS / "scenes")},
        "augment": None,
        "epochs": 1,
        "zero_shot": "scenes",
    }
    (folder / "dense.yaml").write_text(yaml.safe_dump(fields))
    return PairsStudyConfig(
        output=str(folder / "out"),
        dense=str(folder / "dense.yaml"),
        changes={"data": {"val": "scenes:tiny/test"}},
        finetune={"optim": {"lr": 1e-4}},
        routers=ROUTERS,
        seeds=2,
        latency_batch=4,
        latency_rounds=2,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"routers": {"x": {"images": {}}}},
            r"unknown tower in routers\.x images; near ones: image; valid ones are image, text",
        ),
        ({"routers": {"x": {"text": {"router": "atention"}}}}, "router must be one of"),
        (
            {"routers": {"deep": {"image": {"preset": "a-mod", "blocks": [9]}}}},
            "model 'deep-0.5' of the study: .*block",
        ),
        ({"finetune": {"epoch": 1}}, "unknown config key 'epoch'"),
    ],
)
def test_wrong_studies_fail_before_the_first_run(
    study: PairsStudyConfig, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run_study(PairsStudyConfig(**{**vars(study), "output": str(tmp_path / "out"), **changes}))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", sorted(Path("configs/tradeoff").glob("clip*.yaml")), ids=lambda path: path.stem)
def test_study_configs_plan_their_runs(path: Path) -> None:
    config = PairsStudyConfig(**read_yaml(path))
    planned = comparison_of(config).runs()
    assert [job.name for job in planned[:2]] == ["base", "dense"]
    assert "random" in config.routers
    routed = [job for job in planned if job.config.routing is not None]
    assert len(routed) == config.seeds * len(config.routers) * len(config.capacities)
    assert all(job.config.model.has_weights and job.config.routings for job in routed)
    assert len({job.config.output for job in planned}) == len(planned)
    assert f"mmod tradeoff {path}" in path.read_text()
