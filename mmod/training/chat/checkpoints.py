"""The checkpoints of transformers' Trainer in a run folder: which are sound, and when they are written."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from mmod.io.files import DamagedFileError
from mmod.io.progress import progress_bar
from mmod.training.engine.checkpoint import read_newest
from mmod.training.engine.health import rows_of_logs, write_rows
from mmod.training.engine.signals import StopRequest

__all__ = ["RunCallback", "last_checkpoint"]

_STATE = "trainer_state.json"


class RunCallback(TrainerCallback):
    """Claims the run folder after the first step, writes the routers' figures into it, and stops when a signal asks.

    It also shows how far the training is.

    Args:
        claim: Writes the config into the run folder; None in processes that do not.
        stop: What signals asked for.
        progress: Show a bar.
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
        """Show the figures."""
        self._bar.set_postfix(logs, refresh=False)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the bar."""
        self._bar.close()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Claim the folder once; see what signals ask for."""
        self._bar.update(state.global_step - self._bar.n)
        if self._claim is not None:
            self._claim()
            self._claim = None
        if self._stop.agreed() and state.global_step < state.max_steps:
            self.stopped = control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write what routers logged into the run folder, above that of the checkpoints."""
        if args.should_save:
            write_rows(Path(args.output_dir).parent, rows_of_logs(state.log_history))


def last_checkpoint(folder: Path) -> str | None:
    """Return the newest sound checkpoint that a trainer left in a folder, and warn of newer ones that are damaged.

    A checkpoint's `trainer_state.json` is written last: one without it was never finished, and is passed over.

    Args:
        folder: The trainer's folder. What else lies there is passed over, too.

    Returns:
        Its path; None when no checkpoint was finished.

    Raises:
        DamagedFileError: If there are finished checkpoints and none is sound.
    """
    found = [path for path in folder.glob("checkpoint-*") if path.name.rsplit("-", 1)[1].isdecimal()]
    finished = sorted((path for path in found if _is_finished(path)), key=_step, reverse=True)
    newest = read_newest(finished, _check_whole)
    return None if newest is None else str(newest[0])


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rsplit("-", 1)[1])


def _is_finished(checkpoint: Path) -> bool:
    try:
        return bool(json.loads((checkpoint / _STATE).read_text()))
    except (OSError, ValueError):
        return False


def _check_whole(checkpoint: Path) -> None:
    """Raise at the first file of a checkpoint that is not whole, without reading its tensors."""
    from safetensors import SafetensorError, safe_open

    for path in sorted(checkpoint.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise DamagedFileError(f"{str(path)!r} is damaged: {error}") from error
    for path in sorted(checkpoint.glob("*.pt")):
        # What torch writes is a ZIP file, whose directory stands at its end.
        if path.is_file() and not zipfile.is_zipfile(path):
            raise DamagedFileError(f"{str(path)!r} is damaged")
