"""Processes that hold shards of a model train as one does; so do others that go on from their checkpoint."""

from __future__ import annotations

import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mmod.io.files import DamagedFileError
from mmod.opening.runs import list_checkpoints
from mmod.opening.weights import read_weights
from mmod.training.engine.kind import create
from mmod.training.kinds import kind_of
from tests.kit.engine_worker import main, run, tiny_config, weights
from tests.kit.processes import run_processes

ROUTED = {"router": "linear", "gate": "tanh", "capacity": 0.5, "losses": {"membership": 0.1}}
OPTIONS: dict[str, Any] = {
    "epochs": 2,
    "routing": ROUTED,
    "ema": {"decay": 0.5},
    "grad_clip": 1.0,
    "grad_checkpointing": True,
    "distributed": {"kind": "fsdp"},
}


def same(one: Path, other: Path) -> None:
    for name in ("model", "last"):
        left, right = weights(one / name), weights(other / name)
        assert left.keys() == right.keys()
        for key, value in left.items():
            torch.testing.assert_close(right[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_shards_of_two_processes_go_on_in_one_and_in_three(tmp_path: Path) -> None:
    options = {**OPTIONS, "epochs": 1}
    alone = tiny_config(output=tmp_path / "alone", batch_size=12, **{**options, "distributed": {}})
    uninterrupted = run(alone)
    two = {**options, "output": str(tmp_path / "two"), "batch_size": 6}
    stopped = partial(main, signals={1: signal.SIGTERM})
    assert run_processes(stopped, two, world=2) == [128 + signal.SIGTERM] * 2

    (checkpoint,) = list_checkpoints(tmp_path / "two/checkpoints")
    assert sorted(path.name for path in (checkpoint / "model").iterdir()) == [
        f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)
    ]
    # Dense keys and shapes: a model that is not sharded loads them.
    create(kind_of(alone)).load_state_dict(read_weights(tmp_path / "two"))
    for world in (1, 3):
        shutil.copytree(tmp_path / "two", tmp_path / f"on-{world}")
        options = {**two, "output": str(tmp_path / f"on-{world}"), "batch_size": 12 // world}
        assert run_processes(main, options, world=world) == [0] * world
        same(tmp_path / "alone", tmp_path / f"on-{world}")
    again = run(tiny_config(**{**two, "output": str(tmp_path / "on-1"), "batch_size": 12}))
    assert again.reused
    assert again.evaluation.loss == pytest.approx(uninterrupted.evaluation.loss, abs=1e-4)


def test_damaged_shards_are_refused(tmp_path: Path) -> None:
    config = tiny_config(output=tmp_path / "run", **{**OPTIONS, "epochs": 1})
    with pytest.raises(SystemExit):
        run(config, signals={3: signal.SIGTERM})
    (checkpoint,) = list_checkpoints(tmp_path / "run/checkpoints")
    shutil.copytree(checkpoint, tmp_path / "sound")
    for damage in ("a bit", "a shard", "all shards", "the average"):
        shutil.rmtree(checkpoint)
        shutil.copytree(tmp_path / "sound", checkpoint)
        if damage == "the average":
            shutil.rmtree(checkpoint / "ema")
            (checkpoint / "sha256.json").unlink()
        elif damage == "all shards":
            shutil.rmtree(checkpoint / "model")
        else:
            (shard,) = (checkpoint / "model").iterdir()
            content = bytearray(shard.read_bytes())
            content[-1] ^= 1
            shard.write_bytes(content[:: 1 if damage == "a bit" else 2])
        with pytest.raises(DamagedFileError, match=rf"cannot go on: '{checkpoint}/.*Remove the folder '{checkpoint}'"):
            run(config)
        assert list_checkpoints(tmp_path / "run/checkpoints") == [checkpoint]


def test_shards_with_routers_that_read_no_importance_may_be_compiled(tmp_path: Path) -> None:
    assert tiny_config(output=tmp_path, compile=True, **OPTIONS).compile
