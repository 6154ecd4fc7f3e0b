"""What every kind of training keeps: a run that is killed, stopped or shared by processes ends as any other."""

from __future__ import annotations

import csv
import json
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from mmod.io.files import LockedError, locked
from mmod.io.yaml import merged
from mmod.studies.audit.config import AUDITS, Audited, AuditOptions
from mmod.training import TrainConfig, fit
from mmod.training.engine.config import LoopConfig, RunConfig, config_as
from mmod.training.engine.run_folder import told_start
from mmod.training.kinds import kind_of
from mmod.training.pairs.config import TrainConfig as PairsConfig
from tests.kit.chat_configs import GAMMA, vlm_config
from tests.kit.engine_worker import MODEL, USAGE, weights
from tests.kit.pairs_worker import clip_config, write_model
from tests.kit.processes import run_processes
from tests.kit.sets import SETS
from tests.kit.text_configs import PREDICTOR, SCORE, text_config

ROUTED = {"router": "linear", "gate": "tanh", "capacity": 0.5, "losses": {"membership": 0.1}}
TOWERS = {"image": {"router": "linear", "capacity": 0.5, "losses": {"membership": 0.1}}, "text": {"capacity": 0.5}}


def images(output: Path, **changes: Any) -> TrainConfig:
    args = {**MODEL, "img_size": 32, "patch_size": 8, "num_classes": 10}
    fields = {
        "output": str(output),
        "model": {"name": "vit_tiny_patch16_224", "args": args},
        "data": {"source": "digits:tiny", "root": str(SETS / "digits"), "batch_size": 24},
        "epochs": 2,
        "epoch_steps": 3,
        "device": "cpu",
    }
    return TrainConfig.from_dict(merged(fields, changes))


def pairs(output: Path, **changes: Any) -> PairsConfig:
    data = {"train": "scenes:tiny/train", "val": "scenes:tiny/val", "root": str(SETS / "scenes"), "batch_size": 12}
    fields = clip_config(output.parent, output.name, data=data, epochs=2, epoch_steps=3)
    if changes.get("loss") == "siglip":
        changes["model"] = write_model(output.parent, "test-sigmoid", init_logit_bias=-3.0)
    return PairsConfig.from_dict(merged(fields, changes))


def chats(output: Path, **changes: Any) -> Any:
    config = vlm_config(output.parent, output.name, **changes)
    return replace(config, data=replace(config.data, val=None))


MAKE = {"image": images, "pairs": pairs, "text": text_config, "chat": chats}
LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
# With whatever has a state of its own: an average, draws, optimisers, elastic steps, shared routers, adapters.
RUNS: dict[str, dict[str, Any]] = {
    "image": {
        "routing": ROUTED,
        "ema": {"decay": 0.9},
        "mixup": {"mode": "elem"},
        "model": {"args": {"drop_path_rate": 0.2, "proj_drop_rate": 0.1}},
    },
    "image, routed in training": {"routing": {"router": "random", "training_only": True}, "training_only_epochs": 1},
    "pairs": {"routing": TOWERS, "augment": {}, "optim": {"opt": "adamw", "lr": 1e-3}},
    "text, elastic": {"routing": PREDICTOR, "elastic": True},
    "chat, LoRA and a shared router": {"routing": GAMMA, "lora": LORA, "optim": "muon"},
}


def train_until(config: RunConfig, last: int, end: Callable[[], Any]) -> None:
    """Train, and end so behind a step, before what it may save."""
    fit(config, progress=False, after_step=lambda step: end() if step.done == last else None)


def die() -> NoReturn:
    """Leave the folder as a killed process does: nothing is written any more."""
    raise KeyboardInterrupt


def metrics(folder: Path) -> list[dict[str, str]]:
    """Return the rows of a run's figures without those that differ between equal runs."""
    files = [folder / name for name in ("metrics.csv", "routers.csv")]
    rows = [row for file in files if file.exists() for row in csv.DictReader(file.open())]
    return [{name: value for name, value in row.items() if name not in USAGE} for row in rows]


