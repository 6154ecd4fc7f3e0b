"""A run that is interrupted at any moment ends as if it had not been, and a finished one stays as it is."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from matplotlib.figure import Figure
from timm.utils import ModelEmaV3

import mmod
from mmod.io.files import DamagedFileError, LockedError, UnwrittenError, locked
from mmod.io.records import FolderTakenError
from mmod.io.yaml import read_yaml
from mmod.opening.runs import find_weights, list_checkpoints
from mmod.training import EmaConfig, TrainConfig, evaluate
from mmod.training.engine.kind import Step, create
from mmod.training.engine.run_folder import run_once, told_start, unfinished
from mmod.training.kinds import kind_of
from tests.kit.engine_worker import TensorStream, main, run, tiny_config, weights
from tests.kit.processes import FORK, run_processes
from tests.kit.scripts import run_script
from tests.kit.trap import Trap


def test_logs_written_before_the_first_step_do_not_keep_a_run_from_its_folder(tmp_path: Path) -> None:
    config = tiny_config(output=tmp_path / "run")

    def train(write_config: Callable[[], object]) -> str:
        (tmp_path / "run").mkdir()
        (tmp_path / "run/events").touch()
        write_config()
        (tmp_path / "run/result.json").touch()
        return "trained"

    def read(folder: Path) -> str | None:
        return "read" if (folder / "events").exists() else None

    assert [run_once(config, 0, 1, read, train) for _ in range(2)] == ["trained", "read"]
    with pytest.raises(ValueError, match="world_size: 1 there, 2 now"):
        run_once(config, 0, 2, read, train)


def test_a_run_without_a_checkpoint_leaves_its_folder_to_another_config(tmp_path: Path) -> None:
    config = tiny_config(output=tmp_path / "run", epochs=1)
    files = {
        "config.yaml": "model: {name: a}\nepochs: 9\n",
        "files.json": '{"train": "9 files"}',
        "classes.json": '{"gone": 0}',
    }
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    for name, text in files.items():
        (tmp_path / "run" / name).write_text(text)
    assert told_start(config, 1).endswith("stopped before its first checkpoint, and would start anew")
    with pytest.raises(FileNotFoundError, match=r"run' was stopped before its first checkpoint, so it has no weights"):
        find_weights(tmp_path / "run")
    with pytest.raises(FileNotFoundError, match=r"run' was stopped before its first checkpoint"):
        mmod.open_model(tmp_path / "run")
    # Another process trains it.
    for opens in (find_weights, mmod.open_model):
        with locked(config.output, wait=False), pytest.raises(LockedError, match="and has no checkpoint yet: wait for"):
            opens(tmp_path / "run")
    assert run(config).steps == run(replace(config, output=str(tmp_path / "other"))).steps
    assert read_yaml(tmp_path / "run/config.yaml")["epochs"] == 1
    assert not (tmp_path / "run/classes.json").exists()


def test_a_finished_run_whose_result_is_gone_is_not_trained_once_more_unasked(tmp_path: Path) -> None:
    config = tiny_config(output=tmp_path / "run", epochs=1)
    run(config)
    (tmp_path / "run/result.json").unlink()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    with pytest.raises(FileNotFoundError, match=r"its final model, model/, and neither result\.json nor a checkpoint"):
        run(config)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
    # It is the model, and no checkpoint on the way to it.
    assert unfinished(tmp_path / "run") == []
    shutil.rmtree(tmp_path / "run/model")
    assert not run(config).reused


# Of Ctrl-C, a closed terminal, Slurm's `--signal` and submitit.
STOPS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]


def test_each_signal_ends_a_run_after_its_step_and_another_start_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"epochs": 2, "args": {"drop_path_rate": 0.2}}
    run(tiny_config(output=tmp_path / "whole", **options))
    config = tiny_config(output=tmp_path / "stopped", **options)
    # One run, stopped after steps 3, 5, 7, 9 and 11, by each once.
    for step, number in zip(range(3, 12, 2), STOPS, strict=True):
        before = signal.getsignal(number)
        with pytest.raises(SystemExit) as stop:
            run(config, signals={step - 1: number})
        assert stop.value.code == 128 + number
        said = f"{config.output}: {number.name} after step {step}, which is saved; the same command goes on\n"
        assert capsys.readouterr().err == said
        assert signal.getsignal(number) == before
    assert run(config).steps == 12
    left, right = weights(tmp_path / "whole/model"), weights(tmp_path / "stopped/model")
    assert all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize("number", STOPS, ids=lambda number: number.name)
def test_a_second_ctrl_c_ends_at_once_with_a_line_and_what_schedulers_repeat_does_not(
    tmp_path: Path, number: signal.Signals
) -> None:
    stopped = partial(main, signals={2: number}, twice=True)
    ends = number in (signal.SIGINT, signal.SIGTERM)
    codes = run_processes(stopped, {"output": str(tmp_path / "run")}, log=tmp_path / "log")
    assert codes == [-number if ends else 128 + number]
    (line,) = (tmp_path / "log").read_text().split("\n")[-2:-1]
    assert line.endswith("again: ended at once, nothing was saved since the last checkpoint") == ends
    assert bool(list_checkpoints(tmp_path / "run/checkpoints")) != ends


@pytest.mark.parametrize("theirs", [signal.SIG_IGN, lambda number, frame: None], ids=["ignored", "handled"])
def test_signals_that_are_ignored_or_handled_by_others_end_nothing(tmp_path: Path, theirs: Any) -> None:
    before = {number: signal.signal(number, theirs) for number in STOPS}
    try:
        assert run(tiny_config(output=tmp_path / "run", epochs=1), signals=dict(enumerate(STOPS, 1))).steps == 6
        assert all(signal.getsignal(number) is theirs for number in STOPS)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_line_that_a_closed_terminal_cannot_show_does_not_change_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(text: str) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=closed, isatty=lambda: False))
    with pytest.raises(SystemExit) as stop:
        run(tiny_config(output=tmp_path / "run"), signals={3: signal.SIGHUP})
    assert stop.value.code == 129


def test_processes_that_train_together_stop_after_the_same_step(tmp_path: Path) -> None:
    options = {"output": str(tmp_path / "run"), "epochs": 1, "batch_size": 4}
    # Only the second process hears of it.
    stopped = partial(main, signals={2: signal.SIGUSR1}, hears=1)
    assert run_processes(stopped, options, world=2, log=tmp_path / "log") == [128 + signal.SIGUSR1] * 2
    assert "SIGUSR1 after step 3, which is saved; the same command goes on" in (tmp_path / "log").read_text()
    (newest,) = list_checkpoints(tmp_path / "run/checkpoints")
    assert newest.name == "step-000000003-epoch-00000"
    assert run_processes(main, options, world=2) == [0, 0]
    assert json.loads((tmp_path / "run/result.json").read_text())["steps"] == 6


def test_a_second_start_leaves_the_first_alone(tmp_path: Path) -> None:
    config = tiny_config(output=tmp_path / "run", epochs=1)
    message = r"another process is writing to '.*run': wait for it to end, or name another folder, --output FOLDER"
    with locked(config.output, wait=False), pytest.raises(LockedError, match=message):
        run(config)
    assert run(config).steps == 6


def test_a_lock_is_not_inherited_by_a_forked_process(tmp_path: Path) -> None:
    ready, say = os.pipe()
    with locked(tmp_path / "run", wait=False):
        child = os.fork()
        if not child:
            os.write(say, b"1")
            time.sleep(60)
            os._exit(0)
    try:
        assert os.read(ready, 1)
        with locked(tmp_path / "run", wait=False):
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"optim": {"opt": "adamww"}}, "timm knows no optimiser 'adamww'; near ones: adamw"),
        ({"args": {"num_classes": 3}}, "labels run from 0 to 3"),
        ({"model": {"checkpoint": "nowhere"}}, "no checkpoint at 'nowhere'"),
        ({"device": "gpu"}, "device must be 'auto', 'cpu', 'cuda' .*, got 'gpu'"),
    ],
    ids=["optimiser", "classes", "weights", "device"],
)
def test_a_start_that_fails_leaves_the_folder_to_another(tmp_path: Path, changes: dict[str, Any], error: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=error):
        run(tiny_config(output=tmp_path / "run", epochs=1, tensorboard=True, **changes))
    # Not even a lock.
    assert not list(tmp_path.iterdir())
    assert run(tiny_config(output=tmp_path / "run", epochs=1)).steps == 6


def test_a_missing_tensorboard_is_told_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    steps: list[int] = []
    config = tiny_config(output=tmp_path / "run", epochs=1, tensorboard=True)
    with pytest.raises(ImportError, match="tensorboard"):
        run(config, after_step=lambda step: steps.append(step.done))
    assert not steps


class TestCheckpoints:
    """What lies in `checkpoints/` of a run that was interrupted."""

    @staticmethod
    def interrupted(folder: Path, **options: Any) -> TrainConfig:
        config = tiny_config(output=folder / "run", epochs=1, checkpoint_every=1, **options)
        with pytest.raises(SystemExit):
            run(config, signals={3: signal.SIGTERM})
        return config

    def test_a_users_own_files_stay(self, tmp_path: Path) -> None:
        folder = tmp_path / "run/checkpoints"
        users_files = [folder / name for name in ("best.pt", "step-4", "step-000000001-epoch-00000-mine/model.pt")]
        config = self.interrupted(tmp_path)
        for path in users_files:
            path.parent.mkdir(exist_ok=True)
            path.write_text("mine")
        assert run(config).steps == 6
        assert [path.read_text() for path in users_files] == ["mine"] * 3
        assert len(list(folder.iterdir())) == 3

    def test_a_damaged_one_is_refused_until_the_user_removes_it(self, tmp_path: Path) -> None:
        config = self.interrupted(tmp_path, ema={"decay": 0.9})
        # Those of the last two steps are kept.
        newest, older = list_checkpoints(tmp_path / "run/checkpoints")
        assert [path.name for path in (newest, older)] == ["step-000000004-epoch-00000", "step-000000003-epoch-00000"]
        shutil.copytree(newest, tmp_path / "sound")
        message = rf"cannot go on: '{newest}/.*Remove the folder '{newest}' to go on from '{older}', or choose another"
        for damage in ("a bit", "no average", "foreign state", "code"):
            shutil.rmtree(newest)
            shutil.copytree(tmp_path / "sound", newest)
            harm(newest, damage, tmp_path / "executed")
            with pytest.raises(DamagedFileError, match=message):
                run(config)
            # A dry run compares checksums, and loads nothing.
            if damage == "a bit":
                with pytest.raises(DamagedFileError, match=message):
                    told_start(kind_of(config).config, 1)
            assert len(list_checkpoints(newest.parent)) == 2
            assert not (tmp_path / "executed").exists()
        shutil.rmtree(newest)
        assert run(config).steps == 6


def harm(checkpoint: Path, damage: str, executed: Path) -> None:
    """Damage a file of a checkpoint; code in it would leave a trace at `executed`."""
    weights, state = checkpoint / "model.safetensors", checkpoint / "training.pt"
    if damage != "a bit":
        # What a checksum would find first.
        (checkpoint / "sha256.json").unlink()
    if damage == "a bit":
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
    elif damage == "no average":
        (checkpoint / "ema.safetensors").unlink()
    elif damage == "foreign state":
        torch.save([1, 2], state)
    else:
        state.write_bytes(pickle.dumps(Trap(executed), protocol=2))


def test_a_run_whose_folder_is_removed_ends_with_its_path_and_creates_nothing(tmp_path: Path) -> None:
    config = tiny_config(output=tmp_path / "run", epochs=1, checkpoint_every=2)

    def remove(step: Step) -> None:
        if step.done == 3:
            shutil.rmtree(tmp_path / "run")

    message = r"run/checkpoints/step-000000004-epoch-00000' could not be written: No such file or directory"
    with pytest.raises(UnwrittenError, match=message):
        run(config, after_step=remove)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_goes_on_with_other_batches_of_the_same_sum(tmp_path: Path, world: int) -> None:
    options: dict[str, Any] = {"epochs": 1, "routing": {"router": "linear", "gate": "tanh", "capacity": 0.5}}
    run(tiny_config(output=tmp_path / "whole", **options))
    config = tiny_config(output=tmp_path / "split", **options)
    with pytest.raises(SystemExit):
        run(config, signals={3: signal.SIGTERM})
    options |= {"output": str(tmp_path / "split"), "batch_size": 4, "accumulate": 2 // world}
    assert run_processes(main, options, world=world) == [0] * world
    left, right = weights(tmp_path / "whole/model"), weights(tmp_path / "split/model")
    for name, value in left.items():
        torch.testing.assert_close(
            right[name], value, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(("name", "kills"), [("runs", 2), pytest.param("studies", 1, marks=pytest.mark.slow)])
def test_random_kills_leave_the_outcome_of_an_undisturbed_start(name: str, kills: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert run_processes(kill, name, kills, log=log) == [0], log.read_text()


def kill(name: str, kills: int) -> None:
    multiprocessing.get_context = lambda *_: FORK  # type: ignore[assignment]
    # No outcome has figures, which take as long as the runs of a study.
    Figure.draw = lambda *_: None  # type: ignore[method-assign]
    ended = run_script("scripts/kills.py", name, "--kills", str(kills))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(f"{kills} kills, ")


def test_a_finished_run_whose_weights_were_damaged_since_is_refused(tmp_path: Path) -> None:
    config = tiny_config(output=tmp_path / "run", epochs=1, ema={"decay": 0.9})
    run(config)
    path = tmp_path / "run/last/model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    with pytest.raises(DamagedFileError, match=rf"had finished, .* damaged since: '{path}'.*choose another output"):
        run(config)
    path.write_bytes(content)
    assert run(config).reused


def test_weights_left_by_a_start_that_ended_before_its_result_are_written_again(tmp_path: Path) -> None:
    config = tiny_config(output=tmp_path / "run", epochs=1)
    with pytest.raises(SystemExit):
        run(config, signals={3: signal.SIGTERM})
    left = tmp_path / "run/model/model.safetensors"
    left.parent.mkdir()
    left.write_bytes(b"half")
    assert run(config).steps == 6
    assert weights(left.parent)


def test_an_epoch_is_kept_whose_evaluation_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(output=tmp_path / "run", epochs=2, ema=EmaConfig(decay=0.9))
    expected = run(replace(config, output=str(tmp_path / "other")))
    kind = type(kind_of(config))
    evaluate: Any = kind.score  # type: ignore[attr-defined]
    calls = iter(range(10**6))

    def failing(*arguments: Any, **options: Any) -> Any:
        # Weights and moving average of the first epoch are evaluated, then the second's are not.
        if next(calls) == 2:
            raise OSError("a damaged image")
        return evaluate(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "score", failing)
        with pytest.raises(OSError, match="a damaged image"):
            run(config)
    kept = [path.name for path in list_checkpoints(tmp_path / "run/checkpoints")]
    assert kept == ["step-000000012-epoch-00001", "step-000000006-epoch-00000"]
    assert run(config).evaluation == expected.evaluation
    for name in ("model", "last"):
        left, right = weights(tmp_path / "run" / name), weights(tmp_path / "other" / name)
        assert all(torch.equal(left[key], right[key]) for key in left)


def test_a_run_goes_on_with_the_data_elsewhere_and_damaged_samples_allowed(tmp_path: Path) -> None:
    config = tiny_config(output=tmp_path / "run", epochs=1)
    finished = run(config)
    data = replace(config.data, on_corrupt="skip", root="elsewhere", max_corrupt=3, workers=2)
    with pytest.warns(UserWarning, match=r"run finished with data.root=.*, of which its result is: 'elsewhere' is not"):
        assert run(replace(config, data=data, log_every=7, checkpoint_every=3)).reused
    assert finished.folder == str(tmp_path / "run")
    # Its schedule depends on its length.
    longer = replace(config, epochs=2)
    for start in (run, partial(told_start, world=1)):
        with pytest.raises(FolderTakenError, match=r"another config.* epochs: 1 there, 2 now"):
            start(longer)


@pytest.mark.parametrize("average", [None, EmaConfig(), EmaConfig(decay=0.5), EmaConfig(0.5, use_warmup=False)])
def test_the_final_model_is_what_is_scored(tmp_path: Path, average: EmaConfig | None) -> None:
    config = tiny_config(output=tmp_path / "run", epochs=1, ema=average)
    finished = run(config)
    assert find_weights(tmp_path / "run") == tmp_path / "run/model/model.safetensors"
    scores = {"model": finished.best} | ({} if average is None else {"last": finished.evaluation})
    assert {path.name for path in (tmp_path / "run").iterdir() if path.is_dir()} == set(scores)
    for folder, expected in scores.items():
        model = create(kind_of(config))
        model.load_state_dict(weights(tmp_path / "run" / folder))
        assert evaluate(model, TensorStream(8, seed=None)) == expected  # type: ignore[arg-type]
    assert (finished.best == finished.evaluation) == (average is None)


def test_a_moving_average_forgets_the_start_or_is_refused() -> None:
    """Weights stand for the steps of a run: the start is 0, the end 1."""
    for steps in (2, 10, 100, 1000):
        for config in (EmaConfig(), EmaConfig(0.99), EmaConfig(0.99, use_warmup=False), EmaConfig(0.5, False)):
            step_weight = torch.nn.Linear(1, 1, bias=False)
            step_weight.weight.data.fill_(0)
            average = ModelEmaV3(step_weight, decay=config.decay, use_warmup=config.use_warmup)
            average.update(step_weight, step=1)
            step_weight.weight.data.fill_(1)
            for step in range(2, steps + 1):
                average.update(step_weight, step=step)
            start = 1 - average.module.weight.item()
            if config.use_warmup and steps > 2:
                assert start < 0.05
            is_refused = not config.use_warmup and start > 0.05
            with pytest.raises(ValueError, match=r"first step would be") if is_refused else nullcontext():
                config.check_steps(steps)


def test_a_run_that_is_too_short_for_its_average_is_refused_with_what_works(tmp_path: Path) -> None:
    config = tiny_config(output=tmp_path / "run", epochs=1, ema=EmaConfig(0.9999, use_warmup=False))
    message = r"over 10,000 steps, and the run has 6: .*Set ema\.use_warmup to true, or ema\.decay to at most ([\d.]+)"
    with pytest.raises(ValueError, match=message) as refusal:
        run(config)
    assert not (tmp_path / "run").exists()
    most = float(re.search(message, str(refusal.value))[1])
    for advised in (EmaConfig(0.9999, use_warmup=True), EmaConfig(most, use_warmup=False)):
        advised.check_steps(6)
