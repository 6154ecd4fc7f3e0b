"""What the processes of a run do when one of them is killed."""

from __future__ import annotations

import os
import signal
import weakref
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from mmod.io.refusals import one_line_errors
from mmod.opening.runs import list_checkpoints
from mmod.training.engine.distributed import process_group
from tests.kit.engine_worker import main, read_metrics, weights
from tests.kit.processes import run_processes


def train(*args: Any, **options: Any) -> None:
    with one_line_errors():
        main(*args, **options)


@pytest.mark.parametrize(("kind", "killed"), [("ddp", 0), ("fsdp", 1)])
def test_the_others_end_with_a_code_of_their_own(tmp_path: Path, kind: str, killed: int) -> None:
    options = {"output": str(tmp_path / "run"), "batch_size": 4, "checkpoint_every": 2, "distributed": {"kind": kind}}
    dying = partial(train, signals={3: signal.SIGKILL}, hears=killed)
    codes = run_processes(dying, options, world=2, log=tmp_path / "log")
    assert codes[killed] == -signal.SIGKILL
    assert codes[1 - killed] == 75
    assert "error: another process of the run ended or did not answer in time" in (tmp_path / "log").read_text()
    assert [path.name for path in list_checkpoints(tmp_path / "run/checkpoints")] == ["step-000000002-epoch-00000"]


def test_errors_free_what_their_frames_hold_before_the_group_ends() -> None:
    # Freed after it, DistributedDataParallel ends the group while a thread of gloo may wait for Python's lock.
    held: list[weakref.ref[torch.nn.Module]] = []

    def leave() -> NoReturn:
        model = torch.nn.Identity()
        held.append(weakref.ref(model))
        raise SystemExit(3)

    with pytest.raises(SystemExit) as stop, process_group("cpu", grouped=True):
        leave()
    assert stop.value.code == 3
    assert held[0]() is None


def train_and_die_once(options: dict[str, Any]) -> None:
    start = os.environ["TORCHELASTIC_RESTART_COUNT"]
    with open(f"{options['output']}.starts", "a") as file:
        file.write(start)
    train(options, hears=1, signals={3: signal.SIGKILL} if start == "0" else {})


def launch(options: dict[str, Any]) -> None:
    # The agent's log names its callers, for which Python looks through every module that a test has imported.
    dynamic_rendezvous.get_method_name = lambda **_: "test"  # type: ignore[assignment]
    # With one store for all starts, a process may look for one that has ended.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=1,
        monitor_interval=0.1,
        start_method="fork",
        local_addr="127.0.0.1",
        run_id="run",
    )
    elastic_launch(config, train_and_die_once)(options)


def test_torchrun_restarts_a_killed_run_which_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    # `test_shards.py` goes on from shards.
    options: dict[str, Any] = {"epochs": 1, "batch_size": 4, "checkpoint_every": 2, "ema": {"decay": 0.5}}
    assert run_processes(train, {**options, "output": str(tmp_path / "whole")}, world=2) == [0, 0]
    assert run_processes(launch, {**options, "output": str(tmp_path / "killed")}, log=tmp_path / "log") == [0]
    assert sorted((tmp_path / "killed.starts").read_text()) == ["0", "0", "1", "1"]
    for name in ("model", "last"):
        uninterrupted, killed = (weights(tmp_path / run / name) for run in ("whole", "killed"))
        for key, value in uninterrupted.items():
            torch.testing.assert_close(killed[key], value, rtol=0, atol=1e-6)
    assert read_metrics(tmp_path / "whole") == read_metrics(tmp_path / "killed")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "variables RANK=x, WORLD_SIZE=2 must be numbers: start by torchrun"),
        ({"LOCAL_RANK": "-1", "WORLD_SIZE": "2"}, "variables LOCAL_RANK=-1, WORLD_SIZE=2 must be numbers"),
        ({"RANK": "-1"}, "variables RANK=-1 must be numbers"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "RANK=1, WORLD_SIZE=2 name several processes, and MASTER_ADDR is not set"),
    ],
)
def test_what_a_launcher_left_in_the_environment_is_named(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ValueError, match=message), process_group("cpu"):
        pass


@pytest.mark.parametrize("variables", [{"LOCAL_RANK": "-1"}, {"LOCAL_RANK": "-1", "RANK": "0", "WORLD_SIZE": "1"}])
def test_a_local_rank_of_minus_one_means_a_process_alone(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with process_group("cpu") as process:
        assert (process.is_first, process.world) == (True, 1)
