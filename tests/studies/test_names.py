"""A series is named after a preset only if it decides as the preset does; what a study reads, it reads once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mmod.config.parse import parse_config
from mmod.io import yaml as yaml_files
from mmod.plain import from_plain
from mmod.studies.candidates import comparison_of
from mmod.studies.config import StudyConfig
from mmod.studies.kind_configs import CONFIGS, ChatStudyConfig, ImageStudyConfig, PairsStudyConfig
from tests.kit.image_study import DENSE


def study(routers: dict[str, Any], kind: type[StudyConfig] = ImageStudyConfig) -> StudyConfig:
    fields = {"output": "study", "dense": "dense.yaml", "finetune": {"epochs": 1}, "routers": routers}
    return from_plain(kind, fields)


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"preset": "gradual", "router": "random"}, "router='random'"),
        ({"router": "attention", "skipped": "merge"}, "router='attention'"),
        ({"preset": "gradual", "skipped": "pass"}, "skipped='pass'"),
        ({"preset": "gradual", "budgets": {0.5: {"operator": "mlp", "skipped": "pass"}}}, "skipped='pass'"),
    ],
)
def test_a_series_with_another_rule_is_refused_under_the_name_of_a_preset(fields: dict[str, Any], option: str) -> None:
    with pytest.raises(ValueError, match=rf"routers\.gradual is named after a preset with .* has {option}: give"):
        study({"gradual": fields})
    study({"mine": fields})
    with pytest.raises(ValueError, match=r"routers\.gradual is named after a preset"):
        study({"gradual": {"image": {"preset": "gradual"}, "text": {"router": "norm"}}}, PairsStudyConfig)


@pytest.mark.parametrize(
    "fields",
    [
        {"preset": "a-mod"},
        {"preset": "a-mod", "blocks": "late", "capacity": 0.3},
        {"router": "attention"},
        {"preset": "a-mod", "budgets": {0.5: {"capacity": 0.4}}},
        {"plan": "plan.json", "router": "norm"},
        {"search": {"router": "norm"}},
    ],
)
@pytest.mark.parametrize("kind", [ImageStudyConfig, ChatStudyConfig])
def test_other_blocks_and_capacities_are_still_the_preset(fields: dict[str, Any], kind: type[StudyConfig]) -> None:
    assert study({"a-mod": fields}, kind).routers == {"a-mod": fields}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"preset": "a-mod"}, r"unknown tower in routers\.mine preset; valid ones are image, text"),
        ({"budgets": {0.5: {"router": "norm"}}}, r"unknown tower in routers\.mine router; valid ones"),
        ({"image": "a-mod"}, r"routers\.mine\.image must be a mapping .*, got 'a-mod'"),
        ({"image": {}, "image_size": 32}, r"unknown tower in routers\.mine image_size"),
    ],
)
def test_a_series_of_pairs_names_its_towers(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        study({"mine": fields}, PairsStudyConfig)
    tower = {"image": {"router": "norm", "capacity": 0.4}}
    described = study({"mine": {"budgets": {0.7: tower}, "changes": {"epochs": 7}, "tune": False}}, PairsStudyConfig)
    (model,) = described.routed()
    assert (model.routing, model.changes, model.is_trained) == (tower, {"epochs": 7}, False)
    # Capacities of the study are not set over that of a tower.
    (own,) = study({"mine": {**tower, "text": {"router": "norm"}}}, PairsStudyConfig).routed()
    assert (own.name, own.routing) == ("mine", {**tower, "text": {"router": "norm"}})


def test_a_study_reads_each_of_its_files_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dense.yaml").write_text(yaml.safe_dump(DENSE))
    routers = {"random": {"router": "random"}}
    fields = {"output": "o", "dense": str(tmp_path / "dense.yaml"), "routers": routers, "finetune": {"epochs": 1}}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(fields))
    files: list[Path] = []
    read = yaml_files._read
    monkeypatch.setattr(yaml_files, "_read", lambda path: files.append(path) or read(path))  # type: ignore[func-returns-value]
    config = parse_config([str(tmp_path / "study.yaml"), "--seeds", "2"], CONFIGS)
    assert comparison_of(config).runs()
    assert [file.name for file in files] == ["study.yaml", "dense.yaml"]
