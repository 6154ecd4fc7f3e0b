"""What a run prints in a file or pipe: loss, learning rate and validation of each epoch, and what to run next."""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from PIL import Image

from mmod.cli import main
from mmod.config.parse import parse_config
from mmod.studies.candidates import comparison_of
from mmod.studies.config import StudyConfig
from mmod.training import TrainConfig, fit
from mmod.training.command import next_commands
from mmod.training.engine.run_folder import FitResult
from mmod.training.kinds import KINDS, config_class
from tests.kit.engine_worker import MODEL
from tests.kit.fitted import fit_roughly, open_alone
from tests.kit.sets import SETS

ROUTED = {"router": "attention", "blocks": [1], "capacity": 0.5}

ARGS = {**MODEL, "img_size": 32, "patch_size": 8, "num_classes": 10}


def digits_config(folder: Path, **changes: Any) -> TrainConfig:
    fields: dict[str, Any] = {
        "output": str(folder),
        "model": {"name": "vit_tiny_patch16_224", "args": ARGS},
        "data": {"source": "digits:tiny", "root": str(SETS / "digits"), "batch_size": 64},
        "device": "cpu",
    }
    return TrainConfig.from_dict({**fields, **changes})


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line]


def test_each_epoch_has_a_line_with_its_loss_and_one_with_its_validation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # More steps than an epoch has.
    config = digits_config(tmp_path / "run", epochs=2, log_every=1000, ema={"decay": 0.5})
    result = fit(config)
    epochs = [line for line in lines_of(capsys) if line.startswith("epoch ")]
    assert len(epochs) == 6
    for number, (trained, validated, averaged) in enumerate((epochs[:3], epochs[3:]), 1):
        # Done and left are those of the run.
        done = rf"epoch {number}/2, run: {256 * number} of 512 samples, .*"
        assert re.match(rf"{done}loss=[\d.]+, top1=[\d.]+, lr=[\d.e-]+", trained)
        assert validated.startswith(f"epoch {number}/2: validation top-1 ")
        assert averaged.startswith(f"epoch {number}/2: validation of the moving average top-1 ")
    assert str(result.evaluation) in epochs[4]
    assert str(result.average) in epochs[5]
    assert fit(config, progress=False).reused
    assert not lines_of(capsys)


@pytest.mark.parametrize(
    ("batch_size", "accumulate", "steps", "seen", "whole"),
    [
        (64, 1, None, 256, 256),
        (60, 3, None, 240, 240),
        (200, 1, None, 200, 200),
        (60, 1, 2, 120, 240),
    ],
)
def test_an_epoch_says_how_many_samples_it_leaves_out(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    batch_size: int,
    accumulate: int,
    steps: int | None,
    seen: int,
    whole: int,
) -> None:
    config = digits_config(tmp_path / "run", epochs=1, accumulate=accumulate, epoch_steps=steps)
    fit(replace(config, data=replace(config.data, batch_size=batch_size)))
    *told, line = itertools.takewhile(lambda line: "validation" not in line, lines_of(capsys))
    assert told == ([f"each epoch leaves out {256 - whole} of 256 samples, which fill no batch"] if whole < 256 else [])
    assert line.startswith(f"epoch 1/1, run: {seen} of {seen} samples, ")


def test_a_resumed_run_names_its_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = digits_config(tmp_path / "run", epochs=2, checkpoint_every=1)
    steps = fit(config, progress=False).steps
    folder = tmp_path / "run"
    assert not list(folder.glob("checkpoints/step-*"))
    whole = replace(config, output=str(tmp_path / "other"))

    class LeavingError(Exception):
        pass

    def leave(*_: Any) -> None:
        raise LeavingError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmod.training.engine.loop.write_csv", leave)
        with pytest.raises(LeavingError):
            fit(whole, progress=False)
    fit(whole)
    assert f"{whole.output}: resumed at step {steps // 2} of {steps}" in lines_of(capsys)


def begin_study(config: StudyConfig, **_: Any) -> SimpleNamespace:
    """Plan and check the runs of a study, and do none."""
    comparison_of(config).checked_runs()
    return SimpleNamespace(folder=Path(config.output), show=lambda said: None)