def test_a_config_is_one_of_its_own_kind_alone(tmp_path: Path) -> None:
    config = text_config(tmp_path / "run")
    for cls in (type(config), LoopConfig, RunConfig):
        assert config_as(config, cls) is config
    for cls in (TrainConfig, Audited):
        with pytest.raises(TypeError, match=f"must be a {cls.__module__}.{cls.__name__}, got one of kind 'text'"):
            config_as(config, cls)
    assert config_as(AUDITS["text"].from_dict(config.as_written()), Audited).audit == AuditOptions()


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_was_killed_and_stopped_ends_bitwise_as_another(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = name.partition(",")[0]
    # Both ends come between two saves: conversations have four steps, the others six.
    killed, stopped = (3, 3) if kind == "chat" else (3, 5)
    saves = {} if kind == "chat" else {"checkpoint_every": 2}
    whole, cut = (MAKE[kind](tmp_path / run, **RUNS[name], **saves) for run in ("whole", "cut"))
    fit(whole, progress=False)
    assert told_start(kind_of(cut).config, 1) == f"{cut.output}: the run would start anew"
    with pytest.raises(KeyboardInterrupt):
        train_until(cut, killed, die)
    assert told_start(kind_of(cut).config, 1) == f"{cut.output}: the run was stopped, and would resume at step 2"
    with pytest.raises(SystemExit) as stop:
        train_until(cut, stopped, partial(signal.raise_signal, signal.SIGTERM))
    assert stop.value.code == 128 + signal.SIGTERM
    said = f"{cut.output}: SIGTERM after step {stopped}, which is saved; the same command goes on\n"
    assert said in capsys.readouterr().err
    assert [path for path in (tmp_path / "cut/checkpoints").iterdir() if re.search(rf"-0*{stopped}\b", path.name)]
    # What is no checkpoint, or was never finished, is not where it goes on.
    for other in ("checkpoint-best", "checkpoint-99"):
        (tmp_path / "cut/checkpoints" / other).mkdir()
    assert told_start(kind_of(cut).config, 1).endswith(f" would resume at step {stopped}")
    with locked(cut.output, wait=False), pytest.raises(LockedError, match="another process is writing"):
        told_start(kind_of(cut).config, 1)
    result = fit(cut, progress=False)
    assert not result.reused
    assert told_start(kind_of(cut).config, 1).endswith(
        "the run has finished; its result would be read, and nothing trained"
    )
    for folder in ("model", "last")[: 1 + ("ema" in RUNS[name])]:
        left, right = weights(tmp_path / "whole" / folder), weights(tmp_path / "cut" / folder)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left), folder
    first, second = (json.loads((tmp_path / run / "result.json").read_text()) for run in ("whole", "cut"))
    assert first["evaluation"] == second["evaluation"]
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "cut")
    # A finished run is read and not touched.
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    again = fit(cut, progress=False)
    assert again.reused
    assert replace(again, reused=False) == result
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(("kind", "routing"), [("image", ROUTED), ("pairs", TOWERS), ("text", SCORE)])
def test_routers_alone_train_where_the_config_says_so(kind: str, routing: dict[str, Any], tmp_path: Path) -> None:
    short = {"epochs": 1, "epoch_steps": 1}
    fit(MAKE[kind](tmp_path / "dense", **short), progress=False)
    changes: dict[str, Any] = {"trained": "routers", "model": {"checkpoint": str(tmp_path / "dense")}}
    with pytest.raises(ValueError, match="trained='routers' needs routing, and trained weights"):
        MAKE[kind](tmp_path / "tuned", **short, **changes)
    fit(MAKE[kind](tmp_path / "tuned", **short, **changes, routing=routing), progress=False)
    dense, tuned = weights(tmp_path / "dense/model"), weights(tmp_path / "tuned/model")
    assert all(torch.equal(tuned[name], value) for name, value in dense.items())
    assert all(".router." in name for name in tuned.keys() - dense.keys())


# Of each kind: runs of one process, and those of two that equal them: what they share, and in how many batches of one
# step of the single process.
ELASTIC_TEXT = {"routing": PREDICTOR, "elastic": True, "model": {"config": {"tie_word_embeddings": True}}}
SGD = {"opt": "sgd", "lr": 0.1}
AVERAGED = {"ema": {"decay": 0.5}, "optim": SGD}
# Random draws depend on the last bits of the tokens.
STRIDE = {"router": "stride", "training_only": True}
CHECKPOINTED = {"grad_checkpointing": True}
TOGETHER: dict[str, list[tuple[dict[str, Any], list[tuple[str, int, dict[str, Any]]]]]] = {
    "image": [
        ({"routing": ROUTED, **AVERAGED}, [("ddp", 1, {})]),
        ({"routing": STRIDE, **AVERAGED}, [("fsdp", 1, CHECKPOINTED)]),
    ],
    "pairs": [
        ({}, [("ddp", 2, {})]),
        ({"loss": "siglip"}, [("fsdp", 1, {})]),
        ({"routing": TOWERS}, [("fsdp", 2, {})]),
    ],
    "text": [(ELASTIC_TEXT, [("fsdp", 1, {})])],
}


def train_together(configs: list[RunConfig]) -> None:
    """Train one after the other in one group of processes, because a second one would need another port."""
    dist.init_process_group("gloo")
    for config in configs:
        fit(config, progress=False)


@pytest.mark.parametrize("kind", TOGETHER)
def test_two_processes_equal_one_with_the_same_global_batch(kind: str, tmp_path: Path) -> None:
    singles, configs = [], []
    for changes, ways in TOGETHER[kind]:
        single = MAKE[kind](tmp_path / f"one-{len(configs)}", **changes, epochs=1)
        result = fit(single, progress=False)
        for shared, accumulate, further in ways:
            two = {"distributed": {"kind": shared}, "accumulate": accumulate, **further}
            two["data"] = {"batch_size": single.data.batch_size // 2 // accumulate}
            singles.append(result)
            configs.append(MAKE[kind](tmp_path / f"two-{len(configs)}", **changes, epochs=1, **two))
    assert run_processes(train_together, configs, world=2) == [0, 0]
    loss, closeness = ("train_contrastive" if kind == "pairs" else "train_loss"), {"rtol": 1e-4, "atol": 1e-5}
    if kind == "text":
        closeness = {"rtol": 1e-3, "atol": 1e-4}
    for number, one in enumerate(singles):
        two = json.loads((tmp_path / f"two-{number}/result.json").read_text())
        assert two["evaluation"]["samples"] == one.evaluation.samples
        for left, right in zip(one.history, two["history"], strict=True):
            assert right[loss] == pytest.approx(left[loss], abs=1e-4)
        expected, actual = weights(Path(one.folder) / "model"), weights(tmp_path / f"two-{number}/model")
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, **closeness, msg=f"{number}: {name}")
