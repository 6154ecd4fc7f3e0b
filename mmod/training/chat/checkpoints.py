"""The checkpoints of transformers' Trainer in a run folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from mmod.io.files import DamagedFileError, read_json_object
from mmod.io.progress import progress_bar
from mmod.io.tensors import check_complete
from mmod.training.engine.checkpoint import check_sums, read_newest
from mmod.training.engine.distributed import StopRequest
from mmod.training.engine.health import rows_of_logs, write_rows

_STATE = "trainer_state.json"


class RunCallback(TrainerCallback):
    """Claims the run folder after the first step, writes `routers.csv`, shows a bar, and stops after a signal.

    Args:
        claim: Writes the config into the run folder; None in all processes but the first.
    """

    def __init__(self, claim: Callable[[], object] | None, stop: StopRequest, progress: bool) -> None:
        self._claim = claim
        self._stop = stop
        self._progress = progress
        self.stopped = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Show the bar."""
        steps = {"total": state.max_steps, "initial": state.global_step, "unit": "step"}
        self._bar = progress_bar(desc="train", shown=self._progress and state.is_world_process_zero, **steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Show the logged values."""
        self._bar.set_postfix(logs, refresh=False)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Close the bar."""
        self._bar.close()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Claim the folder once; stop after a signal."""
        self._bar.update(state.global_step - self._bar.n)
        if self._claim is not None:
            self._claim()
            self._claim = None
        if self._stop.agreed() and state.global_step < state.max_steps:
            self.stopped = control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write `routers.csv` into the run folder."""
        if args.should_save:
            write_rows(Path(args.output_dir).parent, rows_of_logs(state.log_history))


def last_checkpoint(folder: Path) -> str | None:
    """Return the newest checkpoint in a trainer's folder, after checking it; None without finished ones."""
    newest = read_newest(finished_checkpoints(folder), _check)
    return None if newest is None else str(newest[0])


def finished_checkpoints(folder: Path) -> list[Path]:
    """Return the finished checkpoints in a trainer's folder, newest first; other files are ignored."""
    # A checkpoint's `trainer_state.json` is written last.
    paths = [path for path in folder.glob("checkpoint-*") if path.name.rsplit("-", 1)[1].isdecimal()]
    return sorted((path for path in paths if (path / _STATE).is_file()), key=_step, reverse=True)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rsplit("-", 1)[1])


def _check(checkpoint: Path) -> None:
    """Raise a DamagedFileError if a file of a checkpoint is damaged."""
    try:
        is_written = bool(read_json_object(checkpoint / _STATE))
    except ValueError as error:
        raise DamagedFileError(str(error)) from error
    if not is_written:
        raise DamagedFileError(f"{checkpoint / _STATE} holds no state")
    check_complete(checkpoint)
    check_sums(checkpoint)
