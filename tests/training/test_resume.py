"""A run that is interrupted at any moment ends as if it had not been, and a finished one stays as it is."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mmod.training import OptimConfig
from mmod.training.checkpoint import Checkpoint, latest_checkpoint, load_checkpoint, save_checkpoint
from tests.training.worker import run, tiny_config, weights

ROOT = Path(__file__).parents[2]


def start(options: dict[str, Any], path: Path) -> subprocess.Popen[str]:
    path.write_text(json.dumps(options))
    command = [sys.executable, "-m", "tests.training.worker", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)


def kill_at(options: dict[str, Any], path: Path, step: int) -> None:
    """Start a run and kill it with SIGKILL when it begins `step`."""
    process = start(options, path)
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == f"step {step}":
            process.kill()
            break
    process.stdout.read()
    assert process.wait() == -9, f"the run ended before step {step}"


@pytest.mark.parametrize(
    ("options", "kills"),
    [
        ({"epochs": 2, "checkpoint_every": 2}, 1),
        (
            {
                "epochs": 3,
                "checkpoint_every": 1,
                "routing": {"router": "linear", "gate": "tanh", "capacity": 0.5, "losses": {"membership": 0.1}},
                "ema": {"decay": 0.9},
                "mixup": {"mode": "elem"},
                "args": {"drop_path_rate": 0.2, "proj_drop_rate": 0.1},
            },
            2,
        ),
    ],
    ids=["dense", "routed with EMA, mixup and dropout"],
)
def test_killed_run_ends_bitwise_equal(tmp_path: Path, options: dict[str, Any], kills: int) -> None:
    torch.set_num_threads(1)
    steps = sorted(random.Random().sample(range(1, 6 * options["epochs"]), kills))
    whole = run(tiny_config(output=tmp_path / "whole", **options))
    interrupted = {**options, "output": str(tmp_path / "killed")}
    for step in steps:
        kill_at(interrupted, tmp_path / "options.json", step)
    process = start(interrupted, tmp_path / "options.json")
    assert process.wait() == 0, f"killed at {steps}"
    for name in ("model", "ema")[: 1 + ("ema" in options)]:
        left, right = weights(tmp_path / "whole" / name), weights(tmp_path / "killed" / name)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left), f"killed at {steps}"
    first, second = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "killed"))
    assert {**first, "folder": ""} == {**second, "folder": ""}, f"killed at {steps}"
    assert (tmp_path / "whole/metrics.csv").read_text() == (tmp_path / "killed/metrics.csv").read_text()
    assert whole.steps == 6 * options["epochs"]


def test_finished_run_is_returned_and_not_touched(tmp_path: Path) -> None:
    config = tiny_config(output=tmp_path / "run", epochs=1)
    first = run(config)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    second = run(config)
    assert second.reused
    assert not first.reused
    assert replace(second, reused=False) == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_folder_of_another_config_names_the_differing_keys(tmp_path: Path) -> None:
    config = tiny_config(output=tmp_path / "run", epochs=1)
    run(config)
    other = replace(config, epochs=2, optim=OptimConfig(lr=0.5))
    with pytest.raises(ValueError, match=r"epochs: 1 there, 2 now; optim\.lr: 0\.001 there, 0\.5 now"):
        run(other)
    assert run(replace(config, log_every=7, checkpoint_every=3)).reused


def test_folder_with_foreign_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds files but no config\.yaml"):
        run(tiny_config(output=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_checkpoint_killed_while_written_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = Checkpoint({"weight": torch.ones(2)}, None, {"step": 1})
    save_checkpoint(tmp_path, 0, 1, content, {})

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", die)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, 0, 2, content, {})
    path = latest_checkpoint(tmp_path)
    assert path is not None
    assert load_checkpoint(path).training == {"step": 1}
    save_checkpoint(tmp_path, 0, 2, Checkpoint({"weight": torch.zeros(2)}, None, {"step": 2}), {})
    assert len(list(tmp_path.iterdir())) == 1