PRUNE = {"kind": "prune", "keep": 0.5, "blocks": [1]}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, ["plan", "advise", "tradeoff"]),
        ({"routing": ROUTED}, ["audit"]),
        ({"methods": [PRUNE]}, []),
        ({"methods": [{**PRUNE, "training_only": True}]}, []),
    ],
    ids=["dense", "routed", "pruned", "pruned in training"],
)
def test_a_finished_run_names_commands_that_can_follow(
    tmp_path: Path,
    changes: dict[str, Any],
    names: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Advice and a study of the run are begun; what they compare, their own tests show.
    open_alone(monkeypatch)
    fit_roughly(monkeypatch)
    monkeypatch.setattr("mmod.studies.study.run_study", begin_study)
    monkeypatch.setattr("mmod.report.command.report_on", lambda _: print("a report"))
    config = digits_config(tmp_path / "a run", epochs=1, epoch_steps=1, **changes)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config.to_dict()))
    main(["train", "image", str(file)])
    printed = capsys.readouterr().out.splitlines()
    first = next(number for number, line in enumerate(printed) if line.startswith("next: the final model is in "))
    assert Path(*shlex.split(printed[first])[-1:]).is_dir()
    commands = [shlex.split(line, comments=True) for line in printed[first + 1 :]]
    assert [words[1] for words in commands] == ["evaluate", *names]
    images = tmp_path / "images"
    images.mkdir()
    for number, side in enumerate((32, 40)):
        Image.new("L", (side, side), 90 * number).save(images / f"{number}.png")
    small = {
        "plan": ["--plan.batches", "1"],
        "audit": ["--audit.draws", "1", "--audit.maps", "0"],
        "advise": ["--number", "2", "--batch_size", "1", "--output", str(tmp_path / "advice")],
        "tradeoff": ["--output", str(tmp_path / "study"), "--budgets", "[0.55]"],
    }
    for words in commands:
        words = [str(images) if word == "FOLDER" else word for word in words]
        device = "--dense.device" if words[1] == "tradeoff" else "--device"
        main([*words[1:], *small.get(words[1], []), device, "cpu"])
        assert capsys.readouterr().out


def test_other_processes_print_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = digits_config(tmp_path / "run", epochs=1)
    fit(config, progress=False)
    file = tmp_path / "run" / "config.yaml"
    shutil.copy(file, tmp_path / "config.yaml")
    main(["train", "image", str(tmp_path / "config.yaml")])
    assert "finished earlier, after" in capsys.readouterr().out
    monkeypatch.setattr("mmod.training.engine.distributed.is_first_process", lambda: False)
    main(["train", "image", str(tmp_path / "config.yaml")])
    assert not capsys.readouterr().out


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_dense_run_of_each_kind_names_its_plan(kind: str) -> None:
    config = parse_config([KINDS[kind].example], config_class(kind))
    dense = replace(config, routing=None, methods=[])  # type: ignore[call-arg]
    result: FitResult[Any] = FitResult("runs/a", 1, 1, SimpleNamespace(), None, [])
    names = [line.split()[1] for line in next_commands(dense, result).splitlines()[1:]]
    row = KINDS[kind]
    further = [name for name, given in (("advise", row.advised), ("tradeoff", row.study)) if given]
    assert names == ["evaluate", "plan", *further]


def test_a_run_of_convolutions_names_no_command_that_refuses_it(tmp_path: Path) -> None:
    config = digits_config(tmp_path, model={"name": "resnet10t", "args": {"num_classes": 10, "in_chans": 1}})
    result: FitResult[Any] = FitResult("runs/a", 1, 1, SimpleNamespace(), None, [])
    names = [line.split()[1] for line in next_commands(config, result).splitlines()[1:]]
    assert names == ["evaluate"]


@pytest.mark.parametrize("routing", [{"preset": "pixelprune"}, {"preset": "mindskip"}], ids=str)
def test_a_run_without_a_choice_among_tokens_names_no_audit_which_refuses_it(
    routing: dict[str, str], tmp_path: Path
) -> None:
    config = digits_config(tmp_path, routing=routing)
    result: FitResult[Any] = FitResult("runs/a", 1, 1, SimpleNamespace(), None, [])
    names = [line.split()[1] for line in next_commands(config, result).splitlines()[1:]]
    assert names == ["evaluate"]


def test_a_run_whose_router_learns_nothing_is_not_said_to_have_learned(tmp_path: Path) -> None:
    config = digits_config(tmp_path, routing={"router": "stride", "capacity": 0.5})
    result: FitResult[Any] = FitResult("runs/a", 1, 1, SimpleNamespace(), None, [])
    assert re.search(r"mmod audit runs/a +# which tokens it keeps$", next_commands(config, result))
