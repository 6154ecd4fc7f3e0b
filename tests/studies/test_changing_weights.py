"""Weights that change while they are compared: a run that trains is refused, and a study that meets others ends."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mmod.cli import main
from mmod.io.files import LockedError, locked
from mmod.io.jobs import Job, Runner
from mmod.io.records import FolderTakenError
from mmod.io.store import STORE
from mmod.studies.kind_configs import ImageStudyConfig
from mmod.studies.question import Question
from mmod.studies.study import run_study
from mmod.training import fit
from mmod.training.engine.config import RunConfig
from mmod.training.engine.run_folder import is_finished
from tests.kit.folders import save_images
from tests.kit.image_study import config


@pytest.fixture(scope="module")
def run_config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Return the config of a run that has a checkpoint and no final model, as one that trains."""
    dense = config(tmp_path_factory.mktemp("runs"), epochs=2)

    def stop(step: Any) -> None:
        if step.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(dense, progress=False, after_step=stop)
    return dense


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the folders of two runs of other weights, of which tests change copies."""
    runs = [config(tmp_path_factory.mktemp("trained"), seed=seed) for seed in (0, 1)]
    for run in runs:
        fit(run, progress=False)
    return [Path(run.output) for run in runs]


@pytest.mark.parametrize(
    "words",
    ["advise {} --images {images}", "tradeoff my-model --dense {}", "evaluate {}", "audit {}", "plan {}"],
)
def test_a_run_that_trains_is_refused_before_anything_is_measured(
    words: str, run_config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = words.format(run_config.output, images=save_images(tmp_path / "images")).split()
    refused = pytest.raises(SystemExit, match=r"run' is training, so that its last checkpoint will change: wait for it")
    with locked(run_config.output, wait=False), refused as end:
        main([*line, "--output", str(tmp_path / "result")])
    # Another time it is right.
    assert end.value.code == 1
    assert not (tmp_path / "result").exists()
    assert capsys.readouterr().err.count("\n") == 1


def test_a_copy_of_a_run_that_trains_is_evaluated(
    run_config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    with locked(run_config.output, wait=False):
        shutil.copytree(run_config.output, copy)
        main(["evaluate", str(copy)])
    assert f"The model is the last checkpoint of the run {copy}" in capsys.readouterr().out


@pytest.mark.parametrize("tune", [False, True])
def test_a_study_ends_where_its_weights_are_other_ones_than_at_its_start_and_goes_on_with_the_first(
    tune: bool, trained: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = shutil.copytree(trained[0], tmp_path / "0/run") / "model"
    kept, other = (run / "model" for run in trained)
    study = ImageStudyConfig(
        output=str(tmp_path / "study"),
        dense=str(tmp_path / "0/run"),
        routers={"norm": {"router": "norm", "blocks": [1]}},
        capacities=[0.5],
        tune=tune,
        finetune={"epochs": 1, "epoch_steps": 1},
    )
    keep = Question.keep

    def replace_weights(question: Question, folder: Path, models: Any, *args: Any) -> None:
        keep(question, folder, models, *args)
        # Not before the first result.
        if models:
            shutil.copytree(other, first, dirs_exist_ok=True)

    monkeypatch.setattr(Question, "keep", replace_weights)
    with pytest.raises(ValueError, match=r"0/run' has other weights than at the start, .*restore them to go on"):
        run_study(study, progress=False)
    store = (tmp_path / "study" / STORE).read_text()
    monkeypatch.setattr(Question, "keep", keep)
    if tune:
        with pytest.raises(FolderTakenError, match="has the model 'dense', which was trained from other weights"):
            run_study(study, progress=False)
    shutil.copytree(kept, first, dirs_exist_ok=True)
    run_study(study, progress=False)
    assert (tmp_path / "study" / STORE).read_text().startswith(store)


def test_a_study_goes_on_with_other_runs_where_another_program_does_one(
    trained: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = ImageStudyConfig(
        output=str(tmp_path / "study"),
        dense=str(trained[0]),
        routers={name: {"router": name, "blocks": [1]} for name in ("norm", "stride")},
        finetune={"epochs": 1, "epoch_steps": 1},
        controls={"norm": False},
    )
    runs = tmp_path / "study" / "seed0"
    with ExitStack() as other:
        other.enter_context(locked(runs / "norm-0.5", wait=False))

        def end(runner: Runner, job: Job, error: LockedError) -> None:
            assert job.name == "norm-0.5"
            # Which lock it is, so that nobody waits for one that nobody gives back.
            assert str(runs / "norm-0.5") in str(error)
            if is_finished(runs / "stride-0.5"):
                other.close()

        monkeypatch.setattr(Runner, "_put_off", end)
        result = run_study(study, progress=False)
    assert [row["name"] for row in result.rows] == ["dense", "norm-0.5", "stride-0.5"]
    # Of a folder that can be written, the parent may not be.
    assert not (tmp_path / ".study.lock").exists()
