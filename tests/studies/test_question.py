"""A study's folder: its table may grow, and is not replaced by that of another study."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import timm
from safetensors.torch import save_file

from mmod.io.files import lock_of
from mmod.io.records import QUESTION, FolderTakenError
from mmod.io.store import STORE
from mmod.io.yaml import merged
from mmod.studies.candidates import comparison_of
from mmod.studies.kind_configs import ImageStudyConfig
from mmod.studies.question import Question, question_of
from tests.kit.image_study import DENSE


def study_in(folder: Path, **changes: Any) -> ImageStudyConfig:
    """Return a study of three models that starts from weights in a folder."""
    for name in ("dense", "other"):
        args = DENSE["model"]["args"]  # type: ignore[index]
        save_file(timm.create_model("vit_tiny_patch16_224", **args).state_dict(), folder / f"{name}.safetensors")
    fields: dict[str, Any] = {
        "dense": merged(DENSE, {"model": {"checkpoint": str(folder / "dense.safetensors")}}),  # type: ignore[arg-type]
        "routers": {"a-mod": {"preset": "a-mod"}, "random": {"router": "random"}},
        "train_dense": False,
        "finetune": {"epochs": 1},
        "seeds": 2,
    }
    return ImageStudyConfig(output=str(folder / "out"), **{**fields, **changes})


def test_a_run_is_loaded_and_a_config_trained_unless_the_study_says_otherwise(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {name: a}\nworld_size: 1\n")
    run = str(tmp_path)
    # What is described, and what a file describes, is not there yet.
    trained = {"digits": True, "another.yaml": True, f"{run}/config.yaml": True, run: False}
    for named, expected in trained.items():
        for dense in (named, {"base": named, "epochs": 1}):
            config = ImageStudyConfig(dense=dense, routers={"x": {"router": "norm"}}, tune=False)
            assert config.train_dense == expected
            assert dataclasses.replace(config, train_dense=not expected).train_dense != expected
    assert ImageStudyConfig(dense=dict(DENSE), routers={"x": {"router": "norm"}}, tune=False).train_dense


GROWN = [
    {},
    {"seeds": 3},
    {"capacities": [0.5, 0.25]},
    {"routers": {"a-mod": {"preset": "a-mod"}, "random": {"router": "random"}, "stride": {"router": "stride"}}},
    {"maps": 0, "processes": 2, "latency_rounds": 3, "latency_batch": 4, "controls": {"a-mod": False}},
    {"changes": {"data": {"workers": 1}, "log_every": 7}},
]
OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"seeds": 1}, "seeds: 2 there, 1 now"),
    ({"capacities": [0.25]}, "models a-mod-0.5, random-0.5: measured there, left out now"),
    ({"routers": {"a-mod": {"preset": "a-mod"}}}, "models random-0.5: measured there, left out now"),
    (
        {"routers": {"a-mod": {"preset": "a-mod"}, "random": {"router": "stride"}}},
        "'random-0.5': routing.router: 'random'",
    ),
    ({"changes": {"model": {"args": {"depth": 3}}}}, "'dense': model.args.depth: 4 there, 3 now"),
    ({"changes": {"data": {"val_limit": 8}}}, "'dense': data.val_limit: not set there, 8 now|: None there, 8 now"),
    ({"finetune": {"optim": {"lr": 0.5}}}, "'dense': optim.lr: 0.001 there, 0.5 now"),
    ({"tune": False, "seeds": 1}, "'dense': is_trained: True there, False now"),
    ({"tune": "others"}, "'dense': is_trained: True there, False now"),
]


@pytest.mark.parametrize(
    ("changes", "difference"), [*((grown, None) for grown in GROWN), *OTHERS], ids=lambda value: str(value)[:40]
)
def test_a_table_grows_and_takes_no_other_ones_place(
    changes: dict[str, Any], difference: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = study_in(tmp_path)
    folder = Path(study.output)
    folder.mkdir()
    runs = comparison_of(study).runs()
    question_of(study.evaluation, runs).keep(folder, ["dense", "a-mod-0.5", "random-0.5"])
    # Whichever version of mmod goes on.
    monkeypatch.setattr("mmod.io.store.__version__", "0.0")
    changed = dataclasses.replace(study, **changes)
    other = question_of(changed.evaluation, comparison_of(changed).runs())
    # Nothing is lost where there is no table yet.
    other.check(folder)
    (folder / "tradeoff.json").write_text("{}")
    if difference is None:
        other.check(folder)
        return
    with pytest.raises(FolderTakenError, match=f"--output FOLDER, or remove the table. Differing: .*({difference})"):
        other.check(folder)


def test_weights_tell_the_dense_model_wherever_they_are(tmp_path: Path) -> None:
    study = study_in(tmp_path)
    folder = Path(study.output)
    folder.mkdir()
    (folder / "tradeoff.json").write_text("{}")
    unknown = question_of(study.evaluation, comparison_of(study).runs())
    with pytest.raises(FolderTakenError, match=r"this study's is not known: question.json is not beside it"):
        unknown.check(folder)
    unknown.keep(folder, ["dense"])
    (tmp_path / "dense.safetensors").rename(tmp_path / "moved.safetensors")
    for name, is_same in (("moved", True), ("other", False)):
        dense = merged(study.dense, {"model": {"checkpoint": str(tmp_path / f"{name}.safetensors")}})  # type: ignore[arg-type]
        renamed = dataclasses.replace(study, dense=dense)
        question = question_of(renamed.evaluation, comparison_of(renamed).runs())
        if is_same:
            question.check(folder)
        else:
            with pytest.raises(FolderTakenError, match="'dense': weights: "):
                question.check(folder)


def test_a_folder_of_advice_is_not_a_study_s(tmp_path: Path) -> None:
    (tmp_path / "advice.json").write_text("{}")
    (tmp_path / QUESTION).write_text(json.dumps({"model": "a", "samples": 8}))
    with pytest.raises(FolderTakenError, match="no question of a study: name another folder, --output FOLDER"):
        Question({}, 1, {}).check(tmp_path)


def test_another_teacher_in_the_same_place_makes_another_study(tmp_path: Path) -> None:
    teacher = tmp_path / "other.safetensors"
    study = study_in(tmp_path, finetune={"epochs": 1, "distill": {"teacher": str(teacher)}})
    folder = Path(study.output)
    folder.mkdir()
    (folder / "tradeoff.json").write_text("{}")

    def asked() -> Question:
        return question_of(study.evaluation, comparison_of(study).runs())

    asked().keep(folder, ["dense", "a-mod-0.5", "random-0.5"])
    asked().check(folder)
    teacher.write_bytes(teacher.read_bytes() + b" ")
    with pytest.raises(FolderTakenError, match="teacher: "):
        asked().check(folder)


def test_of_models_that_are_not_trained_only_what_evaluates_them_differs(tmp_path: Path) -> None:
    study = study_in(tmp_path, tune=False, seeds=1)
    folder = Path(study.output)
    folder.mkdir()
    (folder / "tradeoff.json").write_text("{}")
    question_of(study.evaluation, comparison_of(study).runs()).keep(folder, ["dense", "a-mod-0.5"])
    for changes, difference in (
        ({"epochs": 7, "optim": {"lr": 0.5}, "schedule": {"warmup_epochs": 0}}, None),
        (
            {"epochs": 7, "data": {"mean": [0.5]}},
            r"Differing: model 'dense': data\.mean: \[0\.094\] there, \[0\.5\] now$",
        ),
    ):
        changed = dataclasses.replace(study, changes=changes)
        question = question_of(changed.evaluation, comparison_of(changed).runs())
        if difference is None:
            question.check(folder)
            continue
        with pytest.raises(FolderTakenError, match=difference):
            question.check(folder)


@pytest.mark.parametrize("report", ["tradeoff.json", "isoflop.json"])
def test_a_study_that_was_interrupted_as_it_went_on_still_answers_for_its_table(report: str, tmp_path: Path) -> None:
    question = Question({}, 1, {name: {"is_trained": True} for name in ("dense", "a", "b", "more")})
    question.keep(tmp_path, ["dense", "a"])
    assert json.loads((tmp_path / QUESTION).read_text())["models"].keys() == {"dense", "a"}
    (tmp_path / report).write_text("{}")
    question.check(tmp_path)
    question.keep(tmp_path, ["more"])
    fewer = dataclasses.replace(question, models={"dense": {"is_trained": True}, "more": {"is_trained": True}})
    with pytest.raises(FolderTakenError, match="models a: measured there, left out now"):
        fewer.check(tmp_path)


def test_what_two_programs_recorded_before_there_is_a_table_stays(tmp_path: Path) -> None:
    models = {name: {"is_trained": True, "weights": "1" * 8} for name in ("dense", "a", "b")}
    question = Question({}, 1, models)
    question.begin(tmp_path)
    # One of them is ahead in one model, the other in another.
    question.keep(tmp_path, ["b"])
    question.keep(tmp_path, ["dense", "a"])
    (tmp_path / "seed0").mkdir()
    for name in models:
        others = {**models, name: {"is_trained": True, "weights": "2" * 8}}
        with pytest.raises(FolderTakenError, match=f"has the model '{name}', which was trained from other weights"):
            Question({}, 1, others).check(tmp_path)


def test_a_study_of_other_files_takes_no_table(tmp_path: Path) -> None:
    image = tmp_path / "data/val/class/a.png"
    image.parent.mkdir(parents=True)
    image.write_bytes(b"1234")
    study = study_in(
        tmp_path, changes={"data": {"source": "folder", "root": str(tmp_path / "data"), "val_split": "val"}}
    )
    folder = Path(study.output)
    folder.mkdir()
    (folder / "tradeoff.json").write_text("{}")

    def asked() -> Question:
        return question_of(study.evaluation, comparison_of(study).runs())

    asked().keep(folder, ["dense"])
    asked().check(folder)
    image.with_name("b.png").write_bytes(b"1")
    told = r"restore its files, .*--output FOLDER\. Differing: data: '1 file, \w+' there, '2 files, \w+' now"
    with pytest.raises(FolderTakenError, match=told):
        asked().check(folder)
    # The rows in its store are of the other files too.
    (folder / "tradeoff.json").rename(folder / STORE)
    with pytest.raises(FolderTakenError, match=told):
        asked().check(folder)
    (folder / STORE).unlink()
    (folder / "tradeoff.json").write_text("{}")
    # Nor one that did not record its files.
    record = folder / QUESTION
    answered = json.loads(record.read_text())
    del answered["evaluation"]["data"]
    record.write_text(json.dumps(answered))
    with pytest.raises(FolderTakenError, match="data: None there, '2 files"):
        asked().check(folder)


def test_a_model_is_not_recorded_as_a_study_that_did_not_measure_it_describes_it(tmp_path: Path) -> None:
    asked = {}
    for capacity in (0.5, 0.7):
        models = {"dense": {"is_trained": False}, "a": {"is_trained": False, "capacity": capacity}}
        asked[capacity] = Question({}, 1, models)
    asked[0.5].keep(tmp_path, ["dense", "a"])
    asked[0.7].keep(tmp_path, ["dense"])
    (tmp_path / "tradeoff.json").write_text("{}")
    # Either may go on: of the model, this table has no row.
    for question in asked.values():
        question.check(tmp_path)
    asked[0.7].keep(tmp_path, ["a"])
    with pytest.raises(FolderTakenError, match=r"model 'a': capacity: 0\.7 there, 0\.5 now"):
        asked[0.5].check(tmp_path)


def test_a_study_that_was_stopped_before_its_first_result_knows_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    asked = {files: Question({"data": files}, 1, {"dense": {"is_trained": False}}) for files in ("these", "others")}
    asked["these"].begin(folder)
    # Nothing was measured of these.
    asked["others"].begin(folder)
    # A result, of which a kill left no record.
    (folder / STORE).touch()
    asked["others"].begin(folder)
    with pytest.raises(FolderTakenError, match="Differing: data: 'others' there, 'these' now"):
        asked["these"].begin(folder)
    # What is recorded of models stays as the study goes on.
    asked["others"].keep(folder, ["dense"])
    asked["others"].begin(folder)
    assert json.loads((folder / QUESTION).read_text())["models"].keys() == {"dense"}


def test_programs_that_begin_a_study_at_once_write_in_turns(tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(8)]
    asked = Question({"data": "these"}, 1, {"dense": {"is_trained": False}})
    with ThreadPoolExecutor(8) as programs:
        for folder in folders:
            folder.mkdir()
            list(programs.map(asked.begin, [folder] * 8))
    for folder in folders:
        assert {path.name for path in folder.iterdir()} == {QUESTION, lock_of(folder / QUESTION).name}


@pytest.mark.parametrize(
    ("dense", "tune", "folder"),
    [
        ("runs/shapes", False, "runs-shapes"),
        ("runs/shapes/config.yaml", True, "runs-shapes-tuned"),
        ({"base": "runs/other", "data": {"batch_size": 3}}, False, "runs-other"),
        ("../deep/down/runs/shapes/", False, "runs-shapes"),
        ("run/model/model.safetensors", False, "run"),
        ("run/checkpoints/step-000000002-epoch-00001", False, "run"),
        ({"model": {"name": "vit", "checkpoint": "signs.pth"}}, False, "signs"),
        ({"model": {"name": "vit", "checkpoint": "../more/weights/a.pt"}}, False, "weights-a"),
        ({"model": {"name": "vit", "checkpoint": "../a.pt"}}, False, "a"),
        ({"model": {"name": "vit_small.augreg", "pretrained": True}}, False, "vit_small.augreg"),
        ({"model": {"name": "hf-hub:org/vit", "pretrained": True}}, False, "hf-hub-org-vit"),
    ],
)
def test_the_usual_folder_tells_models_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dense: Any, tune: bool, folder: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for place in ("model", "checkpoints/step-000000002-epoch-00001"):
        (tmp_path / "run" / place).mkdir(parents=True)
    (tmp_path / "run/config.yaml").write_text("kind: image\nmodel: {name: vit}\n")
    (tmp_path / "run/model/model.safetensors").touch()
    routers = {"a-mod": {"preset": "a-mod"}}
    study = ImageStudyConfig(dense=dense, routers=routers, finetune={"epochs": 1}, tune=tune)
    assert study.output == f"runs/tradeoff/{folder}"


@pytest.mark.parametrize("dense", [".", "model", "model/.."])
def test_the_folder_that_a_command_runs_in_has_a_name(
    dense: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine/run/model").mkdir(parents=True)
    (tmp_path / "mine/run/config.yaml").write_text("kind: image\nmodel: {name: vit}\n")
    monkeypatch.chdir(tmp_path / "mine/run")
    study = ImageStudyConfig(dense=dense, routers={"a-mod": {"preset": "a-mod"}}, tune=False)
    assert study.output == "runs/tradeoff/mine-run"
